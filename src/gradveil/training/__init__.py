"""Training: the published recipe in PyTorch Lightning, resumable, with checkpoints at chosen steps."""

from gradveil.training.jobs import Job, Trained
from gradveil.training.recipe import Recipe
from gradveil.training.runs import train

__all__ = ["Job", "Recipe", "Trained", "train"]
