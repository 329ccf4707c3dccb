"""A run's folder: which job it belongs to, and what is left in it when a run fails."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradveil.core.folders import SETTINGS, Kind, remove_empty
from gradveil.core.folders import claim as claim  # a part of this module too

RUN = Kind("a training", "training run")
FINAL = "model.safetensors"
RESUME = "resume.ckpt"
METRICS = "metrics.csv"
STEPS = "steps"
TENSORBOARD = "tensorboard"


def step_path(out: Path, step: int) -> Path:
    return out / STEPS / f"step-{step:06d}.safetensors"


def refuse_other(out: Path, wanted: Mapping[str, Any]) -> None:
    """An error if the folder holds anything but this job's run. Nothing is written."""
    RUN.refuse_other(out, wanted)


def release(out: Path) -> None:
    """After a failure: give the folder back, unless it holds weights or a point to go on from."""
    if (out / RESUME).exists() or any(out.glob(f"{STEPS}/*.safetensors")):
        return
    shutil.rmtree(out / TENSORBOARD, ignore_errors=True)
    for name in (METRICS, SETTINGS):
        (out / name).unlink(missing_ok=True)
    remove_empty(out / STEPS, out)
