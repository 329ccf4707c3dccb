"""Files are whole or not there, whatever happens while they are written."""

import errno
import os
import resource
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradveil.core import GradveilError
from gradveil.core.files import replacing, write_bytes, write_text


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writes beyond this many bytes fail half way, as on a full disk.

    For the block alone: the limit holds for the test runner's log too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def failing(code: int) -> Callable[..., tuple[int, str]]:
    def fail(*_: object, **__: object) -> tuple[int, str]:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_file_is_written_with_the_folders_above_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    write_text(path, "grün\n")
    assert path.read_bytes() == "grün\n".encode()
    assert names(path.parent) == ["file.txt"]


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"long and old")
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.parent == tmp_path
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_block_leaves_the_folder_as_it_was(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old" and names(tmp_path) == ["file"]


def test_a_write_that_ends_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    refused = pytest.raises(
        GradveilError, match=r"^cannot write .*file: File too large; choose another folder$"
    )
    with refused, files_of_at_most(1_000):
        write_bytes(path, bytes(5_000))
    assert path.read_text() == "old" and names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOSPC, "no space left on the disk while writing"),
        (errno.EDQUOT, "no space left on the disk while writing"),
        (errno.EACCES, "Permission denied; choose another folder"),
        (errno.EROFS, "Read-only file system; choose another folder"),
        (errno.EIO, "Input/output error; choose another folder"),
    ],
)
def test_a_disk_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str
) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", failing(code))
    with pytest.raises(GradveilError, match=says) as caught:
        write_text(tmp_path / "file", "text")
    assert str(tmp_path / "file") in str(caught.value) and "\n" not in str(caught.value)
    assert not names(tmp_path)


def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GradveilError, match="a file stands where a folder should, or the reverse"):
        write_text(tmp_path / "file" / "below", "text")


def test_a_folder_in_place_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(GradveilError, match="a file stands where a folder should, or the reverse"):
        write_text(tmp_path / "folder", "text")
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_gets_the_rights_the_user_has_set(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "file", "text")
        kept = os.umask(mask)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask and kept == mask
