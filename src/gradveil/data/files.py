"""Official files and their checksums: a file is read whole, compared, and only then used."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from gradveil.core.errors import GradveilError


@dataclass(frozen=True)
class File:
    """A file as its owner publishes it; `path` is relative to the data root. `size` only helps to tell truncation from damage."""

    path: str
    md5: str
    size: int | None = None
    url: str | None = None


@dataclass(frozen=True)
class FileCheck:
    """What verification says of one file; `problem` is empty when it is ok."""

    path: Path
    ok: bool
    problem: str = ""


@dataclass(frozen=True)
class Verification:
    """The state of one dataset on disk; `note` counts what is there."""

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
    """The bytes of the file, which are the official ones: anything else is an error that names the file."""
    path = root / file.path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise GradveilError(f"cannot read {path}: {error.strerror}") from error
    problem = _difference(len(data), _md5(data).hexdigest(), file)
    if problem:
        raise GradveilError(f"{path}: {problem}; delete it and fetch it again")
    return data


def _md5(data: bytes = b"") -> "hashlib._Hash":
    return hashlib.md5(data, usedforsecurity=False)  # what the owners publish; it finds damage, not forgery


def _difference(size: int, digest: str, file: File) -> str:
    if digest == file.md5:
        return ""
    if file.size is not None and size < file.size:
        return f"truncated: {size} of {file.size} bytes"
    return f"corrupted: md5 is {digest}, official {file.md5}"
