"""Sources of images: where their files lie, how a split is read, how it is verified.

`Dataset` adds the published facts of a data set.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from gradveil.core.errors import GradveilError
from gradveil.data.decode import Pixels, resized
from gradveil.data.files import Archive, File, Verification, check, checked_bytes, unpack
from gradveil.data.images import Images

Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Source(ABC):
    """Images that can be loaded by name."""

    name: str
    decodes: ClassVar[bool] = True  # slowly enough to be worth caching

    @abstractmethod
    def sources(self, root: Path, split: str) -> Sequence[Path]:
        """Return the files this split is read from; refuse where one is missing.

        The error says how to get it.
        """

    @abstractmethod
    def read(self, root: Path, split: str, image_size: int | None) -> Images:
        """Decode the split, comparing checksums where there are any."""

    @abstractmethod
    def verify(self, root: Path) -> Verification:
        """Look at every file and say which is missing, truncated or corrupted."""


@dataclass(frozen=True)
class Dataset(Source):
    """A published data set.

    `layout` lists the files expected below the data root. `train` and `test` count the images of a
    complete set. `files` are those with an official checksum, and `archive` is the download that
    holds them, if they come in one.
    """

    title: str
    channels: int
    size: int
    classes: int
    train: int
    test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    license: str
    citation: str
    layout: tuple[str, ...]
    home: str
    files: tuple[File, ...] = ()
    archive: Archive | None = None

    @abstractmethod
    def pixels(self, root: Path, split: str) -> tuple[Pixels, Labels, tuple[str, ...]]:
        """Return images (N, C, H, W) at their published size, labels (N,), and class names."""

    @property
    def downloads(self) -> tuple[File, ...]:
        """The files that `fetch` gets: the archive, or each file with an open address."""
        if self.archive:
            return (self.archive.file,)
        return tuple(file for file in self.files if file.url)

    @property
    def url(self) -> str | None:
        return self.downloads[0].url if self.downloads else None

    def here(self, root: Path) -> bool:
        """Tell whether files of this data set lie below the root; `verify` says whether all do."""
        unpacked = any((root / path.split("/")[0]).exists() for path in self.layout)
        return unpacked or self._only_archive(root)

    def read(self, root: Path, split: str, image_size: int | None) -> Images:
        images, labels, classes = self.pixels(root, split)
        tensor = torch.from_numpy(np.ascontiguousarray(resized(images, image_size or self.size)))
        return Images(
            self.name, split, tensor, torch.from_numpy(labels), classes, self.mean, self.std
        )

    def verify(self, root: Path) -> Verification:
        if self._only_archive(root):
            assert self.archive is not None
            state = check(root, self.archive.file)
            return Verification(
                self.name, state.ok, (state,), "only the archive is here; the first load unpacks it"
            )
        return self.inspect(root)

    def inspect(self, root: Path) -> Verification:
        """Compare every official file with its checksum."""
        checks = tuple(check(root, file) for file in self.files)
        right = sum(state.ok for state in checks)
        return Verification(
            self.name,
            right == len(checks),
            checks,
            f"{right} of {len(checks)} files match their official checksum",
        )

    def present(self, root: Path, paths: Iterable[str]) -> list[Path]:
        """Return these paths below the root, unpacked from the archive if need be.

        Refuse where one is absent; the error says how to get it.
        """
        wanted = list(paths)
        absent = [path for path in wanted if not (root / path).exists()]
        if absent and self.archive and (root / self.archive.file.path).is_file():
            unpack(root, self.archive)
            absent = [path for path in wanted if not (root / path).exists()]
        if absent:
            raise self.missing(root, absent)
        return [root / path for path in wanted]

    def missing(self, root: Path, absent: Sequence[str]) -> GradveilError:
        """Return the error for absent paths: the first three, and the command that gets them."""
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        archive = f" or {self.archive.file.path}" if self.archive else ""
        return GradveilError(
            f"{self.name} is not in {root}: no {', '.join(absent[:3])}{more}; "
            f"expected {', '.join(self.layout)}{archive}; "
            f"run `gradveil data fetch {self.name} --data-root {root}`"
        )

    def official(self, root: Path, path: str) -> bytes:
        """Return the checked bytes of one of `files`."""
        return checked_bytes(root, next(file for file in self.files if file.path == path))

    def _only_archive(self, root: Path) -> bool:
        if self.archive is None or not (root / self.archive.file.path).is_file():
            return False
        return not (root / self.archive.folder).exists()
