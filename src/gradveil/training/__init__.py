"""Training: the published recipe in PyTorch Lightning, resumable, with checkpoints at chosen steps."""

from gradveil.training.recipe import Recipe
from gradveil.training.runs import Job, Trained, train

__all__ = ["Job", "Recipe", "Trained", "train"]
