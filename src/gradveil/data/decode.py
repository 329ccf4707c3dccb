"""Single images to pixels: decoding with Pillow, resizing, the split by content, and channel statistics."""

import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradveil.core.errors import GradveilError
from gradveil.core.files import regular_file
from gradveil.data.files import FileCheck

Pixels = NDArray[np.uint8]
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)  # what Pillow raises on a bad file


def opened(path: Path) -> Image.Image:
    """The decoded image, of 8 bits a channel; a file that does not decode is an error that names it."""
    regular_file(path)
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.load()
    except BROKEN as error:
        raise GradveilError(f"broken image {path}: {error}") from error
    if image.mode.startswith(("I", "F")):
        raise GradveilError(
            f"image {path} has more than 8 bits a channel (mode {image.mode}): convert it to 8 bits"
        )
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # straight to RGB, Pillow warns
    return image


def header(path: Path) -> tuple[str, tuple[int, int]]:
    """Mode and (width, height), without decoding."""
    regular_file(path)
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
    return image.crop((left, top, left + side, top + side)).resize(
        (size, size), Image.Resampling.BILINEAR
    )


def resized(images: Pixels, size: int) -> Pixels:
    """Square NCHW images at another size, one by one with Pillow's BILINEAR."""
    if images.shape[2] == size:
        return images
    result = np.empty((*images.shape[:2], size, size), np.uint8)
    for source, target in zip(images, result, strict=True):
        for channel, place in zip(source, target, strict=True):
            place[:] = np.asarray(
                Image.fromarray(channel).resize((size, size), Image.Resampling.BILINEAR)
            )
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
        deviations.append(
            max(float(share @ (values - mean) ** 2) ** 0.5, 1 / 255)
        )  # a constant channel must not divide by zero
    return tuple(means), tuple(deviations)


def listed(folder: Path) -> tuple[list[Path], int]:
    """The image files at any depth below the folder, in the order of their names, and how many other files there are."""
    images, others = [], 0
    for place, _, names in os.walk(folder):
        for name in names:
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                images.append(Path(place, name))
            else:
                others += 1
    return sorted(images), others


def subfolders(folder: Path) -> list[Path]:
    """In the order of their names; hidden ones are left out."""
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


def natural(path: Path) -> tuple[int, str]:
    """Sorts x_2 before x_10."""
    return len(path.name), path.name


def decoded(paths: Sequence[Path], mode: str, size: int) -> Pixels:
    """NCHW; every image must have this size."""
    result = np.empty((len(paths), 1 if mode == "L" else 3, size, size), np.uint8)
    for path, place in zip(paths, result, strict=True):
        image = opened(path)
        if image.size != (size, size):
            raise GradveilError(
                f"image {path} is {image.size[0]}x{image.size[1]}: expected {size}x{size}"
            )
        place[:] = chw(image, mode)
    return result


def broken(paths: Iterable[Path]) -> tuple[FileCheck, ...]:
    """One check for each file that does not decode."""
    found = []
    for path in paths:
        try:
            opened(path)
        except GradveilError as error:
            found.append(FileCheck(path, False, str(error)))
    return tuple(found)
