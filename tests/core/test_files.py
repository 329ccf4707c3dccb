"""Files are whole or not there, whatever happens while they are written."""

import errno
import gzip
import os
import resource
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gradveil.core.errors import GradveilError
from gradveil.core.files import (
    append_lines,
    read_bytes,
    read_gzipped,
    regular_file,
    remove_unfinished,
    replacing,
    shown,
    unfinished,
    write_bytes,
    write_text,
)


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


@pytest.mark.parametrize("make", ["fifo", "socket", "device"])
def test_a_fifo_a_socket_or_a_device_is_never_replaced(tmp_path: Path, make: str) -> None:
    path = tmp_path / make
    if make == "fifo":
        os.mkfifo(path)
    elif make == "socket":
        with closing(socket.socket(socket.AF_UNIX)) as made:
            made.bind(str(path))
    else:
        path = Path("/dev/null")
    before = path.lstat().st_mode
    with pytest.raises(
        GradveilError, match=rf"^cannot write {path}: it is a {make if make != 'fifo' else 'FIFO'}"
    ):
        write_text(path, "text")
    assert path.lstat().st_mode == before and names(tmp_path) == (
        [make] if make != "device" else []
    )


def test_a_link_to_a_file_beside_it_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    assert names(tmp_path) == ["file", "link"]


@pytest.mark.parametrize("target", ["../outside", "nowhere", "/dev/null", "link", "below/file"])
def test_a_link_that_leads_elsewhere_is_refused(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (tmp_path / "outside").write_text("mine")
    (folder / "below" / "file").write_text("mine")
    (folder / "link").symlink_to(target)
    with pytest.raises(GradveilError, match=r"link: it is a link to .*remove the link"):
        write_text(folder / "link", "text")
    assert names(folder) == ["below", "link"] and (folder / "link").is_symlink()
    assert (tmp_path / "outside").read_text() == "mine" == (folder / "below/file").read_text()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x" * 10_000, "File name too long"),
        ("/".join("x" * 2_000), "2,?[0-9]* folders deep, at most 100"),
        ("." * 100_000, "File name too long"),
        ("a\0b", "zero byte"),
    ],
)
def test_a_name_that_no_file_can_have_is_one_short_line(
    tmp_path: Path, name: str, says: str
) -> None:
    with pytest.raises(GradveilError, match=says) as caught:
        write_text(tmp_path / name, "text")
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()
    assert not names(tmp_path)


def test_the_longest_name_of_the_system_can_be_written(tmp_path: Path) -> None:
    write_text(tmp_path / ("x" * 255), "text")
    assert names(tmp_path) == ["x" * 255]


@pytest.mark.parametrize(
    "text", [b"", b"a", b"\n", b"ab\ncd\n", b"ab\ncd", b"ab\n" + b"c" * 200_000]
)
def test_lines_are_added_after_the_last_whole_one(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text)
    append_lines(tmp_path / "file", b"next\n")
    assert (tmp_path / "file").read_bytes() == text[: text.rfind(b"\n") + 1] + b"next\n"


def test_lines_that_a_full_disk_cuts_short_are_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    append_lines(path, b"first\n")
    refused = pytest.raises(GradveilError, match=r"^cannot write .*file: File too large")
    with refused, files_of_at_most(1_000):
        append_lines(path, b"x" * 5_000 + b"\n")
    assert path.read_bytes() == b"first\n"
    append_lines(path, b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


@pytest.mark.parametrize("make", ["fifo", "link", "dangling", "device"])
def test_lines_are_added_to_no_fifo_device_or_link_to_elsewhere(tmp_path: Path, make: str) -> None:
    (tmp_path / "outside").write_text("mine")
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    if make == "fifo":
        os.mkfifo(path)
    elif make == "device":
        path = Path("/dev/null")
    else:
        path.symlink_to("../outside" if make == "link" else "../nowhere")
    with pytest.raises(GradveilError, match=rf"^cannot write {path}: it is a "):
        append_lines(path, b"text\n")
    assert (tmp_path / "outside").read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_a_text_is_shown_without_control_characters_and_not_longer_than_asked() -> None:
    assert shown("grün\x1b[31m\n\udcff") == "grün\\x1b[31m\\n\\udcff"
    assert shown("a" * 50 + "b" * 50, 10) == "aaaaa...bbbbb"


def test_regular_files_and_links_to_them_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert regular_file(tmp_path / "link").st_size == 3
    assert read_bytes(tmp_path / "link", 3) == b"abc"


def test_what_a_killed_process_left_of_a_file_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a[1].tar.gz"
    with replacing(path) as temporary:
        left = temporary.with_name(f"{temporary.name[:-5]}x.part")
        left.write_text("killed")
    for name in (".b.tar.gz.abc.part", ".a1.tar.gz.abc.part", "other.part"):
        (tmp_path / name).touch()
    (tmp_path / ".a[1].tar.gz.folder.part").mkdir()
    remove_unfinished(tmp_path, [unfinished(path)])
    assert not left.exists() and len(names(tmp_path)) == 5


def test_a_packed_file_is_unpacked_up_to_a_bound_and_damage_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    whole = gzip.compress(b"text" * 1_000)
    path.write_bytes(whole)
    assert read_gzipped(path, 4_000) == b"text" * 1_000
    with pytest.raises(GradveilError, match=r"x\.gz: it unpacks to more than 3,999 bytes"):
        read_gzipped(path, 3_999)
    for damaged in (whole[:-3], b"no gzip", whole[:12] + b"\xff" * 8 + whole[20:]):
        path.write_bytes(damaged)
        with pytest.raises(GradveilError, match=r"^cannot read .*x\.gz: [^\n]+$"):
            read_gzipped(path, 4_000)
