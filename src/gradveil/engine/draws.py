"""The random numbers that a model draws in a pass: which modules draw, and how to hand them in.

Only modules draw: `Draw` (standard normal) and torch's dropout layers. So whoever knows or guesses
the draws can repeat a pass.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import GradveilError
from gradveil.engine.calls import before_use, run_instead, run_itself

Draws = Mapping[str, Tensor]
"""By the name of the module that would draw them: numbers for a `Draw`, 1 or 0 (kept or not) for
dropout."""

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Draw(nn.Module):
    """Standard normal numbers of the shape of its input, new in each pass.

    Every module of this package that needs random numbers gets them here.
    """

    def forward(self, like: Tensor) -> Tensor:
        return torch.randn_like(like)


def drawing(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the modules that draw in a pass in the model's present mode."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Draw) or is_dropping(module)
    }


def is_dropping(module: nn.Module) -> bool:
    """Tell whether this is a dropout layer that is on. At rate 1 nothing is left to chance."""
    return isinstance(module, DROPOUTS) and module.training and 0 < module.p < 1


def draw(
    module: nn.Module, size: tuple[int, ...], like: Tensor, rng: Generator | None = None
) -> Tensor:
    """Draw numbers for the module in the form that `given` takes.

    Without a generator they come from torch's default one for the device of `like`.
    """
    device = like.device if rng is None else rng.device
    if isinstance(module, DROPOUTS):
        return (torch.rand(size, generator=rng, device=device) >= module.p).to(like)
    return torch.randn(size, generator=rng, device=device).to(like)


@contextmanager
def given(model: nn.Module, values: Draws) -> Iterator[None]:
    """Let these modules use these values for a while: dropout multiplies by mask / (1 - p).

    A value has a row for each row of the pass. A module used twice in a pass uses it twice.
    """
    modules = _found(model, values)
    try:
        for name, module in modules.items():
            if is_dropping(module):
                run_instead(module, partial(_kept, module, values[name]))
            else:
                run_instead(module, partial(_told, values[name]))
        yield
    finally:
        for module in modules.values():
            run_itself(module)


def draw_shapes(
    model: nn.Module, images: Tensor, names: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return, by name, the shape of each module's draws for one image.

    A pass of `images` shows them; it changes nothing.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ExitStack() as hooks:
        for name, module in _found(model, names).items():
            hooks.callback(before_use(module, _record(shapes, name)).remove)
        with torch.no_grad():
            functional_call(model, buffers, (images,))
    return shapes


def _record(shapes: dict[str, tuple[int, ...]], name: str) -> Callable[[nn.Module, Tensor], None]:
    def record(module: nn.Module, inputs: Tensor) -> None:
        shape = tuple(inputs.shape[1:])
        if isinstance(module, DROPOUTS) and not isinstance(module, nn.Dropout):
            shape = (*shape[:1], *(1,) * (len(shape) - 1))  # these keep or drop whole channels
        shapes[name] = shape

    return record


def _found(model: nn.Module, names: Collection[str]) -> dict[str, nn.Module]:
    there = drawing(model) if names else {}
    for name in names:
        if name not in there:
            raise GradveilError(
                f"no module {name!r} draws in this model and mode: "
                f"choose from {', '.join(there) or 'none, nothing draws'}"
            )
    return {name: there[name] for name in names}


def _told(value: Tensor, like: Tensor) -> Tensor:
    return value.expand_as(like)


def _kept(module: nn.Module, mask: Tensor, inputs: Tensor) -> Tensor:
    assert isinstance(module, DROPOUTS)
    return inputs * (mask / (1 - module.p))
