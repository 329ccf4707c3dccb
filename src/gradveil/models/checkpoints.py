"""Weights as safetensors, with their settings inside the file and in a JSON file beside it.

Nothing is unpickled.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, contiguous_format, nn

from gradveil.core.errors import GradveilError
from gradveil.core.files import replacing, write_text


def save_checkpoint(path: Path, model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Write the weights to `path`, a .safetensors file, and the settings beside it as .json.

    Both are written or neither.
    """
    if path.suffix != ".safetensors":
        raise GradveilError(f"checkpoint {path}: its name must end in .safetensors")
    text = json.dumps(dict(settings), indent=2, sort_keys=True)
    # A copy of each, because safetensors refuses tensors that share memory, as tied weights do.
    tensors = {
        name: value.detach().cpu().clone(memory_format=contiguous_format)
        for name, value in model.state_dict().items()
    }
    with replacing(path) as temporary:
        temporary.write_bytes(save(tensors, metadata={"gradveil": text}))
        write_text(path.with_suffix(".json"), text + "\n")


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings saved with the weights; none for a file that another program wrote."""
    return _settings(path, _read(path, tensors=False)[1])


def load_checkpoint(path: Path, model: nn.Module) -> nn.Module:
    """Put the weights into the model, which must be like the one they were saved from."""
    found, metadata = _read(path)
    wanted = model.state_dict()
    problem = _mismatch(found, wanted)
    if problem:
        settings, origin = _settings(path, metadata), ""
        if {"model", "data"} <= settings.keys():
            origin = f"; it was saved from {settings['model']} on {settings['data']}"
        raise GradveilError(f"checkpoint {path} does not fit the model: {problem}{origin}")
    model.load_state_dict(found)
    return model


def _settings(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        settings = json.loads(metadata.get("gradveil", "{}"))
    except ValueError as error:
        raise GradveilError(f"the settings inside {path} are no JSON: {error}") from None
    if not isinstance(settings, dict):
        raise GradveilError(
            f"the settings inside {path} are a JSON {type(settings).__name__}: expected an object"
        )
    return settings


def _mismatch(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    for name, value in wanted.items():
        if name not in found:
            return f"it has no {name!r}"
        if found[name].shape != value.shape:
            return f"{name!r} has shape {tuple(found[name].shape)}, the model {tuple(value.shape)}"
        if found[name].is_floating_point() and not bool(found[name].isfinite().all()):
            return f"{name!r} has values that are not finite"
    extra = sorted(found.keys() - wanted.keys())
    return f"the model has no {extra[0]!r}" if extra else ""


def _read(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise GradveilError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys() if tensors else ()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except SafetensorError as error:
        raise GradveilError(f"{path} is no whole safetensors file: {error}") from None
