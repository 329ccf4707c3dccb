"""Official files: their checksums, the pickles in them, and the archives they come in.

A file is read whole, compared with its checksum, and only then used. Unpickling and unpacking take
only listed types and names.
"""

import hashlib
import io
import pickle
import re
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.files import check_writable, regular_file


@dataclass(frozen=True)
class File:
    """A file as its owner publishes it; `path` is relative to the data root.

    `size`, in bytes, only helps to tell truncation from damage.
    """

    path: str
    md5: str
    size: int | None = None
    url: str | None = None


@dataclass(frozen=True)
class FileCheck:
    """The state of a file on disk; `problem` is empty when it is ok."""

    path: Path
    ok: bool
    problem: str = ""


@dataclass(frozen=True)
class Verification:
    """The state of a data set on disk; `note` counts the images or files that are there."""

    name: str
    ok: bool
    files: tuple[FileCheck, ...]
    note: str


def check(root: Path, file: File) -> FileCheck:
    """Compare the file on disk with its official checksum, without keeping it in memory."""
    path = root / file.path
    if not path.is_file():
        return FileCheck(path, False, "missing")
    try:
        with path.open("rb") as handle:
            digest = hashlib.file_digest(handle, _md5).hexdigest()
    except OSError as error:
        return FileCheck(path, False, f"cannot be read: {error.strerror}")
    problem = _difference(path.stat().st_size, digest, file)
    return FileCheck(path, not problem, problem)


def checked_bytes(root: Path, file: File) -> bytes:
    """Return the bytes of the file; refuse any but the official ones."""
    path = root / file.path
    regular_file(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise GradveilError(f"cannot read {path}: {error.strerror}") from error
    problem = _difference(len(data), _md5(data).hexdigest(), file)
    if problem:
        raise GradveilError(f"{path}: {problem}; delete it and fetch it again")
    return data


# The owners publish MD5 sums, which find damage, not forgery.
_md5 = partial(hashlib.md5, usedforsecurity=False)


def _difference(size: int, digest: str, file: File) -> str:
    if digest == file.md5:
        return ""
    if file.size is not None and size < file.size:
        return f"truncated: {size} of {file.size} bytes"
    return f"corrupted: md5 is {digest}, official {file.md5}"


# NumPy's function that pickles of arrays call. Its module was renamed in NumPy 2, so an array is
# asked for it.
_reconstruct: Any = np.empty(0).__reduce__()[0]


def _array(kind: type, shape: tuple[int, ...], code: bytes) -> Any:
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"array of {kind!r}")
    return _reconstruct(kind, shape, code)


def _dtype(spec: bytes | str, *_: object) -> Any:
    """Return the type of bytes; refuse others, since an array of objects could carry anything.

    NumPy 2.4 warns of the flags that old pickles pass, so they are left out.
    """
    text = spec.decode() if isinstance(spec, bytes) else spec
    if text != "u1":
        raise pickle.UnpicklingError(f"array of {text!r}")
    return np.dtype("u1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def loads(data: bytes, origin: object) -> dict[bytes, Any]:
    """Return the dictionary in a pickle whose checksum was compared; `origin` is for errors."""
    try:
        found = _Restricted(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise GradveilError(f"{origin}: refused to unpickle: {error}") from error
    if not isinstance(found, dict):
        raise GradveilError(
            f"{origin}: refused to unpickle: it holds {kind_of(found)}, not a dictionary"
        )
    return found


@dataclass(frozen=True)
class Archive:
    """A published .tar.gz or .zip whose members are unpacked into `folder`.

    A member's whole name must match the pattern `members`, which lists all that may be written:
    names with `..`, absolute names and links never match.
    """

    file: File
    folder: str
    members: str


def unpack(root: Path, archive: Archive) -> None:
    """Write the wanted members below the root.

    The folder appears complete, or files join those already there.
    """
    path = root / archive.file.path
    state = check(root, archive.file)
    if not state.ok:
        raise GradveilError(f"{path}: {state.problem}; delete it and fetch it again")
    try:
        with _staging(root, archive.folder) as staging:
            for name, source in _members(path, re.compile(archive.members)):
                target = staging / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as out:
                    shutil.copyfileobj(source, out)
            _move(staging / archive.folder, root / archive.folder)
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise GradveilError(f"cannot unpack {path} below {root}: {error}") from error


@contextmanager
def _staging(root: Path, folder: str) -> Iterator[Path]:
    staging = Path(tempfile.mkdtemp(dir=root, prefix=f".{folder}.", suffix=".part"))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _members(path: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, IO[bytes]]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if wanted.fullmatch(info.filename):
                    with archive.open(info) as source:
                        yield info.filename, source
        return
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isreg() and wanted.fullmatch(member.name):
                extracted = tar.extractfile(member)
                if extracted is not None:
                    yield member.name, extracted


def _move(staged: Path, target: Path) -> None:
    if not staged.is_dir():
        raise OSError("it holds none of the files expected")
    if not target.exists():
        try:
            staged.rename(target)
            return
        except OSError:
            if not target.is_dir():  # another process may have put the same folder there meanwhile
                raise
    for source in sorted(path for path in staged.rglob("*") if path.is_file()):
        moved = target / source.relative_to(staged)
        check_writable(moved)
        moved.parent.mkdir(parents=True, exist_ok=True)
        source.replace(moved)
