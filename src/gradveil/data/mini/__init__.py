"""Fashion-MNIST mini: 2,000 training and 500 test images inside the package.

With them everything runs without any download. A sheet holds rows of 50 images; image i is of class
i % 10, so the labels need no file.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from gradveil.core.errors import GradveilError
from gradveil.data import fashion_mnist
from gradveil.data.base import Dataset, Labels
from gradveil.data.decode import BROKEN, Pixels
from gradveil.data.files import FileCheck, Verification

COLUMNS = 50
SIDE = 28


def sheet(images: Pixels) -> Pixels:
    """Lay N images (N, 28, 28) into a picture, N a multiple of 50."""
    return images.reshape(-1, COLUMNS, SIDE, SIDE).swapaxes(1, 2).reshape(-1, COLUMNS * SIDE)


def cut(picture: Pixels) -> Pixels:
    """Cut the images out of a sheet, (N, 28, 28)."""
    return picture.reshape(-1, SIDE, COLUMNS, SIDE).swapaxes(1, 2).reshape(-1, SIDE, SIDE)


@lru_cache(maxsize=2)
def _decoded(data: bytes) -> Pixels:
    """Decode a sheet, once for all jobs of a process that load the same split."""
    with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
        return cut(np.array(picture))


@dataclass(frozen=True)
class FashionMnistMini(Dataset):
    """Images that need neither a data root nor the cache."""

    decodes: ClassVar[bool] = False

    def sources(self, root: Path, split: str) -> Sequence[Path]:
        return ()

    def here(self, root: Path) -> bool:
        return True

    def pixels(self, root: Path, split: str) -> tuple[Pixels, Labels, tuple[str, ...]]:
        name = f"{split}.png"
        try:
            data = (files(__package__) / name).read_bytes()
            images = _decoded(data).copy()
        except BROKEN as error:
            raise GradveilError(
                f"{self.name}: {name} of the installed package is damaged: {error}; "
                "install gradveil again"
            ) from error
        return images[:, None], np.arange(len(images)) % self.classes, fashion_mnist.CLASSES

    def inspect(self, root: Path) -> Verification:
        checks = tuple(
            self._check(root, split, count)
            for split, count in (("train", self.train), ("test", self.test))
        )
        return Verification(
            self.name, all(state.ok for state in checks), checks, "embedded in the package"
        )

    def _check(self, root: Path, split: str, count: int) -> FileCheck:
        path = Path(__file__).with_name(f"{split}.png")
        try:
            found = len(self.pixels(root, split)[0])
        except GradveilError as error:
            return FileCheck(path, False, str(error))
        problem = "" if found == count else f"{found} of {count} images"
        return FileCheck(path, not problem, problem)


FASHION_MNIST_MINI = FashionMnistMini(
    name="fashion-mnist-mini",
    title="Fashion-MNIST mini",
    channels=1,
    size=SIDE,
    classes=10,
    train=2_000,
    test=500,
    mean=fashion_mnist.MEAN,
    std=fashion_mnist.STD,
    license=fashion_mnist.LICENSE,
    citation=fashion_mnist.CITATION,
    layout=("nothing: it is part of the package",),
    home=fashion_mnist.HOME,
)
