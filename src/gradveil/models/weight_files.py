"""Weights of any framework, by the names of a model, from files or arrays; never unpickled."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, GradveilWarning, kind_of, one_line
from gradveil.core.files import MissingFileError, regular_file, shown
from gradveil.core.tensor_files import (
    check_name,
    load_pickled,
    plain_tensor,
    read_array,
    read_npz,
    read_safetensors,
)

NESTS = ("state_dict", "model", "model_state_dict", "model_state", "net", "network", "weights")
PREFIXES = ("module.", "model.", "_orig_mod.")  # of DataParallel, of Lightning, of torch.compile
NAMED = 3  # prefixes that a message lists

LEAST = 1 << 26  # bytes that a file of weights may have, however small the model
FLOWER = "numpy.ndarray"  # how Flower says that an array's bytes are those of a .npy file
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


def as_weights(arrays: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Return tensors, NumPy arrays or the arrays of a Flower ArrayRecord as `read_weights` does.

    `name` is what errors call them.
    """
    if not arrays:
        raise GradveilError(f"{name} holds no weights")
    found = {}
    for key, value in arrays.items():
        try:
            found[key] = _as_tensor(value)
        except ValueError as error:
            raise GradveilError(f"{name}: {shown(repr(key))}: {shown(error)}") from None
    return dict(zip(_without_prefix(found), found.values(), strict=True))


def _as_tensor(value: Any) -> Tensor:
    """Return one of them as a dense tensor on the CPU; ValueError says why it is none."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        if not plain_tensor(plain):
            raise ValueError(f"no dense tensor of numbers ({value.dtype})")
        return plain
    if isinstance(getattr(value, "data", None), bytes) and hasattr(value, "stype"):
        if value.stype != FLOWER:
            raise ValueError(f"an array of kind {value.stype!r}; Flower's own are {FLOWER!r}")
        value = read_array(value.data)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"of type {kind}; expected a tensor, a NumPy or a Flower array of numbers")
    return torch.from_numpy(_native(value))


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
    while isinstance(found, Mapping):
        nests = [key for key in NESTS if isinstance(found.get(key), Mapping)]
        if not nests:
            break
        found = found[nests[0]]
    if not isinstance(found, Mapping):
        raise GradveilError(
            f"{path} holds {kind_of(found)}: expected a state dict, names and tensors"
        )
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            label = shown(repr(name)) if isinstance(name, str | int) else kind_of(name)
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


def fit_weights(
    weights: Path | Mapping[str, Any], model: nn.Module, name: str = "weights"
) -> dict[str, Tensor]:
    """Return the tensors of a file, or of arrays by name, by the model's names.

    Buffers may be absent, parameters not. `name` is what errors call arrays that are no file.

    Names may differ by a prefix that all weights of the model have in the file, such as `net.`;
    tensors without it, such as those of a metric, are then left out with a warning.
    """
    state = model.state_dict()
    numbers = sum(value.numel() for value in state.values())
    if isinstance(weights, Path):
        found, path = read_weights(weights, max(LEAST, ROOM * numbers)), weights
    else:
        found, path = as_weights(weights, name), Path(name)
    needed = dict(model.named_parameters())
    named = (
        _by_name(found, state, needed)
        or _by_prefix(found, path, state, needed)
        or _by_order(found, path, (state, needed))
    )
    if named is None:
        absent = next((name for name in needed if _bare(name) not in map(_bare, found)), None)
        first = next((name for name in found if _bare(name) not in map(_bare, state)), None)
        problem = f"it has no {absent!r}" if absent else f"the model has no {first!r}"
        if absent and first:
            problem += f", and the model no {first!r}: name the model that it was saved from"
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


def _by_prefix(
    found: Mapping[str, Tensor],
    path: Path,
    state: Mapping[str, Tensor],
    needed: Mapping[str, Tensor],
) -> dict[str, Tensor] | None:
    """Match names that all have the same prefix in the file, whatever else it holds."""
    full = {_bare(name): name for name in state}
    wanted = [_bare(name) for name in needed]
    if len(full) < len(state) or not wanted:
        return None
    ends = [name.removesuffix(wanted[0]) for name in found if name.endswith(f".{wanted[0]}")]
    fitting = [prefix for prefix in ends if all(prefix + name in found for name in wanted)]
    if len(fitting) > 1:
        raise GradveilError(
            f"{path} holds these weights {len(fitting)} times, as "
            f"{', '.join(f'{prefix}*' for prefix in fitting[:NAMED])}: save those of one alone"
        )
    if not fitting:
        return None
    (prefix,) = fitting
    named = {full[name]: found[prefix + name] for name in full if prefix + name in found}
    if len(named) < len(found):
        taken = {prefix + name for name in full}
        first = next(name for name in found if name not in taken)
        warnings.warn(
            f"{path}: its {prefix}* are the model's weights; {len(found) - len(named)} other "
            f"tensor(s), such as {first!r}, are left out",
            GradveilWarning,
            stacklevel=4,
        )
    return named


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
