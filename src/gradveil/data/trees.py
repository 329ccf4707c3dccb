"""Folders of image files: listing, decoding and verifying them."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from gradveil.core.errors import GradveilError
from gradveil.data.files import FileCheck
from gradveil.data.pixels import SUFFIXES, Pixels, chw, opened


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
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def natural(path: Path) -> tuple[int, str]:
    """Sorts x_2 before x_10."""
    return len(path.name), path.name


def decoded(paths: Sequence[Path], mode: str, size: int) -> Pixels:
    """NCHW; every image must have this size."""
    result = np.empty((len(paths), 1 if mode == "L" else 3, size, size), np.uint8)
    for path, place in zip(paths, result, strict=True):
        image = opened(path)
        if image.size != (size, size):
            raise GradveilError(f"image {path} is {image.size[0]}x{image.size[1]}: expected {size}x{size}")
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
