"""Training: the published recipe in PyTorch Lightning, resumable, with checkpoints by step."""

from gradveil.training.job import Recipe, TrainingJob, TrainingResult
from gradveil.training.run import train, train_model

__all__ = ["Recipe", "TrainingJob", "TrainingResult", "train", "train_model"]
