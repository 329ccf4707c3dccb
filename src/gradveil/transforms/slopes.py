"""A smooth stand-in for each operation, for its slope: a function of float images in 0..255, beside the whole numbers they stand for."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.transforms import geometry
from gradveil.transforms.colors import BLUE, GREEN, RED
from gradveil.transforms.geometry import GREY, _rotation, _shear

Slope = Callable[[Tensor, Tensor, float, Tensor], Tensor]
"""(soft, exact, magnitude, signs) -> soft; `exact` has the same values as uint8."""

WINDOW = 8  # grey levels to each side over which a histogram is smoothed


def translate_x(soft: Tensor, _: Tensor, fraction: float, signs: Tensor) -> Tensor:
    return geometry.translate_x(soft, fraction, signs)


def translate_y(soft: Tensor, _: Tensor, fraction: float, signs: Tensor) -> Tensor:
    return geometry.translate_y(soft, fraction, signs)


def shear_x(soft: Tensor, _: Tensor, factor: float, signs: Tensor) -> Tensor:
    return _sheared(soft, factor, signs, dim=3)


def shear_y(soft: Tensor, _: Tensor, factor: float, signs: Tensor) -> Tensor:
    return _sheared(soft, factor, signs, dim=2)


def _sheared(soft: Tensor, factor: float, signs: Tensor, dim: int) -> Tensor:
    """Both ways for every image, and then its own: cheaper to differentiate than a choice of rows."""
    both = [_resampled(soft, factor * sign, dim) for sign in (-1, 1)]
    return torch.where((signs == 1).to(soft.device).view(-1, 1, 1, 1), both[1], both[0])


def _resampled(soft: Tensor, factor: float, dim: int) -> Tensor:
    """The cubic through four neighbors: linear in their values."""
    sources, offset, inside = _shear(factor, *soft.shape[2:], dim, soft.device)
    pixels = soft.flatten(2)
    v1, v2, v3, v4 = (pixels.index_select(2, source) for source in sources)
    d = offset.to(soft.dtype)
    value = v2 + d * ((v3 - v1) + d * ((2 * (v1 - v2) + v3 - v4) + d * (v2 - v1 - v3 + v4)))
    return (value * inside).view_as(soft)


def rotate(soft: Tensor, _: Tensor, degrees: float, __: Tensor) -> Tensor:
    if degrees % 360 == 0:
        return soft
    source, inside = _rotation(degrees, *soft.shape[2:], soft.device)
    return torch.where(inside, soft.flatten(2).index_select(2, source), float(GREY)).view_as(soft)


def invert(soft: Tensor, _: Tensor, __: float, ___: Tensor) -> Tensor:
    return 255 - soft


def posterize(soft: Tensor, _: Tensor, __: float, ___: Tensor) -> Tensor:
    """On average over a step, slope 1."""
    return soft


def solarize(soft: Tensor, exact: Tensor, threshold: float, _: Tensor) -> Tensor:
    return torch.where(exact < threshold, soft, 255 - soft)


def autocontrast(soft: Tensor, exact: Tensor, _: float, __: Tensor) -> Tensor:
    """The gain of the stretch; the darkest and the brightest value count as given."""
    low, high = (bound(dim=(2, 3), keepdim=True).to(soft.dtype) for bound in (exact.amin, exact.amax))
    return torch.where(high > low, (soft - low) * (255 / (high - low).clamp(min=1)), soft)


def equalize(soft: Tensor, exact: Tensor, _: float, __: Tensor) -> Tensor:
    """v -> 255 CDF(v), whose gain is 255 times the density of the channel's values near v. The histogram counts as given."""
    channels = exact.flatten(2).flatten(0, 1).long()
    ones = torch.ones_like(channels, dtype=soft.dtype)
    histogram = torch.zeros(len(channels), 256, dtype=soft.dtype, device=soft.device).scatter_add_(1, channels, ones)
    kept = F.avg_pool1d(histogram[:, None], 2 * WINDOW + 1, 1, WINDOW, count_include_pad=False)[:, 0]
    gain = 255 * kept / channels.shape[1]
    flat = (channels.shape[1] - histogram.gather(1, channels.amax(1, keepdim=True))) < 255  # Pillow leaves such a channel as it is
    gain = torch.where(flat, 1.0, gain)
    return soft * gain.gather(1, channels).view_as(soft)


def brightness(soft: Tensor, _: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    return _blend(torch.zeros_like(soft), soft, magnitude, signs)


def contrast(soft: Tensor, _: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    return _blend(_luminance(soft).mean(dim=(1, 2, 3), keepdim=True), soft, magnitude, signs)


def color(soft: Tensor, _: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    return _blend(_luminance(soft), soft, magnitude, signs)


def sharpness(soft: Tensor, _: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    if min(soft.shape[2:]) < 3:
        return soft
    kernel = torch.ones(3, 3, dtype=soft.dtype, device=soft.device)
    kernel[1, 1] = 5
    planes = F.conv2d(soft.flatten(0, 1)[:, None], kernel[None, None] / 13)
    smooth = F.pad(planes.view(*soft.shape[:2], *planes.shape[2:]), (1, 1, 1, 1))
    inside = F.pad(torch.ones_like(planes[0, 0]), (1, 1, 1, 1)).bool()
    return _blend(torch.where(inside, smooth, soft), soft, magnitude, signs)


def _luminance(soft: Tensor) -> Tensor:
    if soft.shape[1] == 1:
        return soft
    parts = torch.tensor([RED, GREEN, BLUE], dtype=soft.dtype, device=soft.device) / 65536
    return (soft * parts.view(3, 1, 1)).sum(1, keepdim=True)


def _blend(start: Tensor, soft: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    factor = (1 + signs.to(soft.device, soft.dtype) * magnitude).view(-1, 1, 1, 1)
    return start + factor * (soft - start)


SLOPES: dict[str, Slope] = {
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
    "rotate": rotate,
    "color": color,
    "contrast": contrast,
    "sharpness": sharpness,
    "brightness": brightness,
    "posterize": posterize,
    "solarize": solarize,
    "autocontrast": autocontrast,
    "equalize": equalize,
    "invert": invert,
}
