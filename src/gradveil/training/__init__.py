"""Training: the published recipe in PyTorch Lightning, resumable, with checkpoints by step."""

from importlib import import_module
from typing import TYPE_CHECKING

from gradveil.training.job import Recipe, TrainingJob, TrainingResult

if TYPE_CHECKING:
    from gradveil.training.run import train, train_model

__all__ = ["Recipe", "TrainingJob", "TrainingResult", "train", "train_model"]


def __getattr__(name: str) -> object:
    """Import what trains when it is asked for: Lightning takes seconds to load."""
    if name not in ("train", "train_model"):
        raise AttributeError(f"module 'gradveil.training' has no attribute {name!r}")
    return getattr(import_module("gradveil.training.run"), name)
