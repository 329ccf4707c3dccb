"""Scores: how much of the private images a reconstruction shows, and how good a policy is."""

from gradveil.scores.accuracy import AccuracyScorer, accuracy_score
from gradveil.scores.identification import assign, identify, rank, rank_among, signatures
from gradveil.scores.images import mse, over_blind, psnr, psnr_affine, ssim
from gradveil.scores.privacy import PrivacyScorer, privacy_score
from gradveil.scores.scorer import Estimate, Scorer

__all__ = [
    "AccuracyScorer",
    "Estimate",
    "PrivacyScorer",
    "Scorer",
    "accuracy_score",
    "assign",
    "identify",
    "mse",
    "over_blind",
    "privacy_score",
    "psnr",
    "psnr_affine",
    "rank",
    "rank_among",
    "signatures",
    "ssim",
]
