"""A client's update from its weights before and after its local training: two files, or arrays.

They may come from any framework; files are read and never unpickled.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack, GradientMatching, Progress
from gradveil.attacks.base import check_attack
from gradveil.attacks.blind import find_means
from gradveil.attacks.labels import Counted
from gradveil.attacks.presets import find, find_attack
from gradveil.audits.attackers import AUTO, check_told
from gradveil.audits.fits import Tried, automatic_attacks, try_each
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning, kind_of
from gradveil.core.importing import user_code
from gradveil.core.seeds import as_generator
from gradveil.core.types import (
    MEANINGS,
    Knowledge,
    Loss,
    Observation,
    Protocol,
    Reconstruction,
)
from gradveil.data import Images, load
from gradveil.defenses import Defense, as_defense
from gradveil.defenses.applied import check_defense, known_in_mode, protected_model
from gradveil.engine.device import find_device
from gradveil.engine.gradients import cross_entropy, in_mode, trainable
from gradveil.engine.norms import Running
from gradveil.engine.shares import Shares, as_one_client
from gradveil.models import NormalizedName, build_for
from gradveil.models.bottleneck import penalties
from gradveil.models.factories import logits, own_copy
from gradveil.models.weight_files import fit_weights
from gradveil.scores import assign, psnr, ssim
from gradveil.transforms import Policy

UNINFORMED = Knowledge()
UNDEFENDED = Defense()
AUDITED = "a single update does not show it; an audit, which makes the updates itself, runs this"
WHENCE = {
    "means": "give images of the client's kind that anyone may have",
    "transform": AUDITED,
    "earlier": AUDITED,
}
"""How to know what the client's defense does not tell of its update."""

Weights = Path | Mapping[str, Any]
"""A file of weights, or arrays by name: a state dict, or an ArrayRecord of Flower."""


def observe_update(
    before: Weights,
    after: Weights,
    model: nn.Module,
    *,
    loss: Loss,
    image_shape: tuple[int, int, int],
    classes: int,
    size: int,
    protocol: Protocol,
    knowledge: Knowledge = UNINFORMED,
    defense: Defense = UNDEFENDED,
) -> Observation:
    """Return the observation of (before - after) / local rate for each trainable parameter.

    The weights and running statistics of `before` are loaded into the model; in train mode those
    of `after` are known, too. So is what the `defense` tells; the layers that it puts into a model
    are in this one already.
    """
    if len(image_shape) != 3 or min(*image_shape, size, classes) < 1:
        raise GradveilError(
            f"image shape {image_shape}, size {size}, classes {classes}: "
            "expected (C, H, W) and numbers of at least 1"
        )
    parameters = trainable(model)
    example = next(iter(parameters.values()))
    blank = example.new_zeros(size, *image_shape)
    Shares(model, loss, protocol).check(blank, classes + penalties(model))
    _check_loss(loss, example.new_zeros(size, classes + penalties(model)))
    was, became = fit_weights(before, model, "before"), fit_weights(after, model, "after")
    before, after = (
        given if isinstance(given, Path) else Path(name)
        for given, name in ((before, "before"), (after, "after"))
    )
    _tell_left_out(model, before, was, became)
    # In float64, so that nothing is lost of a small step.
    steps = {
        name: (was[name].double() - became[name].double()) / protocol.local_lr
        for name in parameters
    }
    if not any(bool(step.any()) for step in steps.values()):
        raise GradveilError(f"{before} and {after} hold the same weights: nothing was shared")
    gradients = {
        name: step.to(example.device, parameters[name].dtype) for name, step in steps.items()
    }
    model.load_state_dict(was, strict=False)
    with in_mode(model, protocol.train_mode):
        names = [name for name in Running(model).values() if name in became]
    kept = {name: became[name].to(example) for name in names}
    knowledge = replace(knowledge, statistics=kept or None)
    knowledge = known_in_mode(defense, knowledge, model, protocol.train_mode)
    return Observation(model, loss, gradients, image_shape, size, classes, protocol, knowledge)


def _check_loss(loss: Loss, logits: Tensor) -> None:
    """Refuse a loss that does not give one value for each image."""
    name = getattr(loss, "__name__", type(loss).__name__)
    labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    with user_code(f"loss {name} failed"):
        values: object = loss(logits, labels)
    if not isinstance(values, Tensor) or values.shape != labels.shape:
        found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else kind_of(values)
        raise GradveilError(
            f"loss {name} gave {found} for {len(logits)} image(s): expected one value for each, "
            'as with reduction="none"'
        )


def _tell_left_out(
    model: nn.Module, before: Path, was: Mapping[str, Tensor], became: Mapping[str, Tensor]
) -> None:
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    moved = next((name for name in frozen if not torch.equal(was[name], became[name])), None)
    if moved is not None:
        text = (
            f"{moved!r} changed, but the model holds it frozen, so its update is left out; "
            "requires_grad_() would add it"
        )
        warnings.warn(text, GradveilWarning, stacklevel=3)
    buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    absent = sorted(buffers - was.keys())
    if absent:
        text = (
            f"{before} has no {absent[0]!r}: the model keeps its own for {len(absent)} buffer(s), "
            "such as running statistics"
        )
        warnings.warn(text, GradveilWarning, stacklevel=3)


class Settings(TypedDict, total=False):
    """What `reconstruct` takes beside the attack, for its types."""

    images: Images | str | None
    image_shape: tuple[int, int, int] | None
    size: int
    steps: int | None
    loss: Loss
    defense: Defense | Policy | str
    train_mode: bool
    local_steps: int
    local_lr: float
    local_epochs: int
    local_batch_size: int | None
    client_momentum: float
    client_weight_decay: float
    averaged_clients: int
    image_size: int | None
    channels: int | None
    seed: int | Generator
    data_root: Path | str | None
    device: str
    progress: Progress | None


@overload
def reconstruct(  # type: ignore[overload-overlap]  # a text that is not known may be auto
    before: Path | str | Mapping[str, Any],
    after: Path | str | Mapping[str, Any],
    model: nn.Module | str | NormalizedName,
    *,
    attack: Literal["auto"],
    **more: Unpack[Settings],
) -> Tried: ...


@overload
def reconstruct(
    before: Path | str | Mapping[str, Any],
    after: Path | str | Mapping[str, Any],
    model: nn.Module | str | NormalizedName,
    *,
    attack: Attack | str = "dlg",
    **more: Unpack[Settings],
) -> Reconstruction: ...


@public
def reconstruct(
    before: Path | str | Mapping[str, Any],
    after: Path | str | Mapping[str, Any],
    model: nn.Module | str | NormalizedName,
    *,
    images: Images | str | None = None,
    image_shape: tuple[int, int, int] | None = None,
    size: int = 1,
    attack: Attack | str = "dlg",
    steps: int | None = None,
    loss: Loss = cross_entropy,
    defense: Defense | Policy | str = "none",
    train_mode: bool = False,
    local_steps: int = 1,
    local_lr: float = 0.01,
    local_epochs: int = 1,
    local_batch_size: int | None = None,
    client_momentum: float = 0.0,
    client_weight_decay: float = 0.0,
    averaged_clients: int = 1,
    image_size: int | None = None,
    channels: int | None = None,
    seed: int | Generator = 0,
    data_root: Path | str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Reconstruction | Tried:
    """Reconstruct a client's images from its weights before and after its training.

    These are files, state dicts, or Flower's ArrayRecords. `model` is a module, which stays as it
    is, or a name such as lenet. A name needs `images` of the client's kind that anyone may have, or
    the name of a data set, for the image shape, the classes and the normalization; a module needs
    these or `image_shape`, (C, H, W). The client made `local_steps` steps of SGD with rate
    `local_lr` over its `size` images, or went through them in mini-batches, as `Protocol` says; the
    update may be the mean of `averaged_clients` that have these images in equal parts.
    `defense` is the client's, as far as the attacker is told of it: attacks such as masked need to
    know it, and the layers that it puts into a model are in the weights. Labels are inferred.
    `loss` gives one value for each image. `progress` is called with the iterations done, and all.

    With `attack="auto"` every attack that an audit's auto means for the defense is run, and a
    `Tried` has what each found, and why others found nothing: which is right cannot be told
    without the images.
    """
    where, known = find_device(device), as_defense(defense)
    check_defense(known)
    _check_steps(steps)
    alone = None if attack == AUTO else _prepared(_find(attack), steps)
    if isinstance(images, str):
        root = None if data_root is None else Path(data_root)
        images = load(images, "test", root=root, image_size=image_size, channels=channels)
    made, image_shape, classes = _model(model, images, image_shape)
    network = protected_model(known, made, image_shape).to(where)
    protocol = Protocol(
        local_steps,
        local_lr,
        train_mode,
        local_epochs,
        local_batch_size,
        client_momentum,
        client_weight_decay,
        averaged_clients,
    )
    seen = observe_update(
        Path(before) if isinstance(before, str) else before,
        Path(after) if isinstance(after, str) else after,
        network,
        loss=known.protect_loss(loss),
        image_shape=image_shape,
        classes=classes,
        size=size,
        protocol=as_one_client(protocol, network, size, image_shape),
        defense=known,
    )

    def run(name: Attack | str, chosen: Attack) -> Reconstruction:
        told = seen
        if images is not None and "means" in chosen.needs:
            means = find_means(images.images, images.labels, classes).classes.to(where)
            told = replace(seen, knowledge=replace(seen.knowledge, means=means))
        _check_told(chosen, name, told)
        (found,) = chosen([told], as_generator(seed, "reconstruct"), progress)
        return found

    if alone is not None:
        return run(attack, alone)
    chosen = automatic_attacks(known, made, size, train_mode)
    iterated = {name for name, each in chosen.items() if isinstance(each, GradientMatching)}
    return try_each(
        {
            name: _prepared(each, steps if name in iterated else None)
            for name, each in chosen.items()
        },
        run,
    )


def _find(attack: Attack | str) -> Attack:
    return find(attack, (AUTO,)) if isinstance(attack, str) else find_attack(attack)


def _model(
    model: nn.Module | str | NormalizedName,
    images: Images | None,
    image_shape: tuple[int, int, int] | None,
) -> tuple[nn.Module, tuple[int, int, int], int]:
    """Return the client's model, the shape of its images, and the number of classes."""
    if images is not None:
        made = build_for(model, images, check=False)
        return made, (images.channels, images.size, images.size), len(images.classes)
    if isinstance(model, str | NormalizedName) or image_shape is None:
        raise GradveilError(
            "reconstruct: the image shape is not known; give images of the client's kind, or a "
            "module and image_shape, such as (3, 32, 32)"
        )
    made = own_copy(model)
    if min(image_shape) < 1:
        raise GradveilError(f"image shape {image_shape}: expected (C, H, W), at least 1 each")
    answers = logits(made, torch.zeros(1, *image_shape), type(model).__name__)
    if answers.dim() != 2 or len(answers) != 1:
        raise GradveilError(
            f"model {type(model).__name__} gave {tuple(answers.shape)} for one image: expected "
            "(1, classes)"
        )
    return made, image_shape, answers.shape[1]


def _check_told(attack: Attack, name: Attack | str, seen: Observation) -> None:
    """Refuse an attack that needs what neither the defense nor the update tells."""
    check_attack(attack)
    called = name if isinstance(name, str) else type(name).__name__
    for need, whence in WHENCE.items():
        if need in attack.needs and getattr(seen.knowledge, need) is None:
            raise GradveilError(
                f"attack {called} needs to know the {need} ({MEANINGS[need].long}): {whence}"
            )
    check_told(called, attack, [seen])


def score(
    found: Reconstruction, truth: Tensor, name: str
) -> tuple[Reconstruction, dict[str, list[float]]]:
    """Put a reconstruction into the order of the true images, and score each: PSNR and SSIM.

    `truth` has the client's images, (N, C, H, W) in [0, 1]; `name` is what an error calls them.
    There is no line-up: that takes a pool of other images.
    """
    images = found.images.detach().cpu().float().clamp(0, 1)
    if truth.shape != images.shape:
        raise GradveilError(
            f"truth of {name}: images of shape {tuple(truth.shape)}; the reconstruction has "
            f"{tuple(images.shape)}"
        )
    true = truth.detach().cpu().float()
    order = assign(images, true) if len(images) > 1 else torch.zeros(1, dtype=torch.long)
    ordered = images[order]
    # An exact copy would be infinite, which JSON cannot hold.
    scores = {
        "psnr": psnr(ordered, true).clamp(max=200).tolist(),
        "ssim": ssim(ordered, true).tolist(),
    }
    labels = None if found.labels is None else found.labels.cpu()[order]
    return Reconstruction(ordered, labels, found.distance, found.status), scores


def _check_steps(steps: int | None) -> None:
    if steps is not None and steps < 1:
        raise GradveilError(f"steps {steps}: there must be at least 1")


def _prepared(attack: Attack, steps: int | None) -> Attack:
    """Let the attack infer the labels, and give it this number of iterations."""
    if isinstance(attack, GradientMatching):
        return replace(attack, labels=Counted(), steps=attack.steps if steps is None else steps)
    if steps is not None:
        raise GradveilError(f"attack {attack} has no iterations: leave the steps out")
    return attack
