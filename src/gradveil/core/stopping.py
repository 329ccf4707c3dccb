"""Signals that end the program in good order: SIGTERM and SIGHUP do what Ctrl-C does.

It imports nothing slow, so that a program can call `stop_on_signals` before anything else.
"""

import signal
from types import FrameType

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
STOPPED = "error: stopped; run the same command again to go on"

_received: list[int] = []


class Stopped(KeyboardInterrupt):
    """A signal asked the program to end. Whatever cleans up after Ctrl-C does so after this too."""


def stop_on_signals() -> None:
    """Let SIGTERM and SIGHUP interrupt the program as Ctrl-C does.

    A signal that is ignored stays ignored, as `nohup` wants it for SIGHUP.
    """
    for name in NAMES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) in (
            signal.SIG_DFL,
            signal.default_int_handler,
        ):
            signal.signal(number, _stop)


def signaled() -> bool:
    """Tell whether a signal came; the error it raised may have become another on its way."""
    return bool(_received)


def exit_status() -> int:
    """The status of a program that was interrupted, as shells report it: 128 + the last signal."""
    return 128 + (_received[-1] if _received else signal.SIGINT)


def ignore_signals() -> None:
    """Let the program say its last words: from now on it ends by itself in a moment."""
    for name in NAMES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_IGN)


def _stop(number: int, _: FrameType | None) -> None:
    _received.append(number)
    raise Stopped(signal.Signals(number).name)
