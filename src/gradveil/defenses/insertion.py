"""Putting a module into a copy of a model: before the head, or behind any named module."""

import copy
from collections.abc import Callable, Iterator
from itertools import dropwhile

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, kind_of, one_line, unknown
from gradveil.core.seeds import forked
from gradveil.core.types import ImageShape
from gradveil.engine.calls import after_use, before_use, only_input
from gradveil.engine.gradients import in_mode
from gradveil.models.bottleneck import AlwaysDropout, Bottleneck, Penalized

FEATURES = "features"
"""The position before the head: what the last linear layer receives."""

LISTED = 40  # names in an error


def as_position(given: object) -> object:
    """Return the number of a layer, which may be given as such, as text; all else as it is."""
    number = isinstance(given, int) and not isinstance(given, bool) and abs(given) < 10**9
    return str(given) if number else given


class Placed(nn.Module):
    """A module of the model, under the name it had, with another added before or behind it.

    The penalty of a bottleneck is left out here: `Penalized` takes it.
    """

    inner: nn.Module
    added: nn.Module

    def __init__(self, inner: nn.Module, added: nn.Module, before: bool) -> None:
        super().__init__()
        self.before, self.training = before, inner.training
        if before:  # in the order of use, in which attacks look for first and last layers
            self.added, self.inner = added, inner
        else:
            self.inner, self.added = inner, added

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        values: Tensor = only_input(given, named)
        for module in (self.added, self.inner) if self.before else (self.inner, self.added):
            output: Tensor | tuple[Tensor, Tensor] = module(values)
            values = output[0] if isinstance(output, tuple) else output
        return values


def insert(
    model: nn.Module,
    position: str,
    make: Callable[[int], nn.Module],
    image_shape: ImageShape | None,
    by: str,
) -> nn.Module:
    """Return a copy of the model with `make(width)` at the position.

    `width` is how many values an image has there; `by` is the defense, for messages.
    """
    copied = copy.deepcopy(model)
    core = copied.inner if isinstance(copied, Penalized) else copied
    assert isinstance(core, nn.Module)
    name, before = _find(core, position, by)
    there = core.get_submodule(name)
    added = make(_width(core, name, before, image_shape, f"defense {by}: position {position!r}"))
    if isinstance(added, Bottleneck) and any(
        placed.before == before and isinstance(placed.added, Bottleneck)
        for placed in _around(there)
    ):
        raise GradveilError(
            f"defense {by}: there is a PRECODE module at position {position!r} already; "
            "give each a position of its own"
        )
    first = next(core.parameters(), None)
    added = (added if first is None else added.to(first.device, first.dtype)).train(there.training)
    core = _with(core, name, added, before)
    return (
        Penalized(core) if isinstance(copied, Penalized) or isinstance(added, Bottleneck) else core
    )


def layers_before(model: nn.Module, position: str, by: str) -> list[str]:
    """Name the layers with weights that are registered before the position, but no bottleneck's."""
    last, before = _find(model, position, by)
    names = [name for name, _ in _outside_bottlenecks(model)]
    end = names.index(last) if before else names.index(last) + 1
    return [
        name
        for name, module in _outside_bottlenecks(model)[:end]
        if name != last and any(p.dim() > 1 for p in module.parameters(recurse=False))
    ]


def from_first_draw(model: nn.Module) -> tuple[str, ...]:
    """Name the trainable parameters from the first module on that a defense put in to draw."""
    return parameters_from(
        model,
        next(
            name
            for name, module in model.named_modules()
            if isinstance(module, Bottleneck | AlwaysDropout)
        ),
    )


def parameters_from(model: nn.Module, first: str) -> tuple[str, ...]:
    """Name the trainable parameters of this module and of those registered after it."""
    later = dropwhile(lambda named: named[0] != first, model.named_modules())
    owned = (
        (prefix, name)
        for prefix, module in later
        for name, p in module.named_parameters(recurse=False)
        if p.requires_grad
    )
    return tuple(f"{prefix}.{name}" if prefix else name for prefix, name in owned)


def last_linear(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """Return the head and its name: the last linear layer that is not a bottleneck's."""
    found = [
        (name, module)
        for name, module in _outside_bottlenecks(model)
        if isinstance(module, nn.Linear)
    ]
    return found[-1] if found else None


def _outside_bottlenecks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules and their names, but for those of bottlenecks."""
    hidden = tuple(
        f"{name}." for name, module in model.named_modules() if isinstance(module, Bottleneck)
    )
    return [
        (name, module)
        for name, module in model.named_modules()
        if not f"{name}.".startswith(hidden or ("\0",))
    ]


def _find(model: nn.Module, position: str, by: str) -> tuple[str, bool]:
    """Return the name of the module, and whether the position is before it.

    What was placed around the module earlier counts as part of it.
    """
    if position == FEATURES:
        head = last_linear(model)
        if head is None:
            raise GradveilError(
                f"defense {by}: position {FEATURES!r} is before the last linear layer, and the "
                "model has none; name a module"
            )
        return _outermost(model, head[0]), True
    name = _named(model, position)
    if name is None and position.lstrip("-").isdecimal():
        leaves = [
            name for name, module in _outside_bottlenecks(model) if not any(module.children())
        ]
        if -len(leaves) <= int(position) < len(leaves):
            return _outermost(model, leaves[int(position)]), False
    if name is None:
        names = [name for name, _ in _outside_bottlenecks(model) if name and name != FEATURES]
        more = [f"... ({len(names)} in all)"] if len(names) > LISTED else []
        raise unknown(f"position of defense {by}:", position, [FEATURES, *names[:LISTED], *more])
    return name, False


def _named(model: nn.Module, position: str) -> str | None:
    """Return the full name of the module that the model called so before anything was placed."""
    name, module = "", model
    for part in position.split("."):
        while isinstance(module, Placed):
            name, module = f"{name}.inner" if name else "inner", module.inner
        below = getattr(module, part, None)
        if not isinstance(below, nn.Module):
            return None
        name, module = f"{name}.{part}" if name else part, below
    return name


def _outermost(model: nn.Module, name: str) -> str:
    """Return the name of what was placed around the module last."""
    while name.endswith("inner") and isinstance(
        model.get_submodule(above := name.rpartition(".")[0]), Placed
    ):
        name = above
    return name


def _around(module: nn.Module) -> Iterator[Placed]:
    """Go from what was placed around the module last to what was first."""
    while isinstance(module, Placed):
        yield module
        module = module.inner


def _with(model: nn.Module, name: str, added: nn.Module, before: bool) -> nn.Module:
    """Put a module in; those added later act later, next to the module or behind all others."""
    while before and isinstance(model.get_submodule(name), Placed):
        name = f"{name}.inner" if name else "inner"
    placed = Placed(model.get_submodule(name), added, before)
    if not name:
        return placed
    model.set_submodule(name, placed)
    return model


def _width(
    model: nn.Module, name: str, before: bool, image_shape: ImageShape | None, where: str
) -> int:
    """Count the values of an image there: in a pass of zeros, or by the layer without a shape."""
    module = model.get_submodule(name)
    if image_shape is None:
        while isinstance(module, Placed):
            module = module.inner
        if not isinstance(module, nn.Linear):
            raise GradveilError(
                f"{where}: how many values {kind_of(module)} gives depends on the image; "
                "give the image's shape"
            )
        return module.in_features if before else module.out_features
    sizes: list[int] = []
    hook = (
        before_use(module, lambda _, inputs: sizes.append(inputs.numel()))
        if before
        else after_use(module, lambda _, __, output: sizes.append(output.numel()))
    )
    example = next(model.parameters())
    try:
        with torch.no_grad(), forked(), in_mode(model, False):
            model(torch.zeros(1, *image_shape, device=example.device, dtype=example.dtype))
    except Exception as error:  # the model may be anyone's
        raise GradveilError(
            f"{where}: the model and an image of shape {image_shape} do not fit: "
            f"{one_line(error, 200)}"
        ) from error
    finally:
        hook.remove()
    if not sizes:
        raise GradveilError(
            f"{where}: this module plays no part in a pass of the model; name another"
        )
    return sizes[0]
