"""Unpacking: only what is wanted, only from the official bytes, all or nothing."""

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from gradveil.core.errors import GradveilError
from gradveil.data.files import Archive, File, unpack

MEMBERS = r"set/(a|sub/\w+\.JPEG)"


def tar(path: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> Archive:
    with tarfile.open(path, "w:gz") as out:
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            out.addfile(link)
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return described(path)


def zipped(path: Path, members: dict[str, bytes]) -> Archive:
    with zipfile.ZipFile(path, "w") as out:
        for name, data in members.items():
            out.writestr(name, data)
    return described(path)


def described(path: Path) -> Archive:
    return Archive(File(path.name, hashlib.md5(path.read_bytes()).hexdigest()), "set", MEMBERS)


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make", [tar, zipped])
def test_wanted_members_are_unpacked_and_others_left(tmp_path: Path, make: object) -> None:
    root = tmp_path / "root"
    root.mkdir()
    members = {
        "set/a": b"1",
        "set/sub/x.JPEG": b"2",
        "set/other": b"3",
        "../evil": b"4",
        "set/../../evil": b"5",
        "/evil": b"6",
    }
    archive = (
        tar(root / "set.tar.gz", members) if make is tar else zipped(root / "set.zip", members)
    )
    unpack(root, archive)
    assert (
        everything(root) == {archive.file.path, "set/a", "set/sub/x.JPEG"}
        and (root / "set/sub/x.JPEG").read_bytes() == b"2"
    )
    assert everything(tmp_path) == {f"root/{name}" for name in everything(root)}


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    unpack(
        root,
        tar(
            root / "set.tar.gz",
            {"set/sub/x.JPEG": b"2"},
            links={"set/sub": str(outside), "set/a": str(outside / "a")},
        ),
    )
    assert (
        not list(outside.iterdir())
        and not (root / "set/a").exists()
        and (root / "set/sub/x.JPEG").read_bytes() == b"2"
    )


def test_an_archive_with_another_checksum_is_not_unpacked(tmp_path: Path) -> None:
    archive = tar(tmp_path / "set.tar.gz", {"set/a": b"1"})
    (tmp_path / "set.tar.gz").write_bytes((tmp_path / "set.tar.gz").read_bytes() + b"x")
    with pytest.raises(GradveilError, match=r"set\.tar\.gz: corrupted"):
        unpack(tmp_path, archive)
    assert everything(tmp_path) == {"set.tar.gz"}


def test_an_archive_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    tar(
        tmp_path / "set.tar.gz",
        {"set/a": bytes(1 << 16), "set/sub/x.JPEG": hashlib.sha512(b"").digest() * 4000},
    )
    (tmp_path / "set.tar.gz").write_bytes((tmp_path / "set.tar.gz").read_bytes()[:-120])
    with pytest.raises(GradveilError, match=r"cannot unpack .*set\.tar\.gz"):
        unpack(tmp_path, described(tmp_path / "set.tar.gz"))
    assert everything(tmp_path) == {"set.tar.gz"} and len(list(tmp_path.iterdir())) == 1


def test_an_archive_of_something_else_says_so(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="holds none of the files expected"):
        unpack(tmp_path, zipped(tmp_path / "set.zip", {"b": b"1"}))


def test_files_join_a_folder_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/mine").write_text("kept")
    unpack(tmp_path, tar(tmp_path / "set.tar.gz", {"set/a": b"1"}))
    assert everything(tmp_path) == {"set.tar.gz", "set/mine", "set/a"}
