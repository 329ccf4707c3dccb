"""A pass of all victims' rows through a model, with weights for each victim.

After a local step the victims' weights differ. Layers of the types in `RUNS` then compute with
parameters (victims, *parameter shape), so that autograd gives each victim's gradient; the result
can be differentiated twice, by images and by weights.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.types import Gradients, Loss
from gradveil.engine.calls import run_instead, run_itself
from gradveil.engine.convolutions import convolve_each, shortened
from gradveil.engine.gradients import per_sample, with_slope
from gradveil.engine.layers import rectify
from gradveil.engine.norms import (
    NORMALIZED,
    Norm,
    Running,
    for_each,
    normalize,
    scale_by_channel,
    takes_statistics,
)
from gradveil.engine.passes import direct
from gradveil.engine.products import multiply

Runs = dict[type[nn.Module], Callable[[Any, int, Tensor], Tensor]]


def gradients_at(
    model: nn.Module,
    loss: Loss,
    weights: Gradients,
    images: Tensor,
    labels: Tensor,
    *,
    differentiable: bool,
    buffers: Mapping[str, Tensor],
    running: Running | None = None,
    short: bool = False,
) -> Gradients:
    """Return the gradients of each victim's mean loss at its weights, (victims, *parameter shape).

    Images are (victims, batch, ...). A pass in training mode changes `buffers` and `running`.
    With `short`, maps are bf16 between convolutions, on a GPU; weights are not.
    """
    weights = {
        name: weight if weight.requires_grad else weight.detach().requires_grad_()
        for name, weight in weights.items()
    }
    rows = images.flatten(0, 1)
    copies = {
        name: weights[name].expand(-1, images.shape[1], *weights[name].shape[2:]).flatten(0, 1)
        for name in direct(model)
    }
    watching = nullcontext() if running is None else running.watch()
    with watching, _runs(model, len(images), short):
        logits = functional_call(model, {**buffers, **weights, **copies}, (rows,))
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    losses = with_slope(per_sample(loss, logits, labels.flatten(0, 1)))
    found = torch.autograd.grad(
        losses.sum() / images.shape[1],
        list(weights.values()),
        create_graph=differentiable,
        materialize_grads=True,
    )
    return dict(zip(weights, found, strict=True))


def linear(layer: nn.Linear, victims: int, inputs: Tensor) -> Tensor:
    """Return a W^T + b."""
    weight = _for_each(layer.weight, 2, victims)
    rows = inputs.to(weight.dtype).reshape(victims, -1, inputs.shape[-1])
    found = multiply(rows, weight.transpose(1, 2))
    if layer.bias is not None:
        found = found + _for_each(layer.bias, 1, victims)[:, None]
    return found.view(*inputs.shape[:-1], weight.shape[1])


def convolution(layer: nn.Conv2d, victims: int, inputs: Tensor) -> Tensor:
    """Return W patches(a) + b."""
    found = convolve_each(layer, inputs, _for_each(layer.weight, 4, victims).to(inputs.dtype))
    if layer.bias is None:
        return found
    bias = _for_each(layer.bias, 1, victims).to(found.dtype)
    rows: Tensor = found.unflatten(0, (victims, -1))
    return (rows + bias.view(victims, 1, -1, 1, 1)).flatten(0, 1)


def batch_norm(layer: Norm, victims: int, inputs: Tensor) -> Tensor:
    """Normalize by the statistics of each victim, or by the running ones; then scale and shift."""
    if takes_statistics(layer):
        weight, bias = (for_each(part, 1, victims) for part in (layer.weight, layer.bias))
        return normalize(layer, inputs, victims, weight, bias)
    assert layer.running_mean is not None and layer.running_var is not None
    std = torch.rsqrt(layer.running_var + layer.eps)
    scale = std.expand(victims, -1)
    scale = scale if layer.weight is None else scale * _for_each(layer.weight, 1, victims)
    shift = -layer.running_mean * scale
    shift = shift if layer.bias is None else shift + _for_each(layer.bias, 1, victims)
    return scale_by_channel(inputs, scale, shift)


def group_norm(layer: nn.GroupNorm, victims: int, inputs: Tensor) -> Tensor:
    """Normalize the groups of each row, then scale and shift."""
    normal = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return _scaled_by_channel(layer, victims, normal)


def layer_norm(layer: nn.LayerNorm, victims: int, inputs: Tensor) -> Tensor:
    """Normalize the last dimensions, then scale and shift."""
    shape = layer.normalized_shape
    normal = F.layer_norm(inputs, shape, eps=layer.eps).reshape(victims, -1, *shape)
    if layer.weight is not None:
        normal = normal * _for_each(layer.weight, len(shape), victims)[:, None]
    if layer.bias is not None:
        normal = normal + _for_each(layer.bias, len(shape), victims)[:, None]
    return normal.view(inputs.shape)


RUNS: Runs = {
    nn.Conv2d: convolution,
    nn.Linear: linear,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    **dict.fromkeys(NORMALIZED, batch_norm),
}
"""(layer, victims, input) -> output, by the exact types that `layers.RULES` has."""


def short_convolution(layer: nn.Conv2d, victims: int, inputs: Tensor) -> Tensor:
    """Return the same in bf16 with channels last, on a GPU."""
    return convolution(layer, victims, shortened(inputs))


SHORT_RUNS: Runs = {
    **RUNS,
    nn.Conv2d: short_convolution,
    nn.ReLU: lambda layer, _, inputs: rectify(layer, inputs),
}
"""The same for a pass in short formats on a GPU."""


def _scaled_by_channel(layer: nn.GroupNorm, victims: int, normal: Tensor) -> Tensor:
    if layer.weight is None:
        return normal
    scale = _for_each(layer.weight, 1, victims)
    shift = None if layer.bias is None else _for_each(layer.bias, 1, victims)
    return scale_by_channel(normal, scale, shift)


def _for_each(parameter: Tensor, dims: int, victims: int) -> Tensor:
    found = for_each(parameter, dims, victims)
    assert found is not None
    return found


@contextmanager
def _runs(model: nn.Module, victims: int, short: bool) -> Iterator[None]:
    """Let the layers compute with weights for each victim, for a while."""
    runs = SHORT_RUNS if short else RUNS
    layers = [module for module in model.modules() if type(module) in runs]
    try:
        for layer in layers:
            run_instead(layer, partial(runs[type(layer)], layer, victims))
        yield
    finally:
        for layer in layers:
            run_itself(layer)
