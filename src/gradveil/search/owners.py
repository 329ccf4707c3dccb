"""The processes that work at a study; those that live are told by their heartbeats in it."""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

BEAT = 10.0  # seconds between heartbeats
SILENCE = 60.0  # seconds without one after which a process counts as dead
PROCESSES = Path("/proc")


class OwnerEntry(Struct, frozen=True):
    """`owner:<id>` of a study: the process that holds trials; `beat` is None once it has left."""

    host: str
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    start: str | None
    beat: float | None


@dataclass(frozen=True)
class Owner:
    """A process that works at a study.

    `host` tells machines, their restarts and their containers apart; `start` tells processes with
    the same number apart.
    """

    id: str
    host: str
    pid: int
    start: str | None

    def entry(self, beat: float | None) -> OwnerEntry:
        """Return what the study keeps: `beat` is the time of the last heartbeat; None: it left."""
        return OwnerEntry(self.host, self.pid, self.start, beat)


def this_process() -> Owner:
    return Owner(uuid.uuid4().hex[:12], _host(), os.getpid(), _started(os.getpid()))


def lives(entry: OwnerEntry) -> bool:
    """Tell whether the owner of this entry still works.

    The clocks of two machines may differ by less than `SILENCE`.
    """
    if entry.beat is None or time.time() - entry.beat > SILENCE:
        return False
    if entry.host != _host():
        return True
    start = _started(entry.pid)
    return start is not None and start == str(entry.start)


def _started(pid: int) -> str | None:
    """Return when a process of this machine started, in ticks since the machine did; None: gone.

    A killed process stays a zombie until its parent asks after it, and a signal still reaches a
    zombie: only the process table tells. So the trials of a killed search are free at once, not
    after a minute of silence. Without a process table, answer `running` or None.
    """
    if not (PROCESSES / "self" / "stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass  # it is another user's
        return "running"
    try:
        fields = (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@cache
def _host() -> str:
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append((PROCESSES / "sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink(PROCESSES / "self/ns/pid"))  # noqa: PTH115  # it points to no path
    return " ".join(parts)


class Heartbeat:
    """Call `beat` every few seconds, in a thread, until stopped.

    A call that fails is made up for by the next.
    """

    def __init__(self, beat: Callable[[], None], every: float = BEAT) -> None:
        self._beat = beat
        self._every = every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._every):
            with suppress(Exception):  # a storage may be away; after SILENCE others take over
                self._beat()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
