"""Training: the published recipe in PyTorch Lightning, resumable, with checkpoints at chosen steps."""

from gradveil.training.job import Recipe, TrainingJob, TrainingResult
from gradveil.training.run import train

__all__ = ["Recipe", "TrainingJob", "TrainingResult", "train"]
