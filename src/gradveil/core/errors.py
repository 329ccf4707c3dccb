"""The one error a user can mend. The command line prints it as a single line and exits with status 2."""

from collections.abc import Iterable


class GradveilError(ValueError):
    """Bad input: the message names the value received and what would be accepted."""


class GradveilWarning(UserWarning):
    """Something works, but not as well as it could; the message says why."""


def unknown(kind: str, name: object, choices: Iterable[object]) -> GradveilError:
    """An error for a name that is none of the choices."""
    return GradveilError(f"unknown {kind} {str(name)!r}: choose from {', '.join(map(str, choices))}")
