"""Whose a trial is, and whether that process still lives: its heartbeat in the study, and a look at the process on the same machine."""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

BEAT = 10.0  # seconds between heartbeats
SILENCE = 60.0  # seconds without one after which a process counts as dead
PROCESSES = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """`host` tells machines, their restarts and their containers apart; `start` tells processes with the same number apart."""

    id: str
    host: str
    pid: int
    start: str | None

    def entry(self, beat: float | None) -> dict[str, Any]:
        """For the study: None once it has left."""
        return {"host": self.host, "pid": self.pid, "start": self.start, "beat": beat}


def this_process() -> Owner:
    return Owner(uuid.uuid4().hex[:12], _host(), os.getpid(), started(os.getpid()))


def lives(entry: Mapping[str, Any] | None) -> bool:
    """Of what the study knows of an owner. Another machine's clock may differ from this one's by less than `SILENCE`."""
    if entry is None or entry["beat"] is None or time.time() - entry["beat"] > SILENCE:
        return False
    start = started(entry["pid"])
    return entry["host"] != _host() or (start is not None and start == str(entry["start"]))


def started(pid: int) -> str | None:
    """When a process of this machine started, in the system's own count; None when it is gone. Where that is not told: `running`."""
    if not (PROCESSES / "self" / "stat").exists():
        return _answers(pid)
    try:
        fields = (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # a killed process stays a zombie until its parent asks


def _answers(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # another user's
    return "running"


@cache
def _host() -> str:
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append((PROCESSES / "sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink(PROCESSES / "self/ns/pid"))  # noqa: PTH115  # it points to no path
    return " ".join(parts)


class Heart:
    """Beats in a thread of its own until it is stopped. A beat that fails is made up for by the next."""

    def __init__(self, beat: Callable[[], None], every: float = BEAT) -> None:
        self._beat = beat
        self._every = every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._go, name="heartbeat", daemon=True)
        self._thread.start()

    def _go(self) -> None:
        while not self._stopped.wait(self._every):
            with suppress(Exception):  # a storage that is away for a while: after SILENCE others take over
                self._beat()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
