"""A folder of the user's images: PATH/{train,test}/<class>/*, or PATH/<class>/*.

Without train and test folders the content of an image decides (`decode.in_test`). Images are gray
when every one of them is (modes L and 1), else RGB; transparency is dropped. They must share a
square size, unless `image_size` is given: then each is cut to its middle square and resized with
Pillow's BILINEAR. Mean and std come from the training split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from gradveil.core.errors import GradveilError
from gradveil.data.base import Source
from gradveil.data.decode import (
    Pixels,
    broken,
    chw,
    decode_image,
    each_read,
    header,
    in_test,
    listed,
    square,
    statistics,
    subfolders,
)
from gradveil.data.files import FileCheck, Verification
from gradveil.data.images import SPLITS, Images

_GRAY = {"L", "1"}


@dataclass(frozen=True)
class Folder(Source):
    """The images below `path`, with a subfolder for each class."""

    path: Path

    def sources(self, root: Path, split: str) -> Sequence[Path]:
        return [path for path, _, _ in self._entries()]

    def read(self, root: Path, split: str, image_size: int | None) -> Images:
        mode, size = self._shape(self.sources(root, split), image_size)
        names = self._names(self._parts()[0])
        pixels: dict[str, list[Pixels]] = {side: [] for side in SPLITS}
        labels: dict[str, list[int]] = {side: [] for side in SPLITS}
        entries = list(self._entries())
        images = each_read([path for path, _, _ in entries], decode_image)
        for image, (_, name, side) in zip(images, entries, strict=True):
            side = side or ("test" if in_test(_content(image)) else "train")
            pixels[side].append(_fitted(image, mode, size))
            labels[side].append(names.index(name))
        for side in {"train", split}:
            self._refuse_gaps(side, len(names), set(labels[side]))
        mean, std = statistics(np.stack(pixels["train"]))
        return Images(
            self.name,
            split,
            torch.from_numpy(np.stack(pixels[split])),
            torch.tensor(labels[split]),
            tuple(names),
            mean,
            std,
        )

    def verify(self, root: Path) -> Verification:
        """Decode every image; count the files that are no images by their suffix."""
        parts = self._parts()
        found = [listed(folder) for part in parts for folder in subfolders(part)]
        paths = [path for images, _ in found for path in images]
        problems = broken(paths)
        sizes: set[tuple[int, int]] = set()
        if not problems:
            sizes = {header(path)[1] for path in paths}
            try:
                list(self._entries())
            except GradveilError as error:
                problems = (FileCheck(self.path, False, str(error)),)
        layout = "split by folder" if len(parts) == 2 else "split by content, about 80 to 20"
        several = ""
        if len(sizes) > 1 or any(w != h for w, h in sizes):
            several = "of several sizes or not square (give an image size), "
        note = (
            f"{len(paths)} images, {several}{len(subfolders(parts[0]))} classes, {layout}; "
            f"{sum(others for _, others in found)} other files ignored"
        )
        return Verification(self.name, not problems, problems, note)

    def _parts(self) -> list[Path]:
        """Return the train and test folders, or the folder that holds the classes."""
        if not self.path.is_dir():
            raise GradveilError(
                f"no folder {self.path}: give a folder with one subfolder of images per class"
            )
        train, test = (self.path / split for split in SPLITS)
        if not train.is_dir() or (not test.is_dir() and not subfolders(train)):
            return [self.path]
        if not test.is_dir():
            raise GradveilError(
                f"{train} holds class folders, but there is no {test}: "
                f"add it, or give {train} itself to split by content"
            )
        return [train, test]

    def _entries(self) -> Iterator[tuple[Path, str, str | None]]:
        """Yield path, class and split of every image; the split is None where content decides."""
        parts = self._parts()
        names = self._names(parts[0])
        for number, part in enumerate(parts):
            for folder in subfolders(part):
                if folder.name not in names:
                    raise GradveilError(f"class {folder.name!r} is in {part} but not in {parts[0]}")
                paths, _ = listed(folder)
                if not paths:
                    raise GradveilError(
                        f"class folder {folder} has no images (png, jpg, jpeg, bmp, webp): "
                        "fill or remove it"
                    )
                split = SPLITS[number] if len(parts) == 2 else None
                yield from ((path, folder.name, split) for path in paths)

    def _names(self, part: Path) -> list[str]:
        names = [folder.name for folder in subfolders(part)]
        if len(names) < 2:
            raise GradveilError(
                f"{part} has {len(names)} class folder{'' if len(names) == 1 else 's'}: "
                "at least 2 are needed, one subfolder of images per class"
            )
        return names

    def _shape(self, paths: Sequence[Path], image_size: int | None) -> tuple[str, int]:
        headers = list(each_read(paths, header))
        mode = "L" if all(kind in _GRAY for kind, _ in headers) else "RGB"
        if image_size is not None:
            return mode, image_size
        first = headers[0][1]
        for path, (_, size) in zip(paths, headers, strict=True):
            if size != first or size[0] != size[1]:
                other = "" if path == paths[0] else f", {paths[0]} is {first[0]}x{first[1]}"
                raise GradveilError(
                    f"{self.path}: images are not of one square size: "
                    f"{path} is {size[0]}x{size[1]}{other}; give an image size, such as {min(size)}"
                )
        return mode, first[0]

    def _refuse_gaps(self, split: str, classes: int, labels: set[int]) -> None:
        if not labels or (split == "train" and len(labels) < classes):
            some = f"images of {len(labels)} of {classes} classes only" if labels else "no images"
            raise GradveilError(
                f"{self.path}: the {split} split has {some}: add images, "
                f"or divide them into {self.path / 'train'} and {self.path / 'test'}"
            )


def _fitted(image: Image.Image, mode: str, size: int) -> Pixels:
    plain = image.convert(mode)
    return chw(plain if plain.size == (size, size) else square(plain, size), mode)


def _content(image: Image.Image) -> bytes:
    """Return RGB pixels with their shape, whatever mode and size the images are loaded in."""
    return repr(image.size).encode() + image.convert("RGB").tobytes()
