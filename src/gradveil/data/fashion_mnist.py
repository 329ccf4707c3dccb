"""Fashion-MNIST: four gzipped idx files with official checksums."""

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradveil.core.errors import GradveilError
from gradveil.data.base import Dataset, Labels
from gradveil.data.decode import Pixels
from gradveil.data.files import File

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
MEAN, STD = (0.1307,), (0.3081,)  # as published by the papers; they are MNIST's
CITATION = (
    "Xiao, Rasul, Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning "
    "Algorithms, arXiv:1708.07747, 2017"
)
LICENSE = "MIT"
HOME = "https://github.com/zalandoresearch/fashion-mnist"

_FOLDER = "FashionMNIST/raw"
_BASE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_STEMS = {"train": "train", "test": "t10k"}


def idx(data: bytes, origin: object) -> Pixels:
    """Return the array of bytes in a gzipped idx file.

    The file holds two zeros, the type (8), the rank, a big-endian length per axis, the values.
    """
    try:
        raw = gzip.decompress(data)
        rank = raw[3] if raw[:3] == b"\0\0\x08" else 0
        shape = tuple(np.frombuffer(raw, ">u4", rank, 4).tolist())
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise GradveilError(f"{origin}: not a gzipped idx file: {error}") from error
    if rank == 0 or len(raw) != 4 + 4 * rank + math.prod(shape):
        raise GradveilError(f"{origin}: not an idx file of bytes")
    writable = bytearray(raw)  # torch wants memory it may write
    return np.frombuffer(writable, np.uint8, offset=4 + 4 * rank).reshape(shape)


@dataclass(frozen=True)
class FashionMnist(Dataset):
    def sources(self, root: Path, split: str) -> Sequence[Path]:
        return self.present(root, _paths(split))

    def pixels(self, root: Path, split: str) -> tuple[Pixels, Labels, tuple[str, ...]]:
        images, labels = (idx(self.official(root, path), root / path) for path in _paths(split))
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
            raise GradveilError(
                f"{root / _FOLDER}: images {images.shape} and labels {labels.shape} do not fit"
            )
        return images[:, None], labels.astype(np.int64), CLASSES


def _paths(split: str) -> tuple[str, str]:
    stem = _STEMS[split]
    return f"{_FOLDER}/{stem}-images-idx3-ubyte.gz", f"{_FOLDER}/{stem}-labels-idx1-ubyte.gz"


def _file(name: str, md5: str, size: int) -> File:
    return File(f"{_FOLDER}/{name}", md5, size, f"{_BASE}/{name}")


FASHION_MNIST = FashionMnist(
    name="fashion-mnist",
    title="Fashion-MNIST",
    channels=1,
    size=28,
    classes=10,
    train=60_000,
    test=10_000,
    mean=MEAN,
    std=STD,
    license=LICENSE,
    citation=CITATION,
    layout=(*_paths("train"), *_paths("test")),
    home=HOME,
    files=(
        _file("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        _file("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
        _file("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        _file("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    ),
)
