"""Decoded images kept on disk and mapped into memory, so that a data set is decoded once.

An entry is `<name>-<split>-<size>-<key>` with three files: `.images.npy`, `.labels.npy`, and
`.json`, which is written last and makes the entry whole. The key covers the data set's description
(checksums included) and the path, size and time of every source file: when a source changes, the
entry is built anew, and building compares the checksums.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradveil.core.errors import GradveilError
from gradveil.core.files import regular_file, replacing, write_text
from gradveil.core.formats import CacheFacts
from gradveil.core.reading import read_json
from gradveil.core.tensor_files import array_bytes
from gradveil.data.base import Dataset, Source
from gradveil.data.images import Images

VERSION = 1  # raise it when the same files would decode to other pixels


def cache_folder() -> Path:
    """Return $GRADVEIL_CACHE, else $XDG_CACHE_HOME/gradveil, else ~/.cache/gradveil."""
    if chosen := os.environ.get("GRADVEIL_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "gradveil"
    return Path.home() / ".cache" / "gradveil"


def cached(source: Source, root: Path, split: str, image_size: int | None) -> Images:
    """Return the split from the cache, or read it, check it and keep it there.

    Two processes that build an entry at the same time write the same bytes.
    """
    key = _key(source, root, split)
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", Path(source.name).name or source.name).strip("-.")
    stem = f"{slug}-{split}-{image_size or 'native'}-{key}"
    folder = cache_folder()
    found = _restored(folder, stem, source, split)
    if found is not None:
        return found
    images = source.read(root, split, image_size)
    try:
        _keep(folder, stem, images)
    except (OSError, GradveilError) as error:
        raise GradveilError(
            f"{error} (GRADVEIL_CACHE can name another folder for the cache)"
        ) from error
    kept = _restored(folder, stem, source, split)
    if kept is None:
        raise GradveilError(
            f"the cache entry {folder / stem} was damaged or removed while it was written; "
            "run again"
        )
    return kept


def _key(source: Source, root: Path, split: str) -> str:
    digest = hashlib.sha256(repr((VERSION, source, os.path.realpath(root), split)).encode())
    for path in source.sources(root, split):
        try:
            state = path.stat()
        except OSError as error:
            raise GradveilError(f"cannot read {path}: {error.strerror}") from error
        facts = f"{path}\0{state.st_size}\0{state.st_mtime_ns}\n"
        digest.update(facts.encode(errors="surrogateescape"))  # a name may be no UTF-8
    return digest.hexdigest()[:20]


def _keep(folder: Path, stem: str, images: Images) -> None:
    _save(folder / f"{stem}.images.npy", images.images.numpy())
    _save(folder / f"{stem}.labels.npy", images.labels.numpy())
    write_text(
        folder / f"{stem}.json",
        json.dumps({"classes": images.classes, "mean": images.mean, "std": images.std}),
    )


def _save(path: Path, array: NDArray[Any]) -> None:
    """Write the array as np.save does, whose error on a full disk has no code to tell by."""
    whole = np.ascontiguousarray(array)
    with replacing(path) as temporary, temporary.open("wb") as handle:
        np.lib.format.write_array_header_1_0(
            handle, np.lib.format.header_data_from_array_1_0(whole)
        )
        handle.write(whole.data.cast("B"))


def _restored(folder: Path, stem: str, source: Source, split: str) -> Images | None:
    """Return the entry, or None when it is absent or damaged and so must be built."""
    try:
        facts = read_json(folder / f"{stem}.json", CacheFacts)
        pixels, labels = (_array(folder / f"{stem}.{part}.npy") for part in ("images", "labels"))
    except (OSError, ValueError, EOFError):
        return None
    if not (_fits(facts, pixels, labels) and _is_of(source, facts)):
        return None
    return Images(
        source.name,
        split,
        torch.from_numpy(pixels),
        torch.from_numpy(np.array(labels)),
        tuple(facts.classes),
        tuple(facts.mean),
        tuple(facts.std),
    )


def _array(path: Path) -> NDArray[Any]:
    """Map the array of a file into memory, once it is as long as its header says."""
    size = regular_file(path).st_size
    with path.open("rb") as file:
        if array_bytes(file) != size:
            raise ValueError(f"{path} is not as long as its header says")
    return np.asarray(np.load(path, mmap_mode="c", allow_pickle=False))


def _fits(facts: CacheFacts, pixels: NDArray[Any], labels: NDArray[Any]) -> bool:
    """Tell whether the parts of an entry fit: NCHW bytes, and a class for each image."""
    return (
        pixels.dtype == np.uint8
        and pixels.ndim == 4
        and labels.dtype == np.int64
        and labels.shape == pixels.shape[:1]
        and pixels.shape[1] == len(facts.mean) == len(facts.std)
        and min(facts.std) > 0
        and (not len(labels) or 0 <= labels.min() <= labels.max() < len(facts.classes))
    )


def _is_of(source: Source, facts: CacheFacts) -> bool:
    """Tell whether an entry has the mean and standard deviation published of its data set."""
    if not isinstance(source, Dataset):
        return True
    return (tuple(facts.mean), tuple(facts.std)) == (source.mean, source.std)
