"""A client's update from two files of weights, before and after its local training.

The files may come from any framework; they are read and never unpickled.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack, GradientMatching
from gradveil.attacks.labels import Counted
from gradveil.attacks.presets import find_attack
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.files import MissingFileError, regular_file, shown
from gradveil.core.seeds import as_generator
from gradveil.core.tensor_files import (
    check_name,
    load_pickled,
    plain_tensor,
    read_npz,
    read_safetensors,
)
from gradveil.core.types import Knowledge, Loss, Observation, Protocol, Reconstruction
from gradveil.data import Images, load
from gradveil.engine.device import find_device
from gradveil.engine.gradients import cross_entropy, in_mode, trainable
from gradveil.engine.norms import Running
from gradveil.engine.shares import Shares
from gradveil.models import build_for
from gradveil.models.factories import logits, own_copy

NESTS = ("state_dict", "model", "model_state_dict")
PREFIXES = ("module.", "model.", "_orig_mod.")  # of DataParallel, of Lightning, of torch.compile
UNINFORMED = Knowledge()


LEAST = 1 << 26  # bytes that a file of weights may have, however small the model
ROOM = 64  # bytes for each number of a model: float64, and as much again for an optimizer's state


def read_weights(path: Path, most: int | None = None) -> dict[str, Tensor]:
    """Read weights onto the CPU, in the file's order, without a prefix such as `module.` of all.

    `most` bounds the bytes that they take; by default 1 GiB, or 20 times the size of the file.
    """
    if path.suffix.lower() not in READERS:
        raise GradveilError(
            f"weights {path}: unknown kind {path.suffix!r}; choose from {', '.join(READERS)}"
        )
    try:
        regular_file(path)
        found = READERS[path.suffix.lower()](path, most)
    except MissingFileError:
        raise GradveilError(f"no weights file at {shown(path)}") from None
    except GradveilError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        raise GradveilError(
            f"{path} cannot be read as {path.suffix}: {shown(one_line(error))}"
        ) from error
    if not found:
        raise GradveilError(f"{path} holds no weights")
    return dict(zip(_without_prefix(found), found.values(), strict=True))


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
    was, became = _fitted(before, model), _fitted(after, model)
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


def _safetensors(path: Path, most: int | None) -> dict[str, Tensor]:
    """Read tensors, which take no more memory than the file: that has at most `most` bytes."""
    size = regular_file(path).st_size
    if most is not None and size > most:
        raise GradveilError(f"{shown(path)} is refused: it has {size:,} bytes, at most {most:,}")
    try:
        return read_safetensors(path)[0]
    except GradveilError as error:
        raise GradveilError(
            f"{shown(path)} cannot be read as .safetensors: {shown(error)}"
        ) from None


def _npz(path: Path, most: int | None) -> dict[str, Tensor]:
    return {name: torch.from_numpy(_native(array)) for name, array in read_npz(path, most).items()}


def _native(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return the array in this machine's byte order, which torch asks for."""
    return array.astype(array.dtype.newbyteorder("="))


def _torch(path: Path, most: int | None) -> dict[str, Tensor]:
    wanted = "save plain weights: torch.save(model.state_dict(), path)"
    try:
        found = load_pickled(path, most)
    except GradveilError as error:
        raise GradveilError(f"{error}; {wanted}") from error.__cause__
    nest = next(
        (
            key
            for key in NESTS
            if isinstance(found, Mapping) and isinstance(found.get(key), Mapping)
        ),
        None,
    )
    found = found if nest is None else found[nest]
    if not isinstance(found, Mapping):
        raise GradveilError(
            f"{path} holds a {type(found).__name__}: expected a state dict, names and tensors"
        )
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            label = shown(repr(name)) if isinstance(name, str | int) else f"a {type(name).__name__}"
            raise GradveilError(
                f"{path} holds {label} of type {type(value).__name__}:"
                " expected a state dict, names and tensors"
            )
        check_name(name, path)
        if not plain_tensor(value):
            raise GradveilError(
                f"{path}: {shown(name)!r} is no dense tensor of numbers ({value.dtype}); {wanted}"
            )
    return {name: value.detach() for name, value in found.items()}


READERS: dict[str, Callable[[Path, int | None], dict[str, Tensor]]] = {
    ".safetensors": _safetensors,
    ".npz": _npz,
    ".pt": _torch,
    ".pth": _torch,
    ".ckpt": _torch,
}


def _without_prefix(names: Mapping[str, object]) -> list[str]:
    short = list(names)
    while prefix := next(
        (prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in short)), ""
    ):
        short = [name.removeprefix(prefix) for name in short]
    return short


def _bare(name: str) -> str:
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


def _fitted(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The file's tensors by the model's own names. Buffers may be absent, parameters not."""
    state = model.state_dict()
    numbers = sum(value.numel() for value in state.values())
    found = read_weights(path, max(LEAST, ROOM * numbers))
    needed = dict(model.named_parameters())
    named = _by_name(found, state, needed) or _by_order(found, path, (state, needed))
    if named is None:
        absent = next((name for name in needed if _bare(name) not in map(_bare, found)), None)
        first = next((name for name in found if _bare(name) not in map(_bare, state)), None)
        problem = f"it has no {absent!r}" if absent else f"the model has no {first!r}"
        raise GradveilError(f"{path} does not fit the model: {problem}")
    for name, value in named.items():
        _check_tensor(f"{path}: {name!r}", value, state[name], name in needed)
    return named


def _by_name(
    found: Mapping[str, Tensor], state: Mapping[str, Tensor], needed: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    renames: tuple[Callable[[str], str], ...] = (str, _bare)
    for rename in renames:
        full = {rename(name): name for name in state}
        named = {full[rename(name)]: value for name, value in found.items() if rename(name) in full}
        if len(named) == len(found) and needed.keys() <= named.keys():
            return named
    return None


def _by_order(
    found: Mapping[str, Tensor], path: Path, choices: tuple[Mapping[str, Tensor], ...]
) -> dict[str, Tensor] | None:
    """Match by order a file that lists the shapes of the model, or of its parameters alone."""
    if path.suffix.lower() == ".safetensors":  # sorts its tensors, so their order means nothing
        return None
    for wanted in choices:
        if [value.shape for value in found.values()] == [value.shape for value in wanted.values()]:
            pair = f"{next(iter(found))!r} taken for {next(iter(wanted))!r}"
            warnings.warn(
                f"{path}: its names are not the model's; matched by order, {pair} and so on",
                GradveilWarning,
                stacklevel=4,
            )
            return dict(zip(wanted, found.values(), strict=True))
    return None


def _check_tensor(name: str, value: Tensor, like: Tensor, parameter: bool) -> None:
    if value.shape != like.shape:
        raise GradveilError(f"{name} has shape {tuple(value.shape)}, the model {tuple(like.shape)}")
    if parameter and not value.is_floating_point():
        raise GradveilError(f"{name} is of type {value.dtype}; expected floating point")
    if value.is_floating_point() and not bool(value.isfinite().all()):
        raise GradveilError(f"{name} has values that are not finite: the training diverged")


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
    model: nn.Module | str,
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
    seed: int | Generator = 0,
    data_root: Path | str | None = None,
    device: str = "auto",
) -> Reconstruction:
    """Reconstruct a client's images from the files of its weights before and after its training.

    `model` is a module, which stays as it is, or a name such as lenet. A name needs `images` of the
    client's kind, or the name of a data set, for the image shape, the classes and the
    normalization; a module needs these or `image_shape`, (C, H, W). The client made `local_steps`
    steps of SGD with rate `local_lr` over its `size` images, or went through them in mini-batches,
    as `Protocol` says. Labels are inferred.
    """
    where = find_device(device)
    chosen = _prepared(find_attack(attack), steps)
    if isinstance(images, str):
        root = None if data_root is None else Path(data_root)
        images = load(images, "test", root=root, image_size=image_size)
    if images is not None:
        made, classes = build_for(model, images, check=False), len(images.classes)
        image_shape = images.channels, images.size, images.size
    elif isinstance(model, str) or image_shape is None:
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
    (found,) = chosen([seen], as_generator(seed, "reconstruct"))
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
