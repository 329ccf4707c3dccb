"""A run's folder: which job it belongs to, and what is left in it when a run fails."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError
from gradveil.core.files import write_text

SETTINGS = "settings.json"
FINAL = "model.safetensors"
RESUME = "resume.ckpt"
METRICS = "metrics.csv"
STEPS = "steps"
TENSORBOARD = "tensorboard"


def step_path(out: Path, step: int) -> Path:
    return out / STEPS / f"step-{step:06d}.safetensors"


def refuse_other(out: Path, wanted: Mapping[str, Any]) -> None:
    """An error if the folder holds anything but this job's run. Nothing is written."""
    if out.exists() and not out.is_dir():
        raise GradveilError(f"{out} is a file: choose another --out, a folder")
    path = out / SETTINGS
    if not path.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise GradveilError(f"{out} is not empty and holds no training run: choose another --out")
        return
    try:
        found = dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise GradveilError(f"{path} is no JSON object of settings: choose another --out") from None
    other = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if other:
        changes = ", ".join(f"{key} {found.get(key)} there, {wanted.get(key)} here" for key in other)
        raise GradveilError(f"{out} holds a run with other settings ({changes}): choose another --out")


def claim(out: Path, wanted: Mapping[str, Any]) -> None:
    """Make the folder this job's own, and rid it of files that a killed run was writing."""
    for unfinished in [*out.glob(".*.part"), *out.glob(f"{STEPS}/.*.part")]:
        unfinished.unlink(missing_ok=True)
    if not (out / SETTINGS).is_file():
        write_text(out / SETTINGS, json.dumps(dict(wanted), indent=2, sort_keys=True) + "\n")


def release(out: Path) -> None:
    """After a failure: give the folder back, unless it holds weights or a point to go on from."""
    if (out / RESUME).exists() or any(out.glob(f"{STEPS}/*.safetensors")):
        return
    shutil.rmtree(out / TENSORBOARD, ignore_errors=True)
    for name in (METRICS, SETTINGS):
        (out / name).unlink(missing_ok=True)
    for folder in (out / STEPS, out):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
