"""All checks of a case in order, for people and before an audit."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from gradveil.attacks import Attack
from gradveil.checks import accuracies, blind, draws, engines, inputs, labels, losses, modes, shapes, weights
from gradveil.checks.cases import Case
from gradveil.checks.findings import Finding
from gradveil.clients import Client
from gradveil.core.errors import GradveilWarning
from gradveil.core.gradients import Loss
from gradveil.core.seeds import following, generator
from gradveil.core.types import Batch

Check = Callable[[Case], Finding | None]

FIRST: Mapping[str, Check] = {
    "weights finite": weights.weights_not_finite,
    "pixels in [0, 1]": inputs.outside_pixels,
    "model fits the images": shapes.unfit,
    "normalized once": inputs.normalized_twice,
    "gradients finite": weights.gradients_not_finite,
    "gradients not zero": weights.gradients_zero,
    "something to share": shapes.unshared,
}
"""After an error here the others cannot be made."""

QUICK: Mapping[str, Check] = {
    "dropout off": modes.dropout_on,
    "batch norm statistics fixed": modes.batch_statistics,
    "one loss": losses.losses_differ,
    "labels inferable": labels.labels_not_inferred,
    "units not saturated": weights.saturated,
    "gradients of usual size": weights.faded,
    "shares repeatable": draws.shares_differ,
    "weights trained": accuracies.at_chance,
    "enough candidates": inputs.few_candidates,
    "enough images": inputs.few_images,
}

TRIAL = "attack above blind"
SLOW: Mapping[str, Check] = {"victims batched": engines.not_batchable, TRIAL: blind.no_better_than_blind}

CHECKS: Mapping[str, Check] = {**FIRST, **QUICK, **SLOW}
"""By what is so where the check stays silent."""


def diagnose(
    client: Client,
    batches: Sequence[Batch],
    attack: Attack | None = None,
    *,
    labels: Literal["known", "inferred"] = "known",
    attacker_loss: Loss | None = None,
    public: Batch | None = None,
    test: Batch | None = None,
    trained: bool = False,
    seed: int = 0,
) -> list[Finding]:
    """What an audit of this client would meet, most checks looking at the first 8 batches. See `Case` for what the rest means.

    With an attack, it is run on up to 4 images as it is set: `replace(attack, steps=100)` is enough for a first look.
    """
    case = Case(client, batches, attack, labels, attacker_loss, public, test, trained, seed)
    return [found for _, found in examine(case) if found is not None]


def before_audit(
    client: Client,
    batches: Sequence[Batch],
    *,
    labels: Literal["known", "inferred"] = "known",
    attacker_loss: Loss | None = None,
    seed: int = 0,
) -> list[Finding]:
    """The checks that need no attack, no timing and no other images. Each warning is warned of, and so is what will be an error."""
    case = Case(client, batches, labels=labels, attacker_loss=attacker_loss, seed=seed)
    found = [one for _, one in examine(case, {**FIRST, **QUICK}) if one is not None]
    for one in found:
        if one.level != "note":
            warnings.warn(str(one), GradveilWarning, stacklevel=2)
    return found


def examine(case: Case, checks: Mapping[str, Check] = CHECKS) -> Iterator[tuple[str, Finding | None]]:
    """Each check's name and what it found, as they are made; an error of the first ones ends it. Without an attack none is judged."""
    for name, check in checks.items():
        if check is blind.no_better_than_blind and case.attack is None:
            continue
        with following(generator(case.seed, "check", name)):  # models that draw give the same findings at each call
            found = check(case)
        yield name, found
        if name in FIRST and found is not None and found.level == "error":
            return
