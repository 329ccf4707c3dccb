"""All checks in order: for a user's model and images, before an audit, and of this machine."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradveil.attacks import Attack, GradientMatching, dlg
from gradveil.attacks.presets import find_attack
from gradveil.checks import attack as attacker
from gradveil.checks import inputs, model
from gradveil.checks.attack import ScaledCrossEntropy
from gradveil.checks.subject import VICTIMS, Diagnosis, Finding, Subject
from gradveil.clients import Client
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import following, generator
from gradveil.core.types import Batch, Protocol
from gradveil.data import Images, load
from gradveil.data.images import as_images
from gradveil.defenses import Defense, as_defense
from gradveil.defenses.weights import load_weights
from gradveil.engine.device import find_device, sharing_cores
from gradveil.engine.gradients import cross_entropy
from gradveil.models import NormalizedName, build_for
from gradveil.models.checkpoints import read_settings
from gradveil.models.factories import logits, own_copy
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

SPARE = 1_000  # images at most for the accuracy, the candidates and the blind guesses
STANDARD = "adam-cosine"
SHORT = 100  # steps of an attack that is given by name


@public
def doctor(
    model: nn.Module | str | NormalizedName,
    images: Any,
    labels: Any = None,
    *,
    public: Any = None,
    test: Any = None,
    defense: Defense | str = "none",
    attack: Attack | str | None = STANDARD,
    steps: int | None = None,
    checkpoint: Path | str | None = None,
    trained: bool = False,
    batch_size: int = 1,
    know_labels: bool = True,
    train_mode: bool = False,
    local_steps: int = 1,
    local_lr: float = 0.01,
    local_epochs: int = 1,
    local_batch_size: int | None = None,
    client_momentum: float = 0.0,
    client_weight_decay: float = 0.0,
    averaged_clients: int = 1,
    classes: int | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    seed: int = 0,
    data_root: Path | str | None = None,
    device: str = "auto",
    watch: Callable[[str], object] | None = None,
) -> Diagnosis:
    """Say what an audit of this model on these images would meet.

    `model` is any module on images in [0, 1], or a name such as lenet. `images` are a tensor
    (N, C, H, W), with their `labels`, a DataLoader or data set of such pairs, `Images`, or the name
    of a data set, whose test split is meant. `public` are images of the same kind that anyone may
    have, and `test` images that the model was not trained on, in any of those forms but a name; by
    default the training split of a named data set, and `images`. `attack` is tried on up to 4
    images, with `steps` iterations: by default as many as it has, or 100 where it is named; None
    tries none. `checkpoint` is a file of weights; `trained` says that the module has trained ones.
    `watch` is called with the name of each check before it is made. `gradveil doctor --help` says
    the rest.
    """
    where = find_device(device)
    protection = as_defense(defense)
    tried = _tried(attack, steps)
    root = None if data_root is None else Path(data_root)
    if isinstance(images, str):
        if public is None:
            public = load(images, "train", root=root, image_size=image_size, channels=channels)
        split = load(images, "test", root=root, image_size=image_size, channels=channels)
    else:
        split = own_images(images, labels, model, classes)
    made, protected, scale = build_for(model, split, seed, check=False), False, 1.0
    if checkpoint is not None:
        shape = split.channels, split.size, split.size
        made, protected = load_weights(Path(checkpoint), made, protection, shape)
        # Clients share what they train with; the published code halves the loss there alone.
        scale = float(read_settings(Path(checkpoint)).get("loss_scale", 1.0))
    client = Client(
        made.to(where),
        classes=len(split.classes),
        loss=cross_entropy if scale == 1 else ScaledCrossEntropy(scale),
        protocol=Protocol(
            local_steps,
            local_lr,
            train_mode,
            local_epochs,
            local_batch_size,
            client_momentum,
            client_weight_decay,
            averaged_clients,
        ),
        defense=protection,
        protected=protected,
    )
    subject = Subject(
        client,
        _batches(split, batch_size),
        tried,
        "known" if know_labels else "inferred",
        attacker_loss=cross_entropy,
        public=None if public is None else _first(public, "public", split),
        test=_first(split if test is None else test, "test", split),
        trained=trained or checkpoint is not None,
        seed=seed,
    )
    found = diagnose(subject, watch)
    if watch is not None:
        watch("self-check")
    return replace(found, machine=self_check(where))


def own_images(
    images: Any,
    labels: Any,
    model: nn.Module | str | NormalizedName,
    classes: int | None = None,
) -> Images:
    """Make `Images` of a user's, by default with as many classes as a module has logits."""
    found = as_images(images, labels, name="images", split="test", classes=classes)
    if classes is None and isinstance(model, nn.Module) and not isinstance(images, Images):
        example = found.images[:1].float() / 255
        given = logits(own_copy(model), example, type(model).__name__)
        if given.dim() == 2 and given.shape[1] >= len(found.classes):
            return as_images(found, classes=given.shape[1])
    return found


def _tried(attack: Attack | str | None, steps: int | None) -> Attack | None:
    if isinstance(attack, str) and steps is None:
        steps = SHORT
    attack = None if attack is None else find_attack(attack)
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


def _first(images: Any, name: str, like: Images) -> Batch:
    """The first of a user's images, with the classes of these others."""
    split = as_images(images, name=name, classes=like.classes)
    return Batch(split.images[:SPARE].float() / 255, split.labels[:SPARE])


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
    seed: int = 0,
) -> list[Finding]:
    """Make the checks that need no attack, no timing and no other images.

    Errors and warnings among the findings are warned of, and all findings returned.
    """
    subject = Subject(client, batches, labels=labels, seed=seed)
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
        rng = generator(subject.seed, "check", name)
        with following(rng), sharing_cores(subject.example.device):
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
        (found,) = replace(dlg, steps=steps, frames=0)(
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
