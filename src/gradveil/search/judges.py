"""The two scores of the paper."""

from gradveil.scores.accuracy import AccuracyScorer
from gradveil.scores.privacy import PrivacyScorer

__all__ = ["AccuracyScorer", "PrivacyScorer"]
