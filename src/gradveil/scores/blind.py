"""Decibels over blind guesses: the part of a score that is owed to the gradient."""

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.scores.images import psnr


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
