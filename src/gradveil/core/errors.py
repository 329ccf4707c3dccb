"""The error that a user can mend, and the warning.

The command line prints the error as a single line and exits with status 2.
"""

from collections.abc import Iterable


class GradveilError(ValueError):
    """Bad input: the message names the value received and the choices."""


class GradveilWarning(UserWarning):
    """A result that is not as good or as fast as it could be; the message says why."""


def unknown(kind: str, name: object, choices: Iterable[object]) -> GradveilError:
    """Return the error for a name that is none of the choices."""
    return GradveilError(
        f"unknown {kind} {str(name)!r}: choose from {', '.join(map(str, choices))}"
    )


def one_line(error: BaseException, longest: int | None = None) -> str:
    """Return another program's error as a part of a message: its type, then at most `longest`.

    `longest` counts characters of its text; None keeps all.
    """
    text = " ".join(str(error).split())
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}..."
    return f"{type(error).__name__}: {text}"
