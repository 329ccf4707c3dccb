"""What a search asks of a score."""

from gradveil.scores.scorers import Scorer

__all__ = ["Scorer"]
