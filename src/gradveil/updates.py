"""A client's update from two files of weights, before and after its local training.

The files may come from any framework; they are read and never unpickled.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack, GradientMatching, Progress
from gradveil.attacks.labels import Counted
from gradveil.attacks.presets import find_attack
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import as_generator
from gradveil.core.types import Knowledge, Loss, Observation, Protocol, Reconstruction
from gradveil.data import Images, load
from gradveil.engine.device import find_device
from gradveil.engine.gradients import cross_entropy, in_mode, trainable
from gradveil.engine.norms import Running
from gradveil.engine.shares import Shares
from gradveil.models import NormalizedName, build_for
from gradveil.models.factories import logits, own_copy
from gradveil.models.weight_files import fit_weights

UNINFORMED = Knowledge()


def observe_update(
    before: Path,
    after: Path,
    model: nn.Module,
    *,
    loss: Loss,
    image_shape: tuple[int, int, int],
    classes: int,
    size: int,
    protocol: Protocol,
    knowledge: Knowledge = UNINFORMED,
) -> Observation:
    """Return the observation of (before - after) / local rate for each trainable parameter.

    The weights and running statistics of `before` are loaded into the model; in train mode those
    of `after` are known, too.
    """
    if len(image_shape) != 3 or min(*image_shape, size, classes) < 1:
        raise GradveilError(
            f"image shape {image_shape}, size {size}, classes {classes}: "
            "expected (C, H, W) and numbers of at least 1"
        )
    parameters = trainable(model)
    example = next(iter(parameters.values()))
    Shares(model, loss, protocol).check(example.new_zeros(size, *image_shape), classes)
    was, became = fit_weights(before, model), fit_weights(after, model)
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
    return Observation(model, loss, gradients, image_shape, size, classes, protocol, knowledge)


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


@public
def reconstruct(
    before: Path | str,
    after: Path | str,
    model: nn.Module | str | NormalizedName,
    *,
    images: Images | str | None = None,
    image_shape: tuple[int, int, int] | None = None,
    size: int = 1,
    attack: Attack | str = "dlg",
    steps: int | None = None,
    loss: Loss = cross_entropy,
    train_mode: bool = False,
    local_steps: int = 1,
    local_lr: float = 0.01,
    local_epochs: int = 1,
    local_batch_size: int | None = None,
    client_momentum: float = 0.0,
    client_weight_decay: float = 0.0,
    image_size: int | None = None,
    channels: int | None = None,
    seed: int | Generator = 0,
    data_root: Path | str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Reconstruction:
    """Reconstruct a client's images from the files of its weights before and after its training.

    `model` is a module, which stays as it is, or a name such as lenet. A name needs `images` of the
    client's kind, or the name of a data set, for the image shape, the classes and the
    normalization; a module needs these or `image_shape`, (C, H, W). The client made `local_steps`
    steps of SGD with rate `local_lr` over its `size` images, or went through them in mini-batches,
    as `Protocol` says. Labels are inferred. `progress` is called with the iterations done, and all.
    """
    where = find_device(device)
    chosen = _prepared(find_attack(attack), steps)
    if isinstance(images, str):
        root = None if data_root is None else Path(data_root)
        images = load(images, "test", root=root, image_size=image_size, channels=channels)
    if images is not None:
        made, classes = build_for(model, images, check=False), len(images.classes)
        image_shape = images.channels, images.size, images.size
    elif isinstance(model, str | NormalizedName) or image_shape is None:
        raise GradveilError(
            "reconstruct: the image shape is not known; give images of the client's kind, or a "
            "module and image_shape, such as (3, 32, 32)"
        )
    else:
        made = own_copy(model)
        if min(image_shape) < 1:
            raise GradveilError(f"image shape {image_shape}: expected (C, H, W), at least 1 each")
        answers = logits(made, torch.zeros(1, *image_shape), type(model).__name__)
        if answers.dim() != 2 or len(answers) != 1:
            raise GradveilError(
                f"model {type(model).__name__} gave {tuple(answers.shape)} for one image: expected "
                "(1, classes)"
            )
        classes = answers.shape[1]
    seen = observe_update(
        Path(before),
        Path(after),
        made.to(where),
        loss=loss,
        image_shape=image_shape,
        classes=classes,
        size=size,
        protocol=Protocol(
            local_steps,
            local_lr,
            train_mode,
            local_epochs,
            local_batch_size,
            client_momentum,
            client_weight_decay,
        ),
    )
    (found,) = chosen([seen], as_generator(seed, "reconstruct"), progress)
    return found


def _prepared(attack: Attack, steps: int | None) -> Attack:
    """Let the attack infer the labels, and give it this number of iterations."""
    if steps is not None and steps < 1:
        raise GradveilError(f"steps {steps}: there must be at least 1")
    if isinstance(attack, GradientMatching):
        return replace(attack, labels=Counted(), steps=attack.steps if steps is None else steps)
    if steps is not None:
        raise GradveilError(f"attack {attack} has no iterations: leave the steps out")
    return attack
