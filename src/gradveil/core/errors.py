"""The one error a user can mend. The command line prints it as a single line and exits with status 2."""

from collections.abc import Iterable


class GradveilError(ValueError):
    """Bad input: the message names the value received and what would be accepted."""


class GradveilWarning(UserWarning):
    """Something works, but not as well as it could; the message says why."""


def unknown(kind: str, name: object, choices: Iterable[object]) -> GradveilError:
    """An error for a name that is none of the choices."""
    return GradveilError(
        f"unknown {kind} {str(name)!r}: choose from {', '.join(map(str, choices))}"
    )


def one_line(error: BaseException, longest: int | None = None) -> str:
    """Another program's error, its type first, as part of a message of ours; cut off where it is longer than may be."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:longest]}{'...' if longest is not None and len(text) > longest else ''}"
