"""Locks of files and folders, which end with the process that holds them, however it ends."""

import errno
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.files import opened, shown

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"  # in a folder that a process holds; it says which
HOLDER = re.compile(r"process [0-9]{1,10} on [!-~]{1,255}\n")
UNKNOWN = "another process"
LACKING = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""Errors of a file system that knows no locks, as some that are mounted over a network."""


@contextmanager
def alone(folder: Path, doing: str) -> Iterator[None]:
    """Hold the folder; where another process holds it, refuse with a line that names that one.

    `doing` is the work in that line, such as "training into".
    """

    def refuse(holder: str) -> None:
        raise GradveilError(
            f"{holder} is {doing} {shown(folder)}: wait for it, or choose another --out"
        )

    with held(folder, refuse):
        yield


def refuse_held(folder: Path, doing: str) -> None:
    """Refuse a folder that another process holds, as `alone` does, before the work begins."""
    if (folder / LOCK).exists():
        with alone(folder, doing):
            """A killed process left the file behind."""


def clear_lock(folder: Path) -> None:
    """Remove the file that a killed process left in a folder; a living one removes its own."""

    def leave(_: str) -> None:
        raise BlockingIOError

    if (folder / LOCK).exists():
        with suppress(OSError, GradveilError), held(folder, leave):
            """Letting go of it removes it."""


@contextmanager
def held(folder: Path, busy: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder, which is made if need be. Afterwards one that stayed empty is removed.

    `busy` is called with the holder, such as "process 12 on host", when another process holds it;
    if it returns, the lock is waited for.
    """
    path = folder / LOCK
    with locked(path, lambda: busy(_holder(path))) as file:
        try:
            # The holder's name is a courtesy: a full disk is told of by the files that matter.
            with suppress(OSError):
                file.truncate(0)
                file.seek(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield
        finally:
            # Whoever waits for the file finds out that it is gone, and makes another.
            with suppress(OSError):
                path.unlink(missing_ok=True)
                folder.rmdir()


@contextmanager
def locked(path: Path, busy: Callable[[], None] = lambda: None) -> Iterator[IO[bytes]]:
    """Hold the lock of a file, which is made if need be; its content is left alone.

    `busy` is called when another process holds it; if it returns, the lock is waited for.
    """
    while True:
        with opened(path) as file:
            _lock(file, path, busy)
            if _is_there(file, path):
                yield file
                return


def _is_there(file: IO[bytes], path: Path) -> bool:
    """Tell whether the path still leads to this file: one that was removed locks nobody out."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: IO[bytes], path: Path, busy: Callable[[], None]) -> None:
    if sys.platform == "win32":  # which has no such lock
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in LACKING:
            raise
        warnings.warn(
            f"the file system of {shown(path)} has no locks: let no second process work there",
            GradveilWarning,
            stacklevel=2,
        )


def _holder(path: Path) -> str:
    """Name the process that holds the lock, by its file; one from elsewhere may say anything."""
    try:
        text = path.read_bytes()[:300].decode("ascii")
    except (OSError, UnicodeDecodeError):
        return UNKNOWN
    return text.strip() if HOLDER.fullmatch(text) else UNKNOWN
