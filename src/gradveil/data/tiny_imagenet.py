"""Tiny ImageNet: JPEGs in official folders. Its test split is the official `val`, because the labels of `test` were never published.

Labels follow the sorted WordNet ids. A part of the training images is accepted, and verification says how large it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradveil.core.errors import GradveilError
from gradveil.core.files import regular_file
from gradveil.data.base import Dataset, Labels
from gradveil.data.decode import Pixels, broken, decoded, listed, natural
from gradveil.data.files import Archive, File, FileCheck, Verification

_FOLDER = "tiny-imagenet-200"
_INDEX = (f"{_FOLDER}/wnids.txt", f"{_FOLDER}/words.txt", f"{_FOLDER}/val/val_annotations.txt")
_PER_CLASS = 500


@dataclass(frozen=True)
class TinyImageNet(Dataset):
    def sources(self, root: Path, split: str) -> Sequence[Path]:
        index = self.present(root, _INDEX)
        return [*index, *(path for path, _ in self._entries(root, split))]

    def pixels(self, root: Path, split: str) -> tuple[Pixels, Labels, tuple[str, ...]]:
        entries = self._entries(root, split)
        labels = np.asarray([label for _, label in entries], np.int64)
        return decoded([path for path, _ in entries], "RGB", self.size), labels, self._names(root)

    def inspect(self, root: Path) -> Verification:
        """Every folder is there and every JPEG decodes; there are no official checksums of unpacked files."""
        absent = [root / path for path in _INDEX if not (root / path).is_file()]
        if absent:
            checks = tuple(FileCheck(path, False, "missing") for path in absent)
            return Verification(self.name, False, checks, f"expected {', '.join(self.layout)}")
        ids = _ids(root)
        training = {wnid: listed(_images(root, wnid))[0] for wnid in ids}
        empty = tuple(
            FileCheck(_images(root, wnid), False, "missing or empty")
            for wnid, paths in training.items()
            if not paths
        )
        testing = [path for path, _ in self._annotated(root, ids) if path.is_file()]
        problems = empty + broken(
            [*(path for paths in training.values() for path in paths), *testing]
        )
        checks = tuple(FileCheck(root / path, True) for path in _INDEX) + problems
        return Verification(
            self.name, not problems and bool(testing), checks, self._note(training, testing)
        )

    def _note(self, training: dict[str, list[Path]], testing: list[Path]) -> str:
        counts = sorted({len(paths) for paths in training.values()})
        span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{span} of {_PER_CLASS} training images per class, {len(testing)} of {self.test} test images"

    def _entries(self, root: Path, split: str) -> list[tuple[Path, int]]:
        ids = _ids(root)
        if split == "test":
            found = [(path, label) for path, label in self._annotated(root, ids) if path.is_file()]
            if not found:
                raise self.missing(root, [f"{_FOLDER}/val/images/*.JPEG"])
            return found
        entries: list[tuple[Path, int]] = []
        for label, wnid in enumerate(ids):
            paths = sorted(listed(_images(root, wnid))[0], key=natural)
            if not paths:
                raise self.missing(root, [f"{_FOLDER}/train/{wnid}/images/*.JPEG"])
            entries += [(path, label) for path in paths]
        return entries

    def _annotated(self, root: Path, ids: list[str]) -> list[tuple[Path, int]]:
        label = {wnid: number for number, wnid in enumerate(ids)}
        path = root / _INDEX[2]
        rows = [line.split("\t") for line in _text(path).splitlines()]
        if any(len(row) < 2 or row[1] not in label for row in rows):
            raise GradveilError(f"{path}: corrupted: a line has no known class id")
        return [
            (root / _FOLDER / "val" / "images" / Path(row[0]).name, label[row[1]]) for row in rows
        ]

    def _names(self, root: Path) -> tuple[str, ...]:
        rows = (
            line.split("\t", 1) for line in _text(root / _INDEX[1]).splitlines() if "\t" in line
        )
        words = {row[0]: row[1] for row in rows}
        return tuple(words.get(wnid, wnid) for wnid in _ids(root))


def _ids(root: Path) -> list[str]:
    ids = sorted(_text(root / _INDEX[0]).split())
    if len(ids) < 2:
        raise GradveilError(f"{root / _INDEX[0]}: truncated: {len(ids)} class ids")
    return ids


def _text(path: Path) -> str:
    regular_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GradveilError(f"{path}: cannot be read: {error}") from error


def _images(root: Path, wnid: str) -> Path:
    return root / _FOLDER / "train" / wnid / "images"


TINY_IMAGENET = TinyImageNet(
    name="tiny-imagenet",
    title="Tiny ImageNet",
    channels=3,
    size=64,
    classes=200,
    train=100_000,
    test=10_000,
    # Measured on training images 0-49 of each of the 200 classes.
    mean=(0.48252, 0.45040, 0.39973),
    std=(0.27657, 0.26898, 0.28175),
    license="ImageNet terms of access: non-commercial research and education only",
    citation="Le, Yang, Tiny ImageNet Visual Recognition Challenge, Stanford CS 231N, 2015",
    layout=(*_INDEX, f"{_FOLDER}/train/<id>/images/*.JPEG", f"{_FOLDER}/val/images/*.JPEG"),
    home="http://cs231n.stanford.edu",
    archive=Archive(
        File(
            "tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
            url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        ),
        folder=_FOLDER,
        members=_FOLDER
        + r"/(wnids\.txt|words\.txt|val/val_annotations\.txt|train/n\d{8}/images/\w+\.JPEG|val/images/\w+\.JPEG)",
    ),
)
