"""A folder is held by one process, which another one names; a lock goes with its process."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.locks import alone, held, locked, refuse_held

HOLDER = """
import time
from gradveil.core.locks import alone, locked

path, sign = arguments
with locked(path) if path.name == "lock" else alone(path, "working in"):
    sign.touch()
    time.sleep(600)
"""
Start = Callable[[Path], BaseProcess]


@pytest.fixture
def start(
    start_process: Callable[..., BaseProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Start another process that holds a file or folder until it is killed."""
    running = []

    def start(path: Path) -> BaseProcess:
        sign = tmp_path_factory.mktemp("holder") / "held"
        process = start_process(HOLDER, path, sign)
        running.append(process)
        until = time.monotonic() + 60
        while not sign.exists():
            assert process.is_alive() and time.monotonic() < until
            time.sleep(0.002)
        return process

    yield start
    for process in running:
        process.kill()
        process.join()


def refuse() -> None:
    raise GradveilError("busy")


def test_a_lock_is_refused_or_waited_for_and_goes_with_its_process(
    tmp_path: Path, start: Start
) -> None:
    holder = start(tmp_path / "lock")
    with pytest.raises(GradveilError, match="busy"), locked(tmp_path / "lock", refuse):
        pytest.fail("two at once")
    with locked(tmp_path / "lock", holder.kill):  # it is waited for, and its holder's end frees it
        pass
    with locked(tmp_path / "lock", refuse):
        pass


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(
    tmp_path: Path, start: Start
) -> None:
    holder = start(tmp_path / "lock")

    def remove() -> None:
        (tmp_path / "lock").unlink()
        holder.kill()

    with locked(tmp_path / "lock", remove):
        assert (tmp_path / "lock").is_file()


@pytest.mark.parametrize("attempt", [alone, refuse_held])
def test_a_folder_that_is_held_is_refused_with_the_process_and_the_host(
    tmp_path: Path, start: Start, attempt: Callable[[Path, str], object]
) -> None:
    out = tmp_path / "out"
    holder = start(out)
    with pytest.raises(GradveilError) as caught:
        entered = attempt(out, "working in")
        if entered is not None:
            with entered:  # type: ignore[attr-defined]
                pytest.fail("two at once")
    assert str(caught.value) == (
        f"process {holder.pid} on {socket.gethostname()} is working in {out}: wait for it, or "
        "choose another --out"
    )


def test_a_folder_is_free_again_after_its_holder_was_killed_and_left_its_lock(
    tmp_path: Path, start: Start
) -> None:
    holder = start(tmp_path / "out")
    holder.kill()
    holder.join()
    assert (tmp_path / "out" / ".lock").is_file()
    refuse_held(tmp_path / "out", "working in")
    with alone(tmp_path / "out", "working in"):
        (tmp_path / "out" / "result").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["result"]


def test_a_folder_that_stayed_empty_is_removed(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="no"), alone(tmp_path / "out", "working in"):
        assert (tmp_path / "out").is_dir()
        raise GradveilError("no")
    assert not (tmp_path / "out").exists()


def test_a_lock_that_says_nonsense_names_nobody(tmp_path: Path) -> None:
    said: list[str] = []
    with held(tmp_path / "out", said.append):
        for text in (b"\xff", b"process 1 on \x1b[31m\n", b"", b"x" * 10_000):
            (tmp_path / "out" / ".lock").write_bytes(text)
            with pytest.raises(GradveilError, match=r"^another process is working in"):
                refuse_held(tmp_path / "out", "working in")
    assert said == []


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".lock"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    with (
        pytest.raises(GradveilError, match=f"^cannot write {path}: "),
        alone(tmp_path, "working in"),
    ):
        pytest.fail("it was held")
    assert path.lstat()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_is_warned_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def lacking(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", lacking)
    with (
        pytest.warns(GradveilWarning, match=r"has no locks: let no second process work there"),
        alone(tmp_path / "out", "working in"),
    ):
        (tmp_path / "out" / "result").touch()
    assert (tmp_path / "out" / "result").is_file()
