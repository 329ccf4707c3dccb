"""Runs the command line many times from one process that has imported everything already.

Each message asks for one run, and is answered by one: the run's status, what it wrote to both
streams, its seconds of processor time and the most memory it took. Each run is a fork.
"""

import contextlib
import gc
import importlib
import io
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from breaking import STAND_INS

HEAVY = (
    *("gradveil.cli", "gradveil.audits.run", "gradveil.search.study", "gradveil.report.pictures"),
    *("gradveil.checks.doctor", "gradveil.updates", "gradveil.report.search", "gradveil.training"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "gradveil.report.certificates"),
)
LATER = {
    "train": ("gradveil.training.lightning",),
    "reproduce": ("gradveil.training.lightning", "gradveil.papers.catalog"),
    "federate": ("gradveil.federated.run",),
}
GROWTH = 2 << 30  # bytes of memory a run may take more than this process has
KEPT = 1 << 20  # bytes of a stream that are answered


def serve(messages: Connection) -> None:
    """Answer each message, until the other end is closed."""
    for name in HEAVY:
        importlib.import_module(name)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    importlib.import_module("gradveil.cli").run(["policy", "show", "3"])  # typer's own imports
    gc.freeze()  # or every fork copies the memory that the collector touches
    with contextlib.suppress(EOFError):
        while True:
            messages.send(run(messages.recv()))


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run one command; `shown` and `said` are its two streams."""
    for name in LATER.get(asked["arguments"][0], ()) if asked["arguments"] else ():
        importlib.import_module(name)  # once, here, and not in every fork
    if asked["job"]:
        STAND_INS.get(asked["arguments"][0], lambda: None)()
    with tempfile.TemporaryFile() as shown, tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            become(asked, shown, said)
        status, usage = ended(child, time.monotonic() + asked["seconds"])
        return {
            "status": status,
            "shown": content(shown),
            "said": content(said),
            "seconds": usage.ru_utime + usage.ru_stime,
            "megabytes": usage.ru_maxrss / 1024,
        }


def ended(child: int, deadline: float) -> tuple[int, resource.struct_rusage]:
    """The child's status, -9 where it had to be killed, and what it used of the machine."""
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), usage
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.002)


def content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(KEPT).decode("latin1")


def become(asked: dict[str, Any], shown: IO[bytes], said: IO[bytes]) -> None:
    """In the child: take on the streams, folder and limits asked for, and be the program."""
    status = 99
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ends = ((1, shown, asked["out"]), (2, said, asked["err"]))
        for number, file, kind in sorted(ends, key=lambda end: end[2] == "closed"):
            connect(number, file, kind)  # closed last, or the other gets the free number too
        os.chdir(os.fsencode(asked["folder"]))
        os.environ.update(asked["environment"])
        limit = GROWTH + int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        encoding, errors = asked["encoding"]
        # The streams as the interpreter makes them when it starts.
        sys.stdin = open(0)  # noqa: SIM115
        sys.stdout = stream(1, asked["out"], encoding, errors)
        sys.stderr = stream(2, asked["err"], encoding, "backslashreplace")
        warnings.resetwarnings()
        status = program([os.fsdecode(word.encode("latin1")) for word in asked["arguments"]])
    except BaseException:
        os.write(said.fileno(), f"\nTraceback outside\n{traceback.format_exc()}".encode())
    os._exit(status)


def connect(number: int, file: IO[bytes], kind: str) -> None:
    if kind == "kept":
        os.dup2(file.fileno(), number)
    elif kind == "full":
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, number)
        os.close(full)
    elif kind == "gone":  # a pipe that nobody reads
        ends = os.pipe()
        os.dup2(ends[1], number)
        for end in ends:
            os.close(end)
    elif kind == "closed":
        os.close(number)


def stream(number: int, kind: str, encoding: str, errors: str) -> Any:
    if kind == "closed":
        return None
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=number == 2)


def program(arguments: list[str]) -> int:
    """As the interpreter runs it: what is still to be written is written at the end."""
    from gradveil.__main__ import main

    status = 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.argv = ["gradveil", *arguments]
        main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except Exception:
        with contextlib.suppress(Exception):
            sys.stderr.write("Exception ignored while flushing sys.stdout\nTraceback\n")
        status = 120
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    return status
