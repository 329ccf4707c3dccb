"""How alike two images are: a number for each pair, and the Gaussian filters they need.

Every score takes `found` and `truth` as floats (N, C, H, W) in [0, 1], computes in float64 and
returns (N,) float64. Clamp first if values outside [0, 1] should not count. NaN or infinity in a
found image gives NaN or the worst value, never an error.
"""

from functools import lru_cache

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError, kind_of

SSIM_WINDOW = 11
SSIM_SIGMA = 1.5
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2


def mse(found: Tensor, truth: Tensor) -> Tensor:
    """Return the mean squared difference."""
    found, truth = pair(found, truth)
    return (found - truth).square().mean(dim=(1, 2, 3))


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB, for images in [0, 1]; infinite where equal."""
    return decibels(mse(found, truth))


def ssim(found: Tensor, truth: Tensor) -> Tensor:
    """Return the structural similarity, k1 = 0.01, k2 = 0.03, as the mean over the channels.

    Gaussian windows of 11 x 11 pixels (sigma 1.5) lie inside the picture. Pictures smaller than 11
    pixels get the largest window of odd width that fits.
    """
    found, truth = pair(found, truth)
    side = min(*found.shape[-2:], SSIM_WINDOW)
    width = side - (side + 1) % 2

    def local(values: Tensor) -> Tensor:
        return windows(values, SSIM_SIGMA, width)

    mean_f, mean_t = local(found), local(truth)
    var_f, var_t = local(found.square()) - mean_f.square(), local(truth.square()) - mean_t.square()
    covariance = local(found * truth) - mean_f * mean_t
    luminance = (2 * mean_f * mean_t + SSIM_C1) / (mean_f.square() + mean_t.square() + SSIM_C1)
    structure = (2 * covariance + SSIM_C2) / (var_f + var_t + SSIM_C2)
    return (luminance * structure).mean(dim=(1, 2, 3))


def psnr_affine(found: Tensor, truth: Tensor) -> Tensor:
    """Return the PSNR in dB after the affine map of the colors that brings found nearest to truth.

    Each image has its map, so right shapes in wrong colors count; the score is never below that of
    the best single color. Colors are centered, y = B x; directions in which they vary by less than
    1e-6 are left out.
    """
    found, truth = pair(found, truth)
    x, y = found.flatten(2), truth.flatten(2)
    x, y = x - x.mean(dim=2, keepdim=True), y - y.mean(dim=2, keepdim=True)
    gram = x @ x.mT / x.shape[2]
    usable = gram.isfinite().all(dim=2).all(dim=1)[:, None, None]
    gram, x = torch.where(usable, gram, 0.0), torch.where(usable, x, torch.nan)
    inverse = torch.linalg.pinv(gram, atol=1e-12, rtol=1e-12, hermitian=True)
    mapping = (y @ x.mT / x.shape[2]) @ inverse
    return decibels((y - mapping @ x).square().mean(dim=(1, 2)))


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


def decibels(error: Tensor) -> Tensor:
    """Turn a mean squared error of values in [0, 1] into a peak signal-to-noise ratio."""
    return -10 * error.log10()


def pair(found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in float64, after a check that they are images of the same shape."""
    for name, images in (("found", found), ("truth", truth)):
        if not isinstance(images, Tensor):
            raise GradveilError(f"{name}: {kind_of(images)}; expected a torch.Tensor")
        if images.ndim != 4 or not images.is_floating_point():
            kind = f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
            raise GradveilError(
                f"{name} is {kind}: "
                "expected floats in [0, 1] of shape (images, channels, height, width)"
            )
    if found.shape != truth.shape:
        raise GradveilError(
            f"found has shape {tuple(found.shape)} and truth {tuple(truth.shape)}: "
            "they must be the same"
        )
    return found.double(), truth.double()


def smooth(planes: Tensor, sigma: float) -> Tensor:
    """Return Gaussian means of the same size; near an edge the weights inside are scaled to 1."""
    rows, columns = (_within(length, sigma, planes.device) for length in planes.shape[-2:])
    return rows @ planes @ columns.T


def windows(planes: Tensor, sigma: float, width: int) -> Tensor:
    """Return Gaussian means over every window of `width` x `width` pixels inside the picture."""
    rows, columns = (
        _inside(length, sigma, width).to(planes.device) for length in planes.shape[-2:]
    )
    return rows @ planes @ columns.T


@lru_cache(maxsize=16)
def _within(length: int, sigma: float, device: torch.device) -> Tensor:
    x = torch.arange(length, dtype=torch.float64)
    weights = (-(x[:, None] - x).square() / (2 * sigma**2)).exp()
    return (weights / weights.sum(dim=1, keepdim=True)).to(device)


def _inside(length: int, sigma: float, width: int) -> Tensor:
    x = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    kernel = (-x.square() / (2 * sigma**2)).exp()
    kernel = kernel / kernel.sum()
    bands = torch.zeros(length - width + 1, length, dtype=torch.float64)
    for start, band in enumerate(bands):
        band[start : start + width] = kernel
    return bands
