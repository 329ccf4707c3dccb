"""The error that a user can mend, and the warning.

The command line prints the error as a single line and exits with status 2.
"""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_NAME = 200  # letters of an unknown name that are shown
LIKE = 0.7  # ratio of equal letters from which a name was perhaps meant
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "ndarray": "a NumPy array",
    "NoneType": "None",
}
"""Types of values whose names in Python are no words."""


class GradveilError(ValueError):
    """Bad input: the message names the value received and the choices."""


class OtherSettingsError(GradveilError):
    """A folder or a study holds the same kind of job with other settings."""


class GradveilWarning(UserWarning):
    """A result that is not as good or as fast as it could be; the message says why."""


def unknown(kind: str, name: object, choices: Iterable[object]) -> GradveilError:
    """Return the error for a name that is none of the choices."""
    text = text_of(name, kind_of(name))
    text = text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}..."
    names = [*map(str, choices)]
    near = nearest(text, names)
    meant = "" if near is None else f"; did you mean {near}?"
    return GradveilError(f"unknown {kind} {text!r}: choose from {', '.join(names)}{meant}")


def nearest(text: str, names: Iterable[str]) -> str | None:
    """Return the name that a text was probably meant to be; None where none is like it."""
    return next(iter(get_close_matches(text[:LONGEST_NAME], [*names], 1, LIKE)), None)


def one_line(error: BaseException, longest: int | None = None) -> str:
    """Return another program's error as a part of a message: its type, then at most `longest`.

    `longest` counts characters of its text; None keeps all.
    """
    from gradveil.core.text import printable  # rich takes a moment to import

    text = printable(" ".join(text_of(error, "its text cannot be read").split()))
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}..."
    return f"{type(error).__name__}: {text}"


def text_of(value: object, otherwise: str) -> str:
    """Return `str(value)`; a user's class may fail at it, and `otherwise` then stands for it."""
    try:
        return str(value)
    except (Exception, SystemExit):
        return otherwise


def kind_of(value: object) -> str:
    """Say what a value is that is not what was expected: `a list`, `the class Net`, `None`."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return KINDS.get(type(value).__name__, with_article(type(value).__name__))


def with_article(name: str) -> str:
    """Return a name after `a` or `an`, by its first letter."""
    return f"{'an' if name[:1] in tuple('AEIOaeio') else 'a'} {name}"
