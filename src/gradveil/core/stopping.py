"""Signals that end the program in good order: SIGTERM and SIGHUP do what Ctrl-C does.

It imports nothing slow, so that a program can use `stop_on_signals` before anything else.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
STOPPED = "error: stopped; run the same command again to go on"

_received: list[int] = []


class Stopped(KeyboardInterrupt):
    """A signal asked the program to end. Whatever cleans up after Ctrl-C does so after this too."""


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt the program as Ctrl-C does, for a while.

    A signal that is ignored stays ignored, as `nohup` wants it for SIGHUP.
    """
    before = {number: signal.getsignal(number) for number in _numbers()}
    taken = {
        number: handler
        for number, handler in before.items()
        if handler in (signal.SIG_DFL, signal.default_int_handler)
    }
    try:
        for number in taken:
            signal.signal(number, _stop)
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        if taken:
            _received.clear()


def signaled() -> bool:
    """Tell whether a signal came; the error it raised may have become another on its way."""
    return bool(_received)


def exit_status() -> int:
    """The status of a program that was interrupted, as shells report it: 128 + the last signal."""
    return 128 + (_received[-1] if _received else signal.SIGINT)


def ignore_signals() -> None:
    """Let the program say its last words: from now on it ends by itself in a moment."""
    for number in _numbers():
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_IGN)


def _numbers() -> list[int]:
    return [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


def _stop(number: int, _: FrameType | None) -> None:
    _received.append(number)
    raise Stopped(signal.Signals(number).name)
