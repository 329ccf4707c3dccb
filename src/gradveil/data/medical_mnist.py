"""Medical MNIST: 64x64 gray JPEGs of six kinds of scan, in a folder per class.

It has no official split and holds exact duplicates. So content decides: a hash of the decoded
pixels sends an image to train or to test (about 80 to 20), and no picture can land in both. A part
of the images is accepted, and verification says how large it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradveil.core.errors import GradveilError
from gradveil.data.base import Dataset, Labels
from gradveil.data.decode import Pixels, broken, decoded, in_test, listed
from gradveil.data.files import FileCheck, Verification

_FOLDER = "medical-mnist"
_PUBLISHED = {
    "AbdomenCT": 10_000,
    "BreastMRI": 8_954,
    "CXR": 10_000,
    "ChestCT": 10_000,
    "Hand": 10_000,
    "HeadCT": 10_000,
}


@dataclass(frozen=True)
class MedicalMnist(Dataset):
    """A folder of JPEGs for each class, split by content."""

    def sources(self, root: Path, split: str) -> Sequence[Path]:
        return [path for path, _ in self._entries(root)]

    def pixels(self, root: Path, split: str) -> tuple[Pixels, Labels, tuple[str, ...]]:
        entries = self._entries(root)
        images = decoded([path for path, _ in entries], "L", self.size)
        labels = np.asarray([label for _, label in entries], np.int64)
        here = np.asarray([in_test(image.tobytes()) == (split == "test") for image in images])
        if len(np.unique(labels[here])) < len(_PUBLISHED):
            raise GradveilError(
                f"{root / _FOLDER}: too few images: "
                f"by content, the {split} split lacks some of the six classes"
            )
        return images[here], labels[here], tuple(_PUBLISHED)

    def inspect(self, root: Path) -> Verification:
        """Look for every class folder and decode every JPEG: there are no official checksums."""
        found = {name: listed(root / _FOLDER / name)[0] for name in _PUBLISHED}
        empty = tuple(
            FileCheck(root / _FOLDER / name, False, "missing or empty")
            for name, paths in found.items()
            if not paths
        )
        problems = empty + broken(path for paths in found.values() for path in paths)
        counts = ", ".join(
            f"{len(found[name])} of {count} {name}" for name, count in _PUBLISHED.items()
        )
        whole = tuple(
            FileCheck(root / _FOLDER / name, True) for name, paths in found.items() if paths
        )
        return Verification(
            self.name, not problems, whole + problems, f"{counts}; split by content, about 80 to 20"
        )

    def _entries(self, root: Path) -> list[tuple[Path, int]]:
        found = [listed(root / _FOLDER / name)[0] for name in _PUBLISHED]
        empty = [
            f"{_FOLDER}/{name}/*.jpeg"
            for name, paths in zip(_PUBLISHED, found, strict=True)
            if not paths
        ]
        if empty:
            raise self.missing(root, empty)
        return [(path, label) for label, paths in enumerate(found) for path in paths]


MEDICAL_MNIST = MedicalMnist(
    name="medical-mnist",
    title="Medical MNIST",
    channels=1,
    size=64,
    classes=len(_PUBLISHED),
    train=47_163,  # four fifths; the hash decides the exact number
    test=11_791,
    # Measured on the training part (9,650 images) of 2,000 images of each class.
    mean=(0.35224,),
    std=(0.28301,),
    license="none stated",
    citation=(
        "Lozano, Medical MNIST Classification, "
        "github.com/apolanco3225/Medical-MNIST-Classification, 2017"
    ),
    layout=tuple(f"{_FOLDER}/{name}/*.jpeg" for name in _PUBLISHED),
    home="https://www.kaggle.com/datasets/andrewmvd/medical-mnist",
)
