"""Signals that end the program in good order: SIGTERM and SIGHUP do what Ctrl-C does.

It imports nothing slow, so that a program can use `stop_on_signals` before anything else.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
STOPPED = "error: stopped; run the same command again to go on"
SHOW_CURSOR = b"\x1b[?25h"  # which a progress bar has hidden

_received: list[int] = []
_told: list[bool] = []  # whether the user knows that the program was stopped
_over: list[bool] = []  # whether the work is done, and the program only has to end


class Stopped(KeyboardInterrupt):
    """A signal asked the program to end. Whatever cleans up after Ctrl-C does so after this too."""


def take_signals() -> dict[int, Any]:
    """Let SIGTERM and SIGHUP interrupt the program as Ctrl-C does; return the handlers before.

    A second signal ends it at once: whatever is being written is whole or not there anyway. A
    signal that is ignored stays ignored, as `nohup` wants it for SIGHUP.
    """
    before = {number: signal.getsignal(number) for number in _numbers()}
    taken = {
        number: handler
        for number, handler in before.items()
        if handler in (signal.SIG_DFL, signal.default_int_handler)
    }
    for number in taken:
        signal.signal(number, _stop)
    return taken


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Do what `take_signals` does, for a while."""
    taken = take_signals()
    _forget(taken)  # what a command that was interrupted before, in this process, has left
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        _forget(taken)


def _forget(taken: dict[int, Any]) -> None:
    """Forget signals of the past, unless an outer part of the program minds them."""
    if taken:
        _received.clear()
        _told.clear()


def signaled() -> bool:
    """Tell whether a signal came; the error it raised may have become another on its way."""
    return bool(_received)


def stop_if_signaled() -> None:
    """Raise what a signal raised before, where some library has caught it and gone on."""
    if _received and not _told:
        raise Stopped(signal.Signals(_received[-1]).name)


def exit_status() -> int:
    """Return the status of an interrupted program, as shells report it: 128 + the last signal."""
    return 128 + (_received[-1] if _received else signal.SIGINT)


def tell() -> None:
    """Say in one line, on the error stream, that the program was stopped; once."""
    if _told:
        return
    _told.append(True)
    with suppress(OSError, ValueError):  # the terminal may be gone
        try:
            sys.stderr.write(f"{STOPPED}\n")
            sys.stderr.flush()
        except RuntimeError:  # the signal came while this very stream was written
            os.write(2, f"\n{STOPPED}\n".encode())


def finish() -> None:
    """Let a signal end the program at once from now on: its work is done."""
    _over.append(True)


def end() -> None:
    """End the program now, with the line and the status of an interruption.

    Nothing is cleaned up, and no thread is waited for.
    """
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, SHOW_CURSOR)
    tell()
    os._exit(exit_status())


def _numbers() -> list[int]:
    return [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


def _stop(number: int, _: FrameType | None) -> None:
    _received.append(number)
    if _over or len(_received) > 1:
        end()
    raise Stopped(signal.Signals(number).name)
