"""Single images to pixels: decoding with Pillow, resizing, the split by content, and channel statistics."""

import hashlib
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradveil.core.errors import GradveilError

Pixels = NDArray[np.uint8]
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)  # what Pillow raises on a bad file


def opened(path: Path) -> Image.Image:
    """The decoded image, of 8 bits a channel; a file that does not decode is an error that names it."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.load()
    except BROKEN as error:
        raise GradveilError(f"broken image {path}: {error}") from error
    if image.mode.startswith(("I", "F")):
        raise GradveilError(f"image {path} has more than 8 bits a channel (mode {image.mode}): convert it to 8 bits")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # straight to RGB, Pillow warns
    return image


def header(path: Path) -> tuple[str, tuple[int, int]]:
    """Mode and (width, height), without decoding."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            return image.mode, image.size
    except BROKEN as error:
        raise GradveilError(f"broken image {path}: {error}") from error


def chw(image: Image.Image, mode: str) -> Pixels:
    """Channels first; mode is L or RGB."""
    pixels = np.asarray(image.convert(mode))
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def square(image: Image.Image, size: int) -> Image.Image:
    """The middle square, resized with Pillow's BILINEAR, which averages when it shrinks."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BILINEAR)


def resized(images: Pixels, size: int) -> Pixels:
    """Square NCHW images at another size, one by one with Pillow's BILINEAR."""
    if images.shape[2] == size:
        return images
    result = np.empty((*images.shape[:2], size, size), np.uint8)
    for source, target in zip(images, result, strict=True):
        for channel, place in zip(source, target, strict=True):
            place[:] = np.asarray(Image.fromarray(channel).resize((size, size), Image.Resampling.BILINEAR))
    return result


def in_test(pixels: bytes) -> bool:
    """True for about one content in five, by a hash: equal pixels always fall on the same side."""
    return int.from_bytes(hashlib.sha256(pixels).digest()[:8], "big") < 2**64 // 5


def statistics(images: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in [0, 1], from exact counts of the 256 values."""
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(images), 1024):  # bincount widens its input to 64 bits
            counts += np.bincount(images[start : start + 1024, channel].ravel(), minlength=256)
        share = counts / counts.sum()
        mean = float(share @ values)
        means.append(mean)
        deviations.append(max(float(share @ (values - mean) ** 2) ** 0.5, 1 / 255))  # a constant channel must not divide by zero
    return tuple(means), tuple(deviations)
