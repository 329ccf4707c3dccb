"""Operations on pixel values, pixel for pixel as Pillow does them.

They are lookups, histograms and the four enhancements, on uint8 images (N, C, H, W).
"""

import torch
from torch import Tensor

RED, GREEN, BLUE = 19595, 38470, 7471  # ITU-R 601 luma in 16.16 fixed point; they add up to 65536


def invert(images: Tensor, _magnitude: float, _signs: Tensor) -> Tensor:
    return 255 - images


def posterize(images: Tensor, bits: float, _signs: Tensor) -> Tensor:
    """Keep the highest bits."""
    return images & (0xFF & ~((1 << (8 - int(bits))) - 1))


def solarize(images: Tensor, threshold: float, _signs: Tensor) -> Tensor:
    """Invert the values from the threshold on."""
    return torch.where(images < threshold, images, 255 - images)


def autocontrast(images: Tensor, _magnitude: float, _signs: Tensor) -> Tensor:
    """Stretch each channel to 0..255; a channel of one value stays."""
    low, high = (bound(dim=(2, 3), keepdim=True).double() for bound in (images.amin, images.amax))
    # In double and truncated, with a true division: `255 / tensor` would multiply by a rounded
    # reciprocal.
    scale = torch.where(high > low, torch.full_like(high, 255) / (high - low), 1.0)
    shift = torch.where(high > low, -low * scale, 0.0)
    return (images * scale).add_(shift).clamp_(0, 255).to(torch.uint8)


def equalize(images: Tensor, _magnitude: float, _signs: Tensor) -> Tensor:
    """Flatten each channel's histogram."""
    channels = images.flatten(2).flatten(0, 1).long()
    count = channels.shape[0]
    slots = channels + torch.arange(count, device=images.device)[:, None] * 256
    histogram = torch.bincount(slots.flatten(), minlength=count * 256).view(count, 256)
    brightest = histogram.gather(1, channels.amax(1, keepdim=True))
    step = (channels.shape[1] - brightest) // 255
    below = histogram.cumsum(1) - histogram
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return table.to(torch.uint8).flatten()[slots].view_as(images)


def brightness(images: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    """Move toward black, or away from it."""
    return _blend(torch.zeros((), device=images.device), images, magnitude, signs)


def contrast(images: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    """Move toward the image's mean luminance, or away from it."""
    total = _luminance(images).sum(dim=(1, 2, 3), keepdim=True, dtype=torch.long)
    pixels = images.shape[2] * images.shape[3]
    mean = (2 * total + pixels) // (2 * pixels)
    return _blend(mean.float(), images, magnitude, signs)


def color(images: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    """Move toward gray, or away from it."""
    return _blend(_luminance(images).float(), images, magnitude, signs)


def sharpness(images: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    """Move toward a smoothed copy, or away from it. The outermost pixels are not smoothed."""
    smooth = images.float()
    if min(images.shape[2:]) >= 3:
        center = smooth[:, :, 1:-1, 1:-1]
        across = smooth[..., :-2] + smooth[..., 1:-1] + smooth[..., 2:]
        total = across[:, :, :-2] + across[:, :, 1:-1] + across[:, :, 2:] + 4 * center
        # total / 13 is never halfway between two integers, so float32 rounds it as Pillow does.
        center.copy_((total / 13 + 0.5).floor_())
    return _blend(smooth, images, magnitude, signs)


def _luminance(images: Tensor) -> Tensor:
    """Return (N, 1, H, W) whole numbers in 0..255, as int32."""
    if images.shape[1] == 1:
        return images.int()
    red, green, blue = images.int().unbind(1)
    return ((red * RED + green * GREEN + blue * BLUE + 0x8000) >> 16).unsqueeze(1)


def _blend(start: Tensor, images: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    """Return start + (1 + sign * magnitude) * (images - start), as Pillow's `Image.blend`.

    It is computed in float32 and truncated.
    """
    factor = (1 + signs.to(images.device, torch.double) * magnitude).float().view(-1, 1, 1, 1)
    return (images - start).mul_(factor).add_(start).clamp_(0, 255).to(torch.uint8)
