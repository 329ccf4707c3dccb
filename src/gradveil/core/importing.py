"""A user's own code: imported by `package.module:name`, and run so that its errors are one line."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import TracebackType

from gradveil.core.errors import GradveilError, one_line

RAISED = (Exception, SystemExit)
"""What a user's own code may raise: a script without a main guard ends in SystemExit."""

LIBRARIES = sys.stdlib_module_names | {
    *(
        "gradveil",
        "torch",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "lightning_utilities",
    ),
    *("numpy", "scipy", "PIL", "matplotlib", "safetensors", "msgspec", "tensorboardX"),
    *("typer", "click", "rich", "optuna", "sqlalchemy", "psycopg2", "ray", "opacus"),
}
"""This package and those it is made of. Their lines of code tell a user nothing about where their
own code fails, and an error that passed no other lines is a fault of this package."""

LONGEST = 200  # letters of an error's message that are shown

NAMES = {"model": "factory", "defense": "Class(...)", "attack": "NAME", "loss": "function"}


def import_named(reference: str, kind: str, fits: Callable[[object], bool] | None = None) -> object:
    """Return the object `package.module:name`; `kind`, such as model, is for messages.

    Where the module has no such name, the error lists those of its objects that `fits` accepts; by
    default its functions and classes. The module may lie in the current folder. Never call this
    with text that was read from a file.
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
            meant = f"{module_name.removesuffix('.py')}:{attribute}"
            raise GradveilError(
                f"{kind} {reference!r}: there is no module {error.name!r}, neither installed "
                f"nor in the current folder{'' if meant == reference else f'; write {meant}'}"
            ) from error
        raise GradveilError(
            f"{kind} {reference!r}: importing {module_name!r} failed: {one_line(error, LONGEST)}"
        ) from error
    try:
        return attrgetter(attribute)(module)
    except RAISED as error:  # a module may define how its names are found
        if not isinstance(error, AttributeError):
            raise GradveilError(
                f"{kind} {reference!r}: {attribute!r} cannot be found: {one_line(error, LONGEST)}"
            ) from error
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and (fits or _is_callable)(value)
        ]
        raise GradveilError(
            f"{kind} {reference!r}: {module_name!r} has no {attribute!r}; "
            f"it has {', '.join(names) or 'nothing of the kind'}"
        ) from error


@contextmanager
def user_code(doing: str, *but: type[BaseException]) -> Iterator[None]:
    """Turn what a user's own code raises, SystemExit included, into one line.

    The line says what failed (`doing`, such as "model Net could not be made"), the error, and the
    file and line of the user's code that it came from. Errors of the types `but` stay as they are.
    """
    try:
        yield
    except RAISED as error:
        if isinstance(error, (GradveilError, *but)):
            raise
        lines = _lines_passed(error)
        where = f" ({_file_and_line(lines[-1])})" if lines else ""
        raise GradveilError(f"{doing}: {one_line(error, LONGEST)}{where}") from error


@contextmanager
def contained() -> Iterator[None]:
    """Turn an error that comes out of any user's code into one line; leave every other as it is.

    This is for functions that call a user's code in many places. The line names the function or
    the object and its method that were called: `nets:Net.forward failed: ...`.
    """
    try:
        yield
    except GradveilError:
        raise
    except RAISED as error:
        if not (lines := _lines_passed(error)):
            raise
        raise GradveilError(
            f"{_called(lines[0])} failed: {one_line(error, LONGEST)} ({_file_and_line(lines[-1])})"
        ) from error


def _lines_passed(error: BaseException) -> list[TracebackType]:
    """Return the lines of a user's code on the way to the error, or to what caused it."""
    cause: BaseException | None = error
    while cause is not None:
        found, step = [], cause.__traceback__
        while step is not None:
            package = str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
            if package not in LIBRARIES:
                found.append(step)
            step = step.tb_next
        if found:
            return found
        cause = cause.__cause__
    return []


def _file_and_line(step: TracebackType) -> str:
    return f"{Path(step.tb_frame.f_code.co_filename).name}, line {step.tb_lineno}"


def _called(step: TracebackType) -> str:
    """Return `module:function`, or `module:Class.method` with the class of the object itself."""
    code, variables = step.tb_frame.f_code, step.tb_frame.f_locals
    name = code.co_qualname
    if code.co_varnames[:1] == ("self",) and "self" in variables:
        name = f"{type(variables['self']).__qualname__}.{code.co_name}"
    return f"{step.tb_frame.f_globals.get('__name__')}:{name.rpartition('<locals>.')[2]}"


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


def _is_callable(value: object) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value)


def _is_part(module: str, absent: str | None) -> bool:
    """Tell whether the module that is absent is the one asked for, or a package that holds it."""
    return absent is not None and f"{module}.".startswith(f"{absent}.")
