"""Weights as safetensors, with their settings inside the file and in a JSON file beside it.

Weights of other programs can be read too. Files are never unpickled in a way that runs code.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from safetensors.torch import save
from torch import Tensor, contiguous_format, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.files import MissingFileError, regular_file, replacing, shown, write_text
from gradveil.core.formats import CheckpointFacts, Count
from gradveil.core.reading import MalformedError, WrongTypeError, convert, parse_json, written_by
from gradveil.core.tensor_files import (
    load_pickled,
    plain_tensor,
    read_safetensors,
    safetensors_header,
)
from gradveil.models.base import Normalize
from gradveil.models.weight_files import fit_weights

SUFFIX = ".safetensors"


def save_checkpoint(path: Path, model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Write weights and settings to `path`, which must end in .safetensors.

    The settings also go to the same name with .json. Both files are written or neither.
    """
    if path.suffix != SUFFIX:
        raise GradveilError(f"checkpoint {path}: its name must end in .safetensors")
    try:
        text = json.dumps(dict(settings), indent=2, sort_keys=True, allow_nan=False)
    except ValueError:
        raise GradveilError(
            f"checkpoint {path}: its settings hold NaN or infinity, which JSON has not"
        ) from None
    # A copy of each, because safetensors refuses tensors that share memory, as tied weights do.
    tensors = {
        name: value.detach().cpu().clone(memory_format=contiguous_format)
        for name, value in model.state_dict().items()
    }
    with replacing(path) as temporary:
        temporary.write_bytes(save(tensors, metadata={"gradveil": text}))
        write_text(path.with_suffix(".json"), text + "\n")


def read_settings(path: Path, needed: Iterable[str] = ()) -> dict[str, Any]:
    """Return the settings saved with the weights, checked; none of another program's file.

    They are hints: a file may have been changed or renamed. One of `needed` that is absent is an
    error.
    """
    try:
        foreign = path.suffix != SUFFIX and bool(regular_file(path))
        settings = {} if foreign else _settings(path, safetensors_header(path).metadata)
    except MissingFileError:
        raise GradveilError(f"no checkpoint at {shown(path)}") from None
    for name in needed:
        if name not in settings:
            raise GradveilError(f"the settings inside {shown(path)}: {name}: missing")
    return settings


def load_checkpoint(path: Path, model: nn.Module) -> nn.Module:
    """Put the weights into the model, which must be like the one they were saved from.

    A file of another program may be of any kind that `weight_files` reads.
    """
    found, metadata = _read(path) if path.suffix == SUFFIX else ({}, {})
    settings, wanted = _settings(path, metadata), model.state_dict()
    if not settings and (path.suffix != SUFFIX or found.keys() != wanted.keys()):
        found = wanted | _fitted(path, model)
    problem = mismatch(found, wanted)
    if problem:
        origin = _channels(problem)
        if {"model", "data"} <= settings.keys():
            origin += f"; it was saved from {settings['model']} on {settings['data']}"
        raise GradveilError(f"checkpoint {path} does not fit the model: {problem}{origin}")
    model.load_state_dict(found)
    return model


def _fitted(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return another program's weights by the model's names; refuse absent running statistics."""
    try:
        regular_file(path)
        found = fit_weights(path, model)
    except MissingFileError:
        raise GradveilError(f"no checkpoint at {shown(path)}") from None
    except GradveilError as error:
        raise GradveilError(f"checkpoint {error}{_channels(str(error))}") from None
    constants = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        for part in ("mean", "std", "num_batches_tracked")
        if isinstance(module, Normalize | _BatchNorm)
    }
    absent = [name for name in model.state_dict() if name not in found.keys() | constants]
    if absent:
        raise GradveilError(f"checkpoint {path} does not fit the model: it has no {absent[0]!r}")
    return found


def _channels(problem: str) -> str:
    """Say how to give images of as many channels as a first layer in the file takes."""
    pattern = r"has shape \((\d+), (\d), (\d+), (\d+)\), the model \(\1, (\d), \3, \4\)$"
    if (shapes := re.search(pattern, problem)) is None:
        return ""
    theirs, ours = shapes[2], shapes[5]
    return f"; it takes images of {theirs} channel(s), these have {ours}: give channels {theirs}"


class ResumeState(Struct, frozen=True):
    """What Lightning and the training keep of a stopped run, but for the tensors."""

    epoch: Count
    global_step: Count
    loops: dict[str, dict[str, Any]]
    history: list[dict[str, float]]
    optimizer_states: list[dict[str, Any]]
    lr_schedulers: list[Any]
    callbacks: dict[str, Any] = {}
    defense: Any = None


VERSION = "pytorch-lightning_version"
HISTORY = {"epoch", "train_loss", "test_accuracy"}  # figures of an epoch that are used again


def read_resume(path: Path) -> dict[str, Any]:
    """Return the state of a stopped training, as `torch.load` gives it, every part checked.

    An error says to delete the file: the training then starts again.
    """
    try:
        found = load_pickled(path)
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise GradveilError(f"{kind_of(found)}, no dictionary of names")
        weights = found.get("state_dict")
        if not isinstance(weights, dict) or not all(map(plain_tensor, weights.values())):
            raise GradveilError("state_dict: expected names and tensors")
        if not isinstance(found.get(VERSION), str):
            raise GradveilError(f"{VERSION}: expected str")
        state = convert(
            {name: value for name, value in found.items() if name in FIELDS}, ResumeState, ""
        )
        if len({frozenset(row) for row in state.history}) > 1:
            raise GradveilError("history: rows with other names than the first")
        if not all(row.keys() >= HISTORY for row in state.history):
            raise GradveilError(f"history: expected {', '.join(sorted(HISTORY))}")
    except MissingFileError:
        raise
    except GradveilError as error:
        text = str(error).removeprefix(f"{shown(path)} is refused: ")
        raise damaged_resume(path, text) from error
    return found


def damaged_resume(path: Path, problem: str) -> GradveilError:
    """Return the error for a file that a training cannot go on from."""
    return GradveilError(
        f"{shown(path)} is damaged ({shown(problem)}): delete it, and the training starts again"
    )


FIELDS = frozenset(ResumeState.__struct_fields__)


def _settings(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    text, where = metadata.get("gradveil", "{}"), f"the settings inside {shown(path)}"
    try:
        settings = parse_json(text.encode(), dict[str, Any], where)
    except MalformedError as error:
        raise GradveilError(f"{where} are no JSON: {error.problem}") from None
    except WrongTypeError as error:
        raise GradveilError(f"{where} are no JSON object: {error}") from None
    try:
        convert(settings, CheckpointFacts, where)
    except WrongTypeError as error:
        raise WrongTypeError(f"{error}{written_by(settings)}") from None
    return settings


def mismatch(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Say why these tensors cannot replace the wanted ones; empty where they can."""
    for name, value in wanted.items():
        if name not in found:
            return f"it has no {name!r}"
        if found[name].shape != value.shape:
            return f"{name!r} has shape {tuple(found[name].shape)}, the model {tuple(value.shape)}"
        if found[name].is_floating_point() and not bool(found[name].isfinite().all()):
            return f"{name!r} has values that are not finite"
    extra = sorted(found.keys() - wanted.keys())
    return f"the model has no {extra[0]!r}" if extra else ""


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        return read_safetensors(path)
    except MissingFileError:
        raise GradveilError(f"no checkpoint at {shown(path)}") from None
