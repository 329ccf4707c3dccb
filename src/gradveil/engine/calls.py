"""The input of a layer's call: a model may give it by position or by its name, `layer(input=x)`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def only_input(given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the first of what a module was called with, by position or else by name, or None."""
    return next(iter((*given, *named.values())), None)


def before_use(layer: nn.Module, look: Callable[[nn.Module, Tensor], object]) -> RemovableHandle:
    """Call look(layer, input) before each use of the layer, until the handle is removed."""

    def hook(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        look(layer, only_input(given, named))

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


def after_use(
    layer: nn.Module, look: Callable[[nn.Module, Tensor, Tensor], object]
) -> RemovableHandle:
    """Call look(layer, input, output) after each use of the layer, until the handle is removed."""

    def hook(
        layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> None:
        look(layer, only_input(given, named), output)

    return layer.register_forward_hook(hook, with_kwargs=True)


def run_instead(layer: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
    """Let run(input) stand for the layer's `forward`, until `run_itself`."""

    def forward(*given: Any, **named: Any) -> Tensor:
        return run(only_input(given, named))

    layer.forward = forward


def run_itself(layer: nn.Module) -> None:
    """Let the layer's own `forward` run again."""
    layer.__dict__.pop("forward", None)
