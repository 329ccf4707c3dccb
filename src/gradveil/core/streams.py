"""The streams of the program: any letter can be printed, and no stream ends a run in a traceback.

A stream may be closed, full, an ASCII terminal, or a pipe whose reader has gone. What is lost on
the error stream, progress and messages, is no failure; a result that cannot be printed is one.
"""

import codecs
import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from gradveil.core.errors import GradveilError

SPELLED = {"±": "+-", "…": "...", "≤": "<="}
"""What is printed for a letter that the stream's encoding lacks; any other becomes an escape."""

HANDLER = "gradveil.spelled"  # the name of `_spell` among Python's handlers of encoding errors


class OutputLostError(GradveilError):
    """The standard output takes no more; `gone` tells that its reader left, as `head` does."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"cannot print the result: {error.strerror or error}; "
            "what was written to files is whole"
        )
        self.gone = error.errno == errno.EPIPE


class Output(io.TextIOWrapper):
    """The standard output: the first write that fails is one error, what follows is dropped."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._lost(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError) -> OutputLostError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        return OutputLostError(error)


class Messages(io.TextIOWrapper):
    """The error stream: what it does not take is dropped."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def prepare_streams() -> None:
    """Make the streams of this process such, for a program that was just started.

    A closed stream becomes one that drops everything: a file that is opened later must not get
    its number, since libraries write messages there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    sys.stdout = Output(_opened(1), _encoding(sys.stdout), HANDLER, line_buffering=os.isatty(1))
    sys.stderr = Messages(_opened(2), _encoding(sys.stderr), HANDLER, line_buffering=True)


def print_line(text: str, *, error: bool = False) -> None:
    """Print to the standard output, or to the error stream, as `prepare_streams` made them.

    `click.echo` goes around a stream that is ASCII, and so around what these do with failures.
    """
    stream: TextIO | None = sys.stderr if error else sys.stdout
    if stream is not None:
        stream.write(f"{text}\n")
        stream.flush()


def _opened(number: int) -> io.BufferedWriter:
    return io.BufferedWriter(io.FileIO(number, "w", closefd=False))


def _encoding(stream: TextIO | None) -> str:
    return "utf-8" if stream is None else stream.encoding


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    spelled = (
        SPELLED.get(letter) or letter.encode("unicode_escape").decode("ascii") for letter in letters
    )
    return "".join(spelled), error.end


codecs.register_error(HANDLER, _spell)
