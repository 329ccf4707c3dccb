"""All checks of a case in order, for people and before an audit."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch

from gradveil.attacks import Attack, dlg
from gradveil.checks import attack, inputs, model
from gradveil.checks.subject import Finding, Subject
from gradveil.clients import Client
from gradveil.core.errors import GradveilWarning
from gradveil.core.seeds import following, generator
from gradveil.core.types import Batch, Loss
from gradveil.data import load
from gradveil.engine.device import find_device
from gradveil.models import build
from gradveil.scores import psnr

DATA = "fashion-mnist-mini"
STEPS = 15
ENOUGH = 25.0  # dB: far above any blind guess


def self_check(device: str | torch.device = "auto", *, steps: int = STEPS) -> Finding:
    """A note with the figure, or an error where the image was not reconstructed."""
    place = find_device(device) if isinstance(device, str) else device
    split = load(DATA, "test")
    facts = {"channels": split.channels, "size": split.size, "classes": len(split.classes)}
    model = build("lenet", **facts, mean=split.mean, std=split.std).to(place)
    batch = Batch(split.images[:1].float() / 255, split.labels[:1])
    started = time.perf_counter()
    with _one_thread():
        seen = [
            one
            for one, _ in Client(model, len(split.classes)).share_batches(
                [batch], generator(0, "self-check")
            )
        ]
        (found,) = replace(dlg, steps=steps, frames=0)(seen, generator(0, "self-check", "attack"))
    reached, seconds = float(psnr(found.images.cpu(), batch.images)), time.perf_counter() - started
    effort = f"{steps} steps of dlg, {seconds:.1f} s, {place.type}"
    means = (
        f"an untrained lenet's gradient gave an embedded image back at {reached:.1f} dB ({effort})"
    )
    if reached > ENOUGH:
        return Finding("note", "self-check", means, "nothing to do: attacks work on this machine")
    do = f"above {ENOUGH:.0f} dB is expected: trust no low figure from this machine; reinstall torch, or try --device cpu"
    return Finding("error", "self-check", means, do)


@contextmanager
def _one_thread() -> Iterator[None]:
    """So small a model gains nothing from more, and beside a busy process more are many times slower."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


Check = Callable[[Subject], Finding | None]

FIRST: Mapping[str, Check] = {
    "weights finite": model.weights_not_finite,
    "pixels in [0, 1]": inputs.outside_pixels,
    "model fits the images": inputs.unfit,
    "normalized once": inputs.normalized_twice,
    "gradients finite": model.gradients_not_finite,
    "gradients not zero": model.gradients_zero,
    "something to share": inputs.unshared,
}
"""After an error here the others cannot be made."""

QUICK: Mapping[str, Check] = {
    "dropout off": model.dropout_on,
    "batch norm statistics fixed": model.batch_statistics,
    "one loss": attack.losses_differ,
    "labels inferable": attack.labels_not_inferred,
    "units not saturated": model.saturated,
    "gradients of usual size": model.faded,
    "shares repeatable": model.shares_differ,
    "weights trained": inputs.at_chance,
    "enough candidates": inputs.few_candidates,
    "enough images": inputs.few_images,
}

TRIAL = "attack above blind"
SLOW: Mapping[str, Check] = {
    "victims batched": model.not_batchable,
    TRIAL: attack.no_better_than_blind,
}

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
    """What an audit of this client would meet, most checks looking at the first 8 batches. See `Subject` for what the rest means.

    With an attack, it is run on up to 4 images as it is set: `replace(attack, steps=100)` is enough for a first look.
    """
    case = Subject(client, batches, attack, labels, attacker_loss, public, test, trained, seed)
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
    case = Subject(client, batches, labels=labels, attacker_loss=attacker_loss, seed=seed)
    found = [one for _, one in examine(case, {**FIRST, **QUICK}) if one is not None]
    for one in found:
        if one.level != "note":
            warnings.warn(str(one), GradveilWarning, stacklevel=2)
    return found


def examine(
    case: Subject, checks: Mapping[str, Check] = CHECKS
) -> Iterator[tuple[str, Finding | None]]:
    """Each check's name and what it found, as they are made; an error of the first ones ends it. Without an attack none is judged."""
    for name, check in checks.items():
        if check is attack.no_better_than_blind and case.attack is None:
            continue
        with following(
            generator(case.seed, "check", name)
        ):  # models that draw give the same findings at each call
            found = check(case)
        yield name, found
        if name in FIRST and found is not None and found.level == "error":
            return
