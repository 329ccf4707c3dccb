"""Unpacking an official archive: checked first, wanted members only, the whole folder or nothing."""

import re
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gradveil.core.errors import GradveilError
from gradveil.data.files import File, check


@dataclass(frozen=True)
class Archive:
    """A published .tar.gz or .zip. `members` is the pattern a member's whole name must match to be unpacked into `folder`.

    The pattern is a list of what may be written: names with `..`, absolute names and links never match.
    """

    file: File
    folder: str
    members: str


def unpack(root: Path, archive: Archive) -> None:
    """Write the wanted members below the root. The folder appears complete, or files join the ones already there."""
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
            source_or_none = tar.extractfile(member) if member.isreg() and wanted.fullmatch(member.name) else None
            if source_or_none is not None:
                yield member.name, source_or_none


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
        place = target / source.relative_to(staged)
        place.parent.mkdir(parents=True, exist_ok=True)
        source.replace(place)
