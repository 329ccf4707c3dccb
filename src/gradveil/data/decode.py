"""Image files and their pixels: finding, decoding and resizing them, the split by content.

Also the mean and standard deviation of their channels.
"""

import hashlib
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradveil.core.errors import GradveilError
from gradveil.core.files import regular_file
from gradveil.data.files import FileCheck

T = TypeVar("T")
Pixels = NDArray[np.uint8]
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
NAMED = 4  # broken images that one error names
# The errors that Pillow raises on a bad file.
BROKEN = (
    OSError,
    Image.DecompressionBombWarning,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)


@contextmanager
def sized(path: Path, formats: tuple[str, ...] = FORMATS) -> Iterator[Image.Image]:
    """Open a regular file as a picture, its pixels not decoded; refuse one of 90 million or more.

    The size is that in its header, which costs nothing to write.
    """
    regular_file(path)
    with (
        warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
        Image.open(path, formats=formats) as image,
    ):
        yield image


def decode_image(path: Path) -> Image.Image:
    """Decode an image of 8 bits a channel; the error for a broken file names it."""
    try:
        with sized(path) as image:
            image.load()
    except GradveilError:
        raise
    except BROKEN as error:
        raise GradveilError(f"broken image {path}: {error}; replace or remove it") from error
    if image.mode.startswith(("I", "F")):
        raise GradveilError(
            f"image {path} has more than 8 bits a channel (mode {image.mode}): convert it to 8 bits"
        )
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # straight to RGB, Pillow warns
    return image


def header(path: Path) -> tuple[str, tuple[int, int]]:
    """Return Pillow's mode and (width, height), without decoding."""
    try:
        with sized(path) as image:
            return image.mode, image.size
    except GradveilError:
        raise
    except BROKEN as error:
        raise GradveilError(f"broken image {path}: {error}; replace or remove it") from error


def chw(image: Image.Image, mode: str) -> Pixels:
    """Return the pixels (C, H, W); mode is L or RGB."""
    pixels = np.asarray(image.convert(mode))
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def square(image: Image.Image, size: int) -> Image.Image:
    """Cut out the middle square, resized with Pillow's BILINEAR, which averages as it shrinks."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize(
        (size, size), Image.Resampling.BILINEAR
    )


def resized(images: Pixels, size: int) -> Pixels:
    """Resize square images (N, C, H, W), one by one with Pillow's BILINEAR."""
    if images.shape[2] == size:
        return images
    result = np.empty((*images.shape[:2], size, size), np.uint8)
    for source, target in zip(images, result, strict=True):
        for before, after in zip(source, target, strict=True):
            picture = Image.fromarray(before).resize((size, size), Image.Resampling.BILINEAR)
            after[:] = np.asarray(picture)
    return result


def in_test(pixels: bytes) -> bool:
    """Tell by a hash whether pixels belong to the test split: one content in five does."""
    return int.from_bytes(hashlib.sha256(pixels).digest()[:8], "big") < 2**64 // 5


def statistics(images: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, in [0, 1], from exact counts."""
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(images), 1024):  # bincount widens its input to 64 bits
            counts += np.bincount(images[start : start + 1024, channel].ravel(), minlength=256)
        share = counts / counts.sum()
        mean = float(share @ values)
        means.append(mean)
        deviation = float(share @ (values - mean) ** 2) ** 0.5
        deviations.append(max(deviation, 1 / 255))  # a constant channel must not divide by zero
    return tuple(means), tuple(deviations)


def listed(folder: Path) -> tuple[list[Path], int]:
    """Return the image files at any depth below the folder, sorted, and count the other files."""
    images, others = [], 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                images.append(Path(parent, name))
            else:
                others += 1
    return sorted(images), others


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in it, sorted; hidden ones are left out."""
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


def natural(path: Path) -> tuple[int, str]:
    """Return a key that sorts x_2 before x_10."""
    return len(path.name), path.name


def decoded(paths: Sequence[Path], mode: str, size: int) -> Pixels:
    """Return the images (N, C, H, W); refuse one of another size."""
    result = np.empty((len(paths), 1 if mode == "L" else 3, size, size), np.uint8)
    images = each_read(paths, decode_image)
    for path, image, pixels in zip(paths, images, result, strict=True):
        if image.size != (size, size):
            raise GradveilError(
                f"image {path} is {image.size[0]}x{image.size[1]}: expected {size}x{size}"
            )
        pixels[:] = chw(image, mode)
    return result


def each_read(paths: Sequence[Path], read: Callable[[Path], T]) -> Iterator[T]:
    """Yield what is read of each image; the error for a broken one names the others too."""
    for number, path in enumerate(paths):
        try:
            found = read(path)
        except GradveilError as error:
            others = [check.path for check in broken([*paths[:number], *paths[number + 1 :]])]
            if not others:
                raise
            names = ", ".join(map(str, others[: NAMED - 1]))
            more = len(others) - NAMED + 1
            names += f" and {more} more" if more > 0 else ""
            raise GradveilError(f"{error}; {len(others)} more cannot be used: {names}") from error
        yield found


def broken(paths: Iterable[Path]) -> tuple[FileCheck, ...]:
    """Return a check for each file that does not decode."""
    found = []
    for path in paths:
        try:
            decode_image(path)
        except GradveilError as error:
            found.append(FileCheck(path, False, str(error).removeprefix(f"broken image {path}: ")))
    return tuple(found)
