"""What a picture scores that owes nothing to the gradient: blind guesses, and the decibels above the best of them."""

import torch
from torch import Generator, Tensor

from gradveil.core import GradveilError
from gradveil.scores.images import psnr

Shape = tuple[int, int, int]


def over_blind(found: Tensor, truth: Tensor, guesses: Tensor) -> Tensor:
    """PSNR of found less the highest PSNR of any guess, for each image.

    `guesses` are (guesses, C, H, W), the same for all images, or (images, guesses, C, H, W). Where found and a guess are both
    exact, the difference is 0; NaN or infinity in found gives NaN or minus infinity.
    """
    own = guesses.ndim == 5
    if (
        guesses.ndim not in (4, 5)
        or guesses.shape[-3:] != truth.shape[1:]
        or guesses.shape[-4] == 0
        or (own and len(guesses) != len(truth))
    ):
        expected = f"(guesses, {', '.join(map(str, truth.shape[1:]))})"
        raise GradveilError(
            f"guesses has shape {tuple(guesses.shape)}: expected {expected}, or one such set for each of {len(truth)} images"
        )
    guesses = guesses.to(truth.device)
    scores = [
        psnr(guesses[:, g] if own else guesses[g].expand_as(truth), truth)
        for g in range(guesses.shape[-4])
    ]
    best = torch.stack(scores).amax(dim=0)
    reached = psnr(found, truth)
    return torch.where(best.isposinf() & reached.isposinf(), 0.0, reached - best)


def gray(shape: Shape) -> Tensor:
    """One guess: every value 0.5."""
    return torch.full((1, *shape), 0.5)


def noise(shape: Shape, count: int, rng: Generator) -> Tensor:
    """`count` guesses, each value uniform in [0, 1]."""
    return torch.rand(count, *shape, generator=rng, device=rng.device)


def mean_color(images: Tensor) -> Tensor:
    """One guess: the mean of each channel over a data set, everywhere."""
    return _some(images).mean(dim=(0, 2, 3), keepdim=True).expand(1, *images.shape[1:]).clone()


def mean_image(images: Tensor) -> Tensor:
    """One guess: the mean of a data set, pixel by pixel."""
    return _some(images).mean(dim=0, keepdim=True)


def class_means(images: Tensor, labels: Tensor) -> Tensor:
    """One guess for each class that occurs, in the order of the labels: its mean image."""
    if labels.shape != images.shape[:1]:
        raise GradveilError(
            f"labels has shape {tuple(labels.shape)}: expected one label for each of {len(images)} images"
        )
    return torch.cat([mean_image(images[labels == label]) for label in torch.unique(_some(labels))])


def _some(values: Tensor) -> Tensor:
    if len(values) == 0:
        raise GradveilError("no images to take a mean of: expected at least one")
    return values
