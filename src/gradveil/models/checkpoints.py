"""Weights as safetensors, with their settings inside the file and in a JSON file beside it.

Nothing is unpickled but the state of a stopped training, and that without running any code.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from safetensors.torch import save
from torch import Tensor, contiguous_format, nn

from gradveil.core.errors import GradveilError
from gradveil.core.files import MissingFileError, replacing, shown, write_text
from gradveil.core.formats import CheckpointFacts, Count
from gradveil.core.reading import MalformedError, WrongTypeError, convert, parse_json, written_by
from gradveil.core.tensor_files import (
    load_pickled,
    plain_tensor,
    read_safetensors,
    safetensors_header,
)


def save_checkpoint(path: Path, model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Write weights and settings to `path`, which must end in .safetensors.

    The settings also go to the same name with .json. Both files are written or neither.
    """
    if path.suffix != ".safetensors":
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
    """The settings saved with the weights, their types checked; empty for another program's file.

    They are hints: a file may have been changed or renamed. One of `needed` that is absent is an
    error.
    """
    try:
        metadata = safetensors_header(path).metadata
    except MissingFileError:
        raise GradveilError(f"no checkpoint at {shown(path)}") from None
    settings = _settings(path, metadata)
    for name in needed:
        if name not in settings:
            raise GradveilError(f"the settings inside {shown(path)}: {name}: missing")
    return settings


def load_checkpoint(path: Path, model: nn.Module) -> nn.Module:
    """Put the weights into the model, which must be like the one they were saved from."""
    found, metadata = _read(path)
    wanted = model.state_dict()
    problem = mismatch(found, wanted)
    if problem:
        settings, origin = _settings(path, metadata), ""
        if {"model", "data"} <= settings.keys():
            origin = f"; it was saved from {settings['model']} on {settings['data']}"
        raise GradveilError(f"checkpoint {path} does not fit the model: {problem}{origin}")
    model.load_state_dict(found)
    return model


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
    """The state of a stopped training, as `torch.load` gives it, after a look at every part of it.

    An error says to delete the file: the training then starts again.
    """
    try:
        found = load_pickled(path)
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise GradveilError(f"a {type(found).__name__}, no dictionary of names")
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
    """The error for a file that a training cannot go on from."""
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
