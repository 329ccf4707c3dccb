"""Models a user brings: `package.module:factory`, imported and called."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

from torch import nn

from gradveil.core.errors import GradveilError, one_line
from gradveil.models.base import Task

RUN = (
    Exception,
    SystemExit,
)  # what a user's own code may raise: a script without a main guard ends in SystemExit


def find(reference: str) -> Callable[[Task], nn.Module]:
    """A function that calls the factory with those of `channels`, `size` and `classes` that it takes as keywords.

    The module may lie in the current folder. The model gets images in [0, 1] and normalizes them itself.
    """
    with _current_folder_importable():
        factory = _load(reference)

    def make(task: Task) -> nn.Module:
        try:
            with _current_folder_importable():
                model = factory(
                    **_accepted(
                        factory,
                        {"channels": task.channels, "size": task.size, "classes": task.classes},
                    )
                )
        except RUN as error:
            raise GradveilError(
                f"model {reference!r} could not be made: {one_line(error)}"
            ) from error
        if not isinstance(model, nn.Module):
            raise GradveilError(
                f"model {reference!r} gave a {type(model).__name__}: the factory must return a torch.nn.Module"
            )
        return model

    return make


def _load(reference: str) -> Callable[..., object]:
    module_name, _, attribute = reference.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise GradveilError(f"model {reference!r} cannot be read: write package.module:factory")
    try:
        module = importlib.import_module(module_name)
    except RUN as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{module_name}.".startswith(f"{error.name}.")
        ):
            raise GradveilError(
                f"model {reference!r}: there is no module {error.name!r}, neither installed nor in the current folder"
            ) from error
        raise GradveilError(
            f"model {reference!r}: importing {module_name!r} failed: {one_line(error)}"
        ) from error
    try:
        factory = attrgetter(attribute)(module)
    except AttributeError as error:
        names = [
            name
            for name, value in vars(module).items()
            if inspect.isroutine(value) or inspect.isclass(value)
        ]
        raise GradveilError(
            f"model {reference!r}: {module_name!r} has no {attribute!r}; it has {', '.join(names) or 'no factory'}"
        ) from error
    if isinstance(factory, nn.Module) or not callable(factory):
        kind = type(factory).__name__
        raise GradveilError(
            f"model {reference!r} is a {kind} value: name a function or class that makes the model when called"
        )
    found: Callable[..., object] = factory
    return found


def _accepted(factory: Callable[..., object], offered: dict[str, int]) -> dict[str, int]:
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in offered.items() if name in keywords}


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    folder = str(Path.cwd())
    importlib.invalidate_caches()  # the module may have been written a moment ago
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
