"""CIFAR-10 and CIFAR-100 in the official python version.

These are pickles, read only when their checksum is the official one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradveil.core.errors import GradveilError
from gradveil.data.base import Dataset, Labels
from gradveil.data.decode import Pixels
from gradveil.data.files import Archive, File, loads

_CITATION = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
_LICENSE = "none stated by its owner, who asks to be cited"
_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_BASE = "https://www.cs.toronto.edu/~kriz"


@dataclass(frozen=True, kw_only=True)
class Cifar(Dataset):
    """Either set; they differ in the names of files and of dictionary keys."""

    train_batches: tuple[str, ...]
    test_batches: tuple[str, ...]
    meta: str
    label_key: str
    names_key: str

    def sources(self, root: Path, split: str) -> Sequence[Path]:
        return self.present(root, (*self._batches(split), self.meta))

    def pixels(self, root: Path, split: str) -> tuple[Pixels, Labels, tuple[str, ...]]:
        parts = [self._part(root, path) for path in self._batches(split)]
        names = loads(self.official(root, self.meta), root / self.meta)[self.names_key.encode()]
        images = parts[0][0] if len(parts) == 1 else np.concatenate([part[0] for part in parts])
        return (
            images,
            np.concatenate([part[1] for part in parts]),
            tuple(name.decode() for name in names),
        )

    def _batches(self, split: str) -> tuple[str, ...]:
        return self.train_batches if split == "train" else self.test_batches

    def _part(self, root: Path, path: str) -> tuple[Pixels, Labels]:
        found = loads(self.official(root, path), root / path)
        pixels, labels = found.get(b"data"), found.get(self.label_key.encode())
        if (
            not isinstance(pixels, np.ndarray)
            or not isinstance(labels, list)
            or pixels.shape != (len(labels), 3072)
        ):
            raise GradveilError(
                f"{root / path}: not a batch of {self.title}: "
                f"no {self.label_key!r} for its images of 3 x 32 x 32"
            )
        return pixels.reshape(-1, 3, 32, 32), np.asarray(labels, np.int64)


CIFAR10 = Cifar(
    name="cifar10",
    title="CIFAR-10",
    channels=3,
    size=32,
    classes=10,
    train=50_000,
    test=10_000,
    mean=(0.4914672, 0.4822617, 0.4467701),
    std=(0.2470322, 0.2434851, 0.2615879),
    license=_LICENSE,
    citation=_CITATION,
    layout=(
        "cifar-10-batches-py/{data_batch_1,data_batch_2,data_batch_3,data_batch_4,data_batch_5,"
        "test_batch,batches.meta}",
    ),
    home=_HOME,
    files=(
        File("cifar-10-batches-py/data_batch_1", "c99cafc152244af753f735de768cd75f"),
        File("cifar-10-batches-py/data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
        File("cifar-10-batches-py/data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
        File("cifar-10-batches-py/data_batch_4", "634d18415352ddfa80567beed471001a"),
        File("cifar-10-batches-py/data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
        File("cifar-10-batches-py/test_batch", "40351d587109b95175f43aff81a1287e"),
        File("cifar-10-batches-py/batches.meta", "5ff9c542aee3614f3951f8cda6e48888"),
    ),
    archive=Archive(
        File(
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            url=f"{_BASE}/cifar-10-python.tar.gz",
        ),
        folder="cifar-10-batches-py",
        members=r"cifar-10-batches-py/(data_batch_[1-5]|test_batch|batches\.meta)",
    ),
    train_batches=tuple(f"cifar-10-batches-py/data_batch_{number}" for number in range(1, 6)),
    test_batches=("cifar-10-batches-py/test_batch",),
    meta="cifar-10-batches-py/batches.meta",
    label_key="labels",
    names_key="label_names",
)

CIFAR100 = Cifar(
    name="cifar100",
    title="CIFAR-100",
    channels=3,
    size=32,
    classes=100,
    train=50_000,
    test=10_000,
    mean=(0.5071598, 0.4866936, 0.4412019),
    std=(0.2673343, 0.2564385, 0.2761505),
    license=_LICENSE,
    citation=_CITATION,
    layout=("cifar-100-python/{train,test,meta}",),
    home=_HOME,
    files=(
        File("cifar-100-python/train", "16019d7e3df5f24257cddd939b257f8d", 155_249_918),
        File("cifar-100-python/test", "f0ef6b0ae62326f3e7ffdfab6717acfc", 31_049_707),
        File("cifar-100-python/meta", "7973b15100ade9c7d40fb424638fde48", 1_473),
    ),
    archive=Archive(
        File(
            "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            url=f"{_BASE}/cifar-100-python.tar.gz",
        ),
        folder="cifar-100-python",
        members=r"cifar-100-python/(train|test|meta)",
    ),
    train_batches=("cifar-100-python/train",),
    test_batches=("cifar-100-python/test",),
    meta="cifar-100-python/meta",
    label_key="fine_labels",
    names_key="fine_label_names",
)
