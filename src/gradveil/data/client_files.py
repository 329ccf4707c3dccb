"""The images of a client, as its owner gives them: a folder of pictures, or a .npz of arrays.

The pictures are taken in the order of their names, 2.png before 10.png, whatever folder each lies
in; where all lie in folders named after their classes, or the numbers of these, their labels are
known.
A .npz has `images`, (N, C, H, W) of bytes or in [0, 1], and perhaps `labels`, N class indices.
"""

from pathlib import Path

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError, one_line, unknown
from gradveil.core.files import regular_file, shown
from gradveil.core.tensor_files import read_npz
from gradveil.data.decode import chw, decode_image, decoded, each_read, listed, natural, square
from gradveil.data.images import Images, as_images

NPZ = ".npz"
LABELS = "labels"


def find_client(folder: Path, client: str) -> Path | None:
    """Return the path of a client's images in a folder for all clients; None where it has none."""
    for name in (client, f"client-{client}"):
        for path in (folder / name, folder / f"{name}{NPZ}"):
            if path.exists():
                return path
    return None


def read_client(
    path: Path, like: Images, *, resized: bool = False, labeled: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return a client's images, (N, C, H, W) of bytes, and their labels; None where not told.

    They have the shape and the classes of `like`. Pictures of another size are refused, or
    `resized` as those of a folder data set are. With `labeled` False nobody asks for labels.
    """
    if path.is_dir():
        return _pictures(path, like, resized, labeled)
    if not path.exists():
        raise GradveilError(f"images of a client: there is no {shown(path)}")
    if path.suffix.lower() != NPZ:
        raise GradveilError(
            f"images of a client: {shown(path)} is neither a folder of pictures nor a {NPZ}"
        )
    return _arrays(path, like)


def _pictures(
    folder: Path, like: Images, resized: bool, labeled: bool
) -> tuple[Tensor, Tensor | None]:
    found, _ = listed(folder)
    if not found:
        raise GradveilError(f"{shown(folder)} has no images (png, jpg, jpeg, bmp, webp)")
    paths = sorted(found, key=natural)
    mode, size = "L" if like.channels == 1 else "RGB", like.size
    if resized:
        pixels = torch.stack(
            [
                torch.tensor(chw(square(image, size), mode))
                for image in each_read(paths, decode_image)
            ]
        )
    else:
        pixels = torch.from_numpy(decoded(paths, mode, size))
    parts = [path.relative_to(folder).parts for path in paths]
    if not labeled or any(len(part) < 2 for part in parts):
        return pixels, None
    return pixels, torch.tensor([_label(part[0], like, folder) for part in parts])


def _label(name: str, like: Images, folder: Path) -> int:
    if name in like.classes:
        return like.classes.index(name)
    if name.isdecimal() and int(name) < len(like.classes):
        return int(name)
    raise unknown(f"class in {shown(folder)}", name, like.classes)


def _arrays(path: Path, like: Images) -> tuple[Tensor, Tensor | None]:
    try:
        regular_file(path)
        arrays = read_npz(path)
    except GradveilError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        raise GradveilError(f"{shown(path)} cannot be read as {NPZ}: {one_line(error)}") from None
    if "images" not in arrays:
        there = ", ".join(map(shown, arrays)) or "nothing"
        raise GradveilError(f"{shown(path)} has no array 'images': it has {there}")
    images = torch.from_numpy(arrays["images"])
    labels = torch.from_numpy(arrays[LABELS]) if LABELS in arrays else None
    given = torch.zeros(len(images), dtype=torch.long) if labels is None else labels
    made = as_images(
        images, given, name=shown(path), classes=like.classes, mean=like.mean, std=like.std
    )
    if made.images.shape[1:] != like.images.shape[1:]:
        theirs, ours = (tuple(some.images.shape[1:]) for some in (made, like))
        raise GradveilError(f"{shown(path)}: images of shape {theirs}; the model's have {ours}")
    return made.images, None if labels is None else made.labels
