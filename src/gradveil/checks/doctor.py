"""All checks in order: for a user's model and images, before an audit, and of this machine."""

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradveil.attacks import Attack, GradientMatching, find
from gradveil.attacks.presets import SECOND_ORDER
from gradveil.checks import attack as attacker
from gradveil.checks import inputs, model
from gradveil.checks.attack import ScaledCrossEntropy
from gradveil.checks.subject import VICTIMS, Finding, Subject
from gradveil.clients import Client
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import following, generator
from gradveil.core.types import Batch, Loss, Protocol
from gradveil.data import Images, load
from gradveil.defenses import Defense, parse
from gradveil.defenses.weights import load_weights
from gradveil.engine.device import find_device
from gradveil.engine.gradients import cross_entropy
from gradveil.models import build_for
from gradveil.models.checkpoints import read_settings
from gradveil.scores import psnr

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
"""After an error of one of these the others cannot be made."""

QUICK: Mapping[str, Check] = {
    "dropout off": model.dropout_on,
    "batch norm statistics fixed": model.batch_statistics,
    "one loss": attacker.losses_differ,
    "labels inferable": attacker.labels_not_inferred,
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
    TRIAL: attacker.no_better_than_blind,
}

CHECKS: Mapping[str, Check] = {**FIRST, **QUICK, **SLOW}
"""Every check, by a name that says what is true where it finds nothing."""

LEVELS = ("error", "warning", "note")
SPARE = 1_000  # images at most for the accuracy, the candidates and the blind guesses
STANDARD = "adam-cosine"
SHORT = 100  # steps of an attack that is given by name
NO_DEFENSE = Defense()
ONE_STEP = Protocol()


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What the checks found, those that found nothing, and those that could not be made.

    `machine` is what the self-check of this machine found, where it was made. It prints as text,
    and `plain` gives the same for programs.
    """

    findings: tuple[Finding, ...]
    silent: tuple[str, ...]
    skipped: tuple[str, ...]
    machine: Finding | None = None

    @property
    def everything(self) -> tuple[Finding, ...]:
        """All findings, that of the self-check last."""
        return self.findings if self.machine is None else (*self.findings, self.machine)

    @property
    def errors(self) -> int:
        """The number of findings that are errors."""
        return sum(found.level == "error" for found in self.everything)

    def plain(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "findings": [found.plain() for found in self.everything],
            "silent": list(self.silent),
            "skipped": list(self.skipped),
            "errors": self.errors,
        }

    def to_json(self) -> str:
        """Return one JSON object as text."""
        return json.dumps(self.plain())

    def __str__(self) -> str:
        """Two lines for each finding, the worst first, then the silent and the skipped checks."""
        ordered = sorted(self.findings, key=lambda found: LEVELS.index(found.level))
        lines = [line for found in ordered for line in _in_words(found)]
        for word, names in (("well", self.silent), ("skipped", self.skipped)):
            if names:
                lines.append(f"{word:<8}{len(names)} checks: {', '.join(names)}")
        return "\n".join([*lines, *(() if self.machine is None else _in_words(self.machine))])

    __repr__ = __str__


def _in_words(found: Finding) -> tuple[str, str]:
    return f"{found.level:<8}{found.name}: {found.means}", f"{'':<8}{found.do}"


def doctor(
    model: nn.Module | str,
    images: Images | str,
    *,
    defense: Defense | str = NO_DEFENSE,
    attack: Attack | str | None = STANDARD,
    steps: int | None = None,
    public: Images | None = None,
    test: Images | None = None,
    checkpoint: Path | str | None = None,
    trained: bool = False,
    batch_size: int = 1,
    labels_known: bool = True,
    protocol: Protocol = ONE_STEP,
    root: Path | str | None = None,
    image_size: int | None = None,
    seed: int = 0,
    device: str = "auto",
    watch: Callable[[str], object] | None = None,
) -> Diagnosis:
    """Say what an audit of this model on these images would meet.

    `model` is a module, the name of one or `package.module:factory`; `images` are the clients', or
    the name of a data set, whose test split is taken (below `root`, resized to `image_size`).
    `attack` is tried on up to 4 images: `steps` iterations, by default as many as it has, or 100
    where it is given by name; None tries none. `test` are images that the model was not trained on,
    by default `images`; `public` are images of the same kind that anyone may have, by default the
    training split of the data set. `checkpoint` is a file of weights; `trained` says that the
    module has trained ones. `watch` is called with the name of each check before it is made.
    """
    where = find_device(device)
    protection = parse(defense) if isinstance(defense, str) else defense
    tried = _tried(attack, steps)
    folder = None if root is None else Path(root)
    if isinstance(images, str):
        public = public or load(images, "train", root=folder, image_size=image_size)
        images = load(images, "test", root=folder, image_size=image_size)
    if not isinstance(images, Images):
        raise GradveilError(
            f"images: a {type(images).__name__}; expected Images or the name of a data set"
        )
    batches = _batches(images, batch_size)
    client = _client(model, images, protection, protocol, checkpoint, seed, where)
    subject = Subject(
        client,
        batches,
        tried,
        "known" if labels_known else "inferred",
        attacker_loss=cross_entropy,
        public=None if public is None else _first(public),
        test=_first(images if test is None else test),
        trained=trained or checkpoint is not None,
        seed=seed,
    )
    found = diagnose(subject, watch)
    if watch is not None:
        watch("self-check")
    return replace(found, machine=self_check(where))


def _tried(attack: Attack | str | None, steps: int | None) -> Attack | None:
    if isinstance(attack, str):
        attack, steps = find(attack), SHORT if steps is None else steps
    if attack is not None and not isinstance(attack, Attack):
        raise GradveilError(f"attack: a {type(attack).__name__}; expected an Attack or its name")
    if steps is not None and steps < 0:
        raise GradveilError(f"steps {steps}: there must be at least 0")
    if steps is None or not isinstance(attack, GradientMatching):
        return None if steps == 0 else attack
    return replace(attack, steps=steps) if steps else None


def _batches(split: Images, size: int) -> list[Batch]:
    """The batches of the first victims, all of one size."""
    if size < 1:
        raise GradveilError(f"batch size {size}: it must be at least 1")
    if size > len(split):
        raise GradveilError(
            f"batch size {size}: {split.name} {split.split} has {len(split)} images"
        )
    count = min(VICTIMS, len(split) // size) * size
    images, labels = split.images[:count].float() / 255, split.labels[:count]
    return [Batch(*pair) for pair in zip(images.split(size), labels.split(size), strict=True)]


def _first(split: Images) -> Batch:
    return Batch(split.images[:SPARE].float() / 255, split.labels[:SPARE])


def _client(
    model: nn.Module | str,
    split: Images,
    defense: Defense,
    protocol: Protocol,
    checkpoint: Path | str | None,
    seed: int,
    device: torch.device,
) -> Client:
    made, protected, scale = build_for(model, split, seed, check=False), False, 1.0
    if checkpoint is not None:
        path = Path(checkpoint)
        shape = split.channels, split.size, split.size
        made, protected = load_weights(path, made, defense, shape)
        # Clients share what they train with; the published code halves the loss there alone.
        scale = float(read_settings(path).get("loss_scale", 1.0))
    return Client(
        made.to(device),
        classes=len(split.classes),
        loss=cross_entropy if scale == 1 else ScaledCrossEntropy(scale),
        protocol=protocol,
        defense=defense,
        protected=protected,
    )


def diagnose(subject: Subject, watch: Callable[[str], object] | None = None) -> Diagnosis:
    """Make every check of a client, most of them on its first 8 batches.

    An attack is run on up to 4 images as it is set: `replace(attack, steps=100)` is enough for a
    first look. `watch` is called with the name of each check before it is made.
    """
    made = dict(examine(subject, CHECKS, watch))
    return Diagnosis(
        tuple(found for found in made.values() if found is not None),
        tuple(name for name, found in made.items() if found is None),
        tuple(name for name in CHECKS if name not in made),
    )


def before_audit(
    client: Client,
    batches: Sequence[Batch],
    *,
    labels: Literal["known", "inferred"] = "known",
    attacker_loss: Loss | None = None,
    seed: int = 0,
) -> list[Finding]:
    """Make the checks that need no attack, no timing and no other images.

    Errors and warnings among the findings are warned of, and all findings returned.
    """
    subject = Subject(client, batches, labels=labels, attacker_loss=attacker_loss, seed=seed)
    checks = {**FIRST, **QUICK}
    findings = [found for _, found in examine(subject, checks) if found is not None]
    for found in findings:
        if found.level != "note":
            warnings.warn(str(found), GradveilWarning, stacklevel=2)
    return findings


def examine(
    subject: Subject,
    checks: Mapping[str, Check],
    watch: Callable[[str], object] | None = None,
) -> Iterator[tuple[str, Finding | None]]:
    """Make checks one by one, and give the name of each with what it found.

    An error of one of the first checks ends it. Without an attack the check of one is left out.
    """
    for name, check in checks.items():
        if check is attacker.no_better_than_blind and subject.attack is None:
            continue
        if watch is not None:
            watch(name)
        # A model that draws gives the same findings at each call.
        with following(generator(subject.seed, "check", name)):
            found = check(subject)
        yield name, found
        if name in FIRST and found is not None and found.level == "error":
            return


DATA = "fashion-mnist-mini"
STEPS = 15
ENOUGH = 25.0  # dB: far above any blind guess


def self_check(device: str | torch.device = "auto", *, steps: int = STEPS) -> Finding:
    """Reconstruct an embedded image from an untrained model's gradient, to see that attacks work.

    The finding is a note with the figure, or an error where the image was not reconstructed.
    """
    where = find_device(device) if isinstance(device, str) else device
    split = load(DATA, "test")
    victim = build_for("lenet", split).to(where)
    image: Tensor = split.images[:1].float() / 255
    started = time.perf_counter()
    with _single_thread():
        (shared,) = Client(victim, len(split.classes)).share_batches(
            [Batch(image, split.labels[:1])], generator(0, "self-check")
        )
        (found,) = replace(SECOND_ORDER, steps=steps, frames=0)(
            [shared.seen], generator(0, "self-check", "attack")
        )
    reached, seconds = float(psnr(found.images.cpu(), image)), time.perf_counter() - started
    means = (
        f"an untrained lenet's gradient gave an embedded image back at {reached:.1f} dB "
        f"({steps} steps of dlg, {seconds:.1f} s, {where.type})"
    )
    if reached > ENOUGH:
        return Finding("note", "self-check", means, "nothing to do: attacks work on this machine")
    do = (
        f"above {ENOUGH:.0f} dB is expected: trust no low figure from this machine; "
        "reinstall torch, or try --device cpu"
    )
    return Finding("error", "self-check", means, do)


@contextmanager
def _single_thread() -> Iterator[None]:
    """Compute with one thread: so small a model gains nothing from more, and beside a busy process
    several are many times slower.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)
