"""Translate, shear and rotate, pixel for pixel as Pillow does them.

Where each output pixel comes from depends on the size, the magnitude and the sign only, never on
the picture. So the source positions are worked out once on the host, in the arithmetic of Pillow's
C code, and kept.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLACK = 0
GRAY = 128


def translate_x(images: Tensor, fraction: float, signs: Tensor) -> Tensor:
    """Shift by a fraction of the width: to the left for a positive sign; black comes in."""
    width = images.shape[3]
    return _by_sign(
        images, signs, lambda rows, sign: _shifted(rows, _steps(fraction * width * sign), dim=3)
    )


def translate_y(images: Tensor, fraction: float, signs: Tensor) -> Tensor:
    """Shift by a fraction of the height: upwards for a positive sign; black comes in."""
    height = images.shape[2]
    return _by_sign(
        images, signs, lambda rows, sign: _shifted(rows, _steps(fraction * height * sign), dim=2)
    )


def shear_x(images: Tensor, factor: float, signs: Tensor) -> Tensor:
    """Let x read from x + sign * factor * y, bicubic; black comes in."""
    return _by_sign(images, signs, lambda rows, sign: _sheared(rows, factor * sign, dim=3))


def shear_y(images: Tensor, factor: float, signs: Tensor) -> Tensor:
    """Let y read from y + sign * factor * x, bicubic; black comes in."""
    return _by_sign(images, signs, lambda rows, sign: _sheared(rows, factor * sign, dim=2))


def rotate(images: Tensor, degrees: float, _signs: Tensor) -> Tensor:
    """Turn counter-clockwise about the center, nearest pixel; gray comes in at the corners."""
    if degrees % 360 == 0:
        return images
    height, width = images.shape[2:]
    source, inside = rotation_sources(degrees, height, width, images.device)
    turned = images.flatten(2).index_select(2, source)
    return torch.where(inside, turned, GRAY).to(torch.uint8).view_as(images)


def _by_sign(images: Tensor, signs: Tensor, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply `change` to the rows of each sign."""
    out = torch.empty_like(images)
    for sign in (-1, 1):
        rows = (signs == sign).nonzero().squeeze(1).to(images.device, non_blocking=True)
        out[rows] = change(images[rows], sign)
    return out


def _steps(distance: float) -> int:
    """Return how many pixels a nearest-pixel translation by `distance` moves.

    Pixel x reads from floor(x + 1/2 + distance).
    """
    return math.floor(distance + 0.5)


def _shifted(images: Tensor, steps: int, dim: int) -> Tensor:
    """Return out[i] = images[i + steps] along `dim`, black outside."""
    size = images.shape[dim]
    kept = max(size - abs(steps), 0)
    out = torch.full_like(images, BLACK)
    if kept:
        out.narrow(dim, max(-steps, 0), kept).copy_(images.narrow(dim, max(steps, 0), kept))
    return out


def _sheared(images: Tensor, factor: float, dim: int) -> Tensor:
    height, width = images.shape[2:]
    sources, offset, inside = shear_sources(factor, height, width, dim, images.device)
    pixels = images.flatten(2)
    v1, v2, v3, v4 = (pixels.index_select(2, source).short() for source in sources)
    # The cubic through four neighbors, v2 + d (p2 + d (p3 + d p4)), in double and in this order:
    # Pillow's rounding depends on it.
    p2, p3, p4 = v3 - v1, 2 * (v1 - v2) + v3 - v4, v2 - v1 - v3 + v4
    value = (offset * p4).add_(p3).mul_(offset).add_(p2).mul_(offset).add_(v2).clamp_(0, 255)
    return value.mul_(inside).to(torch.uint8).view_as(images)  # black, which is zero, outside


@lru_cache(maxsize=256)
def shear_sources(
    factor: float, height: int, width: int, dim: int, device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return, for each output pixel, its four source pixels along `dim`, and two more facts.

    These are its position between the middle two of them, and whether it is inside.
    """
    y, x = (grid + 0.5 for grid in np.mgrid[0:height, 0:width].astype(np.float64))
    along, size = (x + factor * y, width) if dim == 3 else (factor * x + y, height)
    inside = (along >= 0) & (along < size)
    first = np.floor(along - 0.5)
    offset = along - 0.5 - first
    taps = [np.clip(first + k, 0, size - 1).astype(np.int64) for k in (-1, 0, 1, 2)]
    row, column = y.astype(np.int64), x.astype(np.int64)
    flat = [row * width + tap if dim == 3 else tap * width + column for tap in taps]
    return tuple(_on(index, device) for index in flat), _on(offset, device), _on(inside, device)


@lru_cache(maxsize=256)
def rotation_sources(
    degrees: float, height: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return, for each output pixel, its source pixel and whether it is inside.

    The arithmetic is Pillow's, 16.16 fixed point.
    """
    angle = -math.radians(degrees % 360)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    center_x, center_y = width / 2, height / 2
    right = cos * -center_x + sin * -center_y + center_x
    down = -sin * -center_x + cos * -center_y + center_y
    y, x = np.mgrid[0:height, 0:width].astype(np.int64)
    source_x = (_fixed(right + cos * 0.5 + sin * 0.5) + x * _fixed(cos) + y * _fixed(sin)) >> 16
    source_y = (_fixed(down - sin * 0.5 + cos * 0.5) + x * _fixed(-sin) + y * _fixed(cos)) >> 16
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    return _on(np.where(inside, source_y * width + source_x, 0), device), _on(inside, device)


def _fixed(value: float) -> int:
    return math.floor(value * 65536 + 0.5)


def _on(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).flatten().to(device)
