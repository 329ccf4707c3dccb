"""For each kind of layer: its parameters' gradients, victim by victim, from its input and the loss gradient (blame) at its output.

Rows of one victim lie side by side: victim v owns rows v * r to (v + 1) * r.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.core.convolutions import convolution_weight, convolve

Rule = Callable[[Any, Tensor, Tensor, int], Tensor]  # (layer, input, blame, victims) -> (victims, *parameter shape)


def linear_weight(_: nn.Linear, inputs: Tensor, blame: Tensor, victims: int) -> Tensor:
    rows_out, rows_in = blame.reshape(victims, -1, blame.shape[-1]), inputs.reshape(victims, -1, inputs.shape[-1])
    return torch.bmm(rows_out.transpose(1, 2), rows_in)


def linear_bias(_: nn.Linear, __: Tensor, blame: Tensor, victims: int) -> Tensor:
    return blame.reshape(victims, -1, blame.shape[-1]).sum(1)


def channel_sums(_: nn.Module, __: Tensor, blame: Tensor, victims: int) -> Tensor:
    """The bias of a layer whose channels are dimension 1."""
    return blame.reshape(victims, -1, blame.shape[1], blame[0, 0].numel()).sum((1, 3))


def batch_norm_weight(layer: nn.BatchNorm1d | nn.BatchNorm2d, inputs: Tensor, blame: Tensor, victims: int) -> Tensor:
    """sum b (a - mean) / std = (sum b a - mean sum b) / std, which needs no normalized copy of the input."""
    assert layer.running_mean is not None and layer.running_var is not None
    centered = channel_sums(layer, inputs, blame * inputs, victims) - layer.running_mean * channel_sums(layer, inputs, blame, victims)
    return centered * torch.rsqrt(layer.running_var + layer.eps)


def affine(norm: nn.BatchNorm1d | nn.BatchNorm2d, inputs: Tensor) -> Tensor:
    """Batch norm in eval mode as scale and shift: torch's own takes a dozen passes over the maps when it is differentiated twice."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean * scale
    shift = shift if norm.bias is None else shift + norm.bias
    channels = (-1, *(1,) * (inputs.dim() - 2))
    return torch.addcmul(shift.view(channels), inputs, scale.view(channels))


def group_norm_weight(layer: nn.GroupNorm, inputs: Tensor, blame: Tensor, victims: int) -> Tensor:
    return channel_sums(layer, inputs, blame * F.group_norm(inputs, layer.num_groups, eps=layer.eps), victims)


def layer_norm_weight(layer: nn.LayerNorm, inputs: Tensor, blame: Tensor, victims: int) -> Tensor:
    return layer_norm_bias(layer, inputs, blame * F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps), victims)


def layer_norm_bias(layer: nn.LayerNorm, _: Tensor, blame: Tensor, victims: int) -> Tensor:
    return blame.reshape(victims, -1, *layer.normalized_shape).sum(1)


RULES: dict[type[nn.Module], dict[str, Rule]] = {
    nn.Conv2d: {"weight": convolution_weight, "bias": channel_sums},
    nn.Linear: {"weight": linear_weight, "bias": linear_bias},
    nn.BatchNorm1d: {"weight": batch_norm_weight, "bias": channel_sums},
    nn.BatchNorm2d: {"weight": batch_norm_weight, "bias": channel_sums},
    nn.GroupNorm: {"weight": group_norm_weight, "bias": channel_sums},
    nn.LayerNorm: {"weight": layer_norm_weight, "bias": layer_norm_bias},
}
"""By exact type: a subclass may compute something else."""

FORWARDS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {nn.Conv2d: convolve, nn.BatchNorm1d: affine, nn.BatchNorm2d: affine}
"""What a layer does in a batched pass where its own forward would be slow to differentiate twice."""
