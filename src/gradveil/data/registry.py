"""The one table of datasets, and finding one by name."""

from pathlib import Path

from gradveil.core.errors import GradveilError, unknown
from gradveil.data.base import Dataset, Source
from gradveil.data.cifar import CIFAR10, CIFAR100
from gradveil.data.fashion_mnist import FASHION_MNIST
from gradveil.data.folder import Folder
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


def catalog() -> tuple[Dataset, ...]:
    """Every known dataset, with its facts."""
    return DATASETS


def find(name: str) -> Source:
    """A dataset of the catalog, or the user's own folder: `folder:PATH`, or the path of a folder that exists."""
    for dataset in DATASETS:
        if dataset.name == name:
            return dataset
    prefix, _, rest = name.partition(":")
    if prefix == "folder":
        if not rest:
            raise GradveilError(f"dataset {name!r} names no folder: write folder:PATH")
        return _folder(rest)
    if name and Path(name).expanduser().is_dir():
        return _folder(name)
    raise unknown("dataset", name, [*(dataset.name for dataset in DATASETS), "folder:PATH"])


def _folder(path: str) -> Folder:
    return Folder(f"folder:{path}", Path(path).expanduser())
