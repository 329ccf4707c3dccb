"""How much of the private images a reconstruction shows: one number for each image."""

from gradveil.scores.assignment import assign
from gradveil.scores.blind import class_means, gray, mean_color, mean_image, noise, over_blind
from gradveil.scores.identification import identify, rank, signatures
from gradveil.scores.images import mse, psnr, psnr_affine, ssim

__all__ = [
    "assign",
    "class_means",
    "gray",
    "identify",
    "mean_color",
    "mean_image",
    "mse",
    "noise",
    "over_blind",
    "psnr",
    "psnr_affine",
    "rank",
    "signatures",
    "ssim",
]
