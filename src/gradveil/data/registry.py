"""The table of data sets, and loading or verifying one by name."""

import os
from contextlib import suppress
from pathlib import Path

from gradveil.core.errors import GradveilError, unknown
from gradveil.data.base import Dataset, Source
from gradveil.data.cache import cached
from gradveil.data.cifar import CIFAR10, CIFAR100
from gradveil.data.fashion_mnist import FASHION_MNIST
from gradveil.data.files import Verification
from gradveil.data.folder import Folder
from gradveil.data.images import SPLITS, Images, balanced, with_channels
from gradveil.data.medical_mnist import MEDICAL_MNIST
from gradveil.data.mini import FASHION_MNIST_MINI
from gradveil.data.tiny_imagenet import TINY_IMAGENET

DATASETS: tuple[Dataset, ...] = (
    CIFAR10,
    CIFAR100,
    FASHION_MNIST,
    TINY_IMAGENET,
    MEDICAL_MNIST,
    FASHION_MNIST_MINI,
)
LARGEST_IMAGE = 4096  # pixels of height and width


def catalog() -> tuple[Dataset, ...]:
    """Return every known data set, with its facts."""
    return DATASETS


def find_source(name: str) -> Source:
    """Return a data set of the catalog, or the user's folder.

    A folder is written `folder:PATH`, or as the path of a folder that exists.
    """
    for dataset in DATASETS:
        if dataset.name == name:
            return dataset
    prefix, _, rest = name.partition(":")
    if prefix == "folder":
        if not rest:
            raise GradveilError(f"dataset {name!r} names no folder: write folder:PATH")
        return _folder(rest)
    with suppress(OSError, ValueError):  # no path at all: too long, or with a zero byte
        if name and Path(name).expanduser().is_dir():
            return _folder(name)
    raise unknown("dataset", name, [*(dataset.name for dataset in DATASETS), "folder:PATH"])


def _folder(path: str) -> Folder:
    return Folder(f"folder:{path}", Path(path).expanduser())


def find_root(root: Path | None = None) -> Path:
    """Return the folder given, else $GRADVEIL_DATA, else a folder `gradveil` for shared data.

    The last is in $XDG_DATA_HOME, else in ~/.local/share.
    """
    if root is not None:
        return Path(root).expanduser()
    if chosen := os.environ.get("GRADVEIL_DATA"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_DATA_HOME"):
        return Path(shared).expanduser() / "gradveil"
    return Path.home() / ".local" / "share" / "gradveil"


def load(
    name: str,
    split: str = "train",
    *,
    root: Path | None = None,
    fraction: float = 1.0,
    seed: int = 0,
    image_size: int | None = None,
    channels: int | None = None,
) -> Images:
    """Load a split, decoded once and mapped from the cache.

    `fraction` keeps a random part of every class, the same for the same seed. `image_size` resizes,
    in pixels. `channels` 3 repeats the plane of gray images, 1 makes color images gray.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if not 0 < fraction <= 1:
        raise GradveilError(f"fraction {fraction!r} is out of range: choose above 0 and at most 1")
    if image_size is not None and not 1 <= image_size <= LARGEST_IMAGE:
        raise GradveilError(
            f"image size {image_size!r} is out of range: choose from 1 to {LARGEST_IMAGE}"
        )
    source, folder = find_source(name), find_root(root)
    size = None if isinstance(source, Dataset) and image_size == source.size else image_size
    if source.decodes:
        images = cached(source, folder, split, size)
    else:
        images = source.read(folder, split, size)
    images = images if channels is None else with_channels(images, channels)
    return images if fraction == 1 else images.select(balanced(images.labels, fraction, seed))


def verify(name: str, root: Path | None = None) -> Verification:
    """Look at every file of a data set and say which is missing, truncated or corrupted."""
    return find_source(name).verify(find_root(root))
