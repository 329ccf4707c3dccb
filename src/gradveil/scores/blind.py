"""Decibels over blind guesses: the part of a score that is owed to the gradient."""

import torch
from torch import Generator, Tensor

from gradveil.core import GradveilError
from gradveil.scores.images import psnr

ImageShape = tuple[int, int, int]


def over_blind(found: Tensor, truth: Tensor, guesses: Tensor) -> Tensor:
    """Return the PSNR of each found image less the highest PSNR of any guess, (images,) in dB.

    `guesses` are (guesses, C, H, W), the same for all images, or (images, guesses, C, H, W). Where
    found and a guess are both exact, the difference is 0; NaN or infinity in found gives NaN or
    minus infinity.
    """
    separate = guesses.ndim == 5
    if (
        guesses.ndim not in (4, 5)
        or guesses.shape[-3:] != truth.shape[1:]
        or guesses.shape[-4] == 0
        or (separate and len(guesses) != len(truth))
    ):
        expected = f"(guesses, {', '.join(map(str, truth.shape[1:]))})"
        raise GradveilError(
            f"guesses has shape {tuple(guesses.shape)}: expected {expected}, or one such set for "
            f"each of {len(truth)} images"
        )
    guesses = guesses.to(truth.device)
    scores = [
        psnr(guesses[:, g] if separate else guesses[g].expand_as(truth), truth)
        for g in range(guesses.shape[-4])
    ]
    best = torch.stack(scores).amax(dim=0)
    reached = psnr(found, truth)
    return torch.where(best.isposinf() & reached.isposinf(), 0.0, reached - best)


def gray(shape: ImageShape) -> Tensor:
    """Return one guess (1, C, H, W): every value 0.5."""
    return torch.full((1, *shape), 0.5)


def noise(shape: ImageShape, count: int, rng: Generator) -> Tensor:
    """Return `count` guesses (count, C, H, W), each value uniform in [0, 1]."""
    return torch.rand(count, *shape, generator=rng, device=rng.device)


def mean_color(images: Tensor) -> Tensor:
    """Return one guess (1, C, H, W): the mean of each channel over a data set, everywhere."""
    color = _at_least_one(images).mean(dim=(0, 2, 3), keepdim=True)
    return color.expand(1, *images.shape[1:]).clone()


def mean_image(images: Tensor) -> Tensor:
    """Return one guess (1, C, H, W): the mean of a data set, pixel by pixel."""
    return _at_least_one(images).mean(dim=0, keepdim=True)


def _at_least_one(images: Tensor) -> Tensor:
    if len(images) == 0:
        raise GradveilError("no images to take a mean of: expected at least one")
    return images
