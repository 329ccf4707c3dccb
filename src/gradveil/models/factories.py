"""Models a user brings as `package.module:factory`, imported and called."""

import inspect
from collections.abc import Callable
from dataclasses import asdict

from torch import nn

from gradveil.core.errors import GradveilError, one_line
from gradveil.core.importing import RAISED, current_folder_importable, import_named
from gradveil.models.base import Task


def find(reference: str) -> Callable[[Task], nn.Module]:
    """Return a function that calls the factory for a task.

    The factory gets those of `channels`, `size` and `classes` that it takes as keywords. Its module
    may lie in the current folder. The model gets images in [0, 1] and normalizes them itself.
    """
    factory = _load(reference)

    def make(task: Task) -> nn.Module:
        try:
            with current_folder_importable():
                model = factory(**_accepted(factory, asdict(task)))
        except RAISED as error:
            raise GradveilError(
                f"model {reference!r} could not be made: {one_line(error)}"
            ) from error
        if not isinstance(model, nn.Module):
            raise GradveilError(
                f"model {reference!r} gave a {type(model).__name__}: "
                "the factory must return a torch.nn.Module"
            )
        return model

    return make


def _load(reference: str) -> Callable[..., object]:
    factory = import_named(reference, "model")
    if isinstance(factory, nn.Module) or not callable(factory):
        kind = type(factory).__name__
        raise GradveilError(
            f"model {reference!r} is a {kind} value: name a function or class that makes the model "
            "when called"
        )
    found: Callable[..., object] = factory
    return found


def _accepted(factory: Callable[..., object], offered: dict[str, int]) -> dict[str, int]:
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in offered.items() if name in keywords}
