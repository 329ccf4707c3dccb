"""Gaussian filters as two matrix products in float64: exact on every device, where a float32 convolution may be rounded to TF32."""

import torch
from torch import Tensor


def smooth(planes: Tensor, sigma: float) -> Tensor:
    """Same size; near an edge the weights inside the picture are scaled up to one."""
    rows, columns = (_within(length, sigma).to(planes.device) for length in planes.shape[-2:])
    return rows @ planes @ columns.T


def windows(planes: Tensor, sigma: float, width: int) -> Tensor:
    """Gaussian means over every window of `width` x `width` pixels that lies inside the picture."""
    rows, columns = (_inside(length, sigma, width).to(planes.device) for length in planes.shape[-2:])
    return rows @ planes @ columns.T


def _within(length: int, sigma: float) -> Tensor:
    place = torch.arange(length, dtype=torch.float64)
    weights = (-(place[:, None] - place).square() / (2 * sigma**2)).exp()
    return weights / weights.sum(dim=1, keepdim=True)


def _inside(length: int, sigma: float, width: int) -> Tensor:
    place = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    kernel = (-place.square() / (2 * sigma**2)).exp()
    kernel = kernel / kernel.sum()
    bands = torch.zeros(length - width + 1, length, dtype=torch.float64)
    for start, band in enumerate(bands):
        band[start : start + width] = kernel
    return bands
