"""A user's own code: imported by `package.module:name`, and run so that its errors are one line."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

from gradveil.core.errors import GradveilError, one_line

RAISED = (Exception, SystemExit)
"""What a user's own code may raise: a script without a main guard ends in SystemExit."""

LIBRARIES = ("gradveil", "torch", "contextlib", "copy", "importlib", "inspect")
"""Packages whose lines of code tell a user nothing about where their own code fails."""

LONGEST = 200  # letters of an error's message that are shown

NAMES = {"model": "factory", "defense": "Class(...)", "attack": "NAME"}


def import_named(reference: str, kind: str) -> object:
    """Return the object `package.module:name`; `kind` (model, defense, attack) is for messages.

    The module may lie in the current folder. Never call this with text that was read from a file.
    """
    module_name, _, attribute = reference.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise GradveilError(
            f"{kind} {reference!r} cannot be read: write package.module:{NAMES.get(kind, 'name')}"
        )
    try:
        with current_folder_importable():
            module = importlib.import_module(module_name)
    except RAISED as error:
        if isinstance(error, ModuleNotFoundError) and _is_part(module_name, error.name):
            raise GradveilError(
                f"{kind} {reference!r}: there is no module {error.name!r}, neither installed "
                "nor in the current folder"
            ) from error
        raise GradveilError(
            f"{kind} {reference!r}: importing {module_name!r} failed: {one_line(error)}"
        ) from error
    try:
        return attrgetter(attribute)(module)
    except AttributeError as error:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and (inspect.isroutine(value) or inspect.isclass(value))
        ]
        raise GradveilError(
            f"{kind} {reference!r}: {module_name!r} has no {attribute!r}; "
            f"it has {', '.join(names) or 'nothing of the kind'}"
        ) from error


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Turn what a user's own code raises, SystemExit included, into one line.

    The line says what failed (`doing`, such as "model Net could not be made"), the error, and the
    file and line of the user's code that it came from.
    """
    try:
        yield
    except GradveilError:
        raise
    except RAISED as error:
        raise GradveilError(f"{doing}: {one_line(error, LONGEST)}{_origin(error)}") from error


def _origin(error: BaseException) -> str:
    """The last line of code on the way to the error that is neither ours nor a library's."""
    found, step = "", error.__traceback__
    while step is not None:
        package = str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in LIBRARIES:
            name = Path(step.tb_frame.f_code.co_filename).name
            found = f" ({name}, line {step.tb_lineno})"
        step = step.tb_next
    return found


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Let the current folder's modules be imported for a while."""
    folder = str(Path.cwd())
    importlib.invalidate_caches()  # the module may have been written a moment ago
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _is_part(module: str, absent: str | None) -> bool:
    """Tell whether the module that is absent is the one asked for, or a package that holds it."""
    return absent is not None and f"{module}.".startswith(f"{absent}.")
