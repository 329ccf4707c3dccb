"""For each kind of layer: its parameters' gradients, victim by victim, and its fast forward.

A rule takes the layer's input a and the loss gradient b at its output (the blame). The rows of a
victim lie side by side: victim v has the rows v * r to (v + 1) * r - 1.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradveil.engine.convolutions import convolution_weight, convolve, short_convolve
from gradveil.engine.fused import load_kernels, suits
from gradveil.engine.norms import Norm, multiply_add
from gradveil.engine.products import thin_product

# Torch's public functions have no slope of ReLU that does not look at the map again.
_threshold_backward = torch.ops.aten.threshold_backward

Rule = Callable[[Any, Tensor, Tensor, int], dict[str, Tensor]]
"""(layer, input, blame, victims) -> (victims, *parameter shape) for each of its parameters."""


def linear(_: nn.Linear, inputs: Tensor, blame: Tensor, victims: int) -> dict[str, Tensor]:
    """weight: b^T a, bias: sum b."""
    rows_out, rows_in = outer_rows(inputs, blame, victims)
    weight: Tensor = _Outer.apply(rows_out, rows_in)  # type: ignore[no-untyped-call]
    return {"weight": weight, "bias": rows_out.sum(1)}


def linear_bias(_: nn.Linear, inputs: Tensor, blame: Tensor, victims: int) -> dict[str, Tensor]:
    """The same without the weight, for those who need its inner products alone."""
    return {"bias": outer_rows(inputs, blame, victims)[0].sum(1)}


def outer_rows(inputs: Tensor, blame: Tensor, victims: int) -> tuple[Tensor, Tensor]:
    """Return b and a of a linear layer, each (victims, rows, width)."""
    rows_out = blame.reshape(victims, -1, blame.shape[-1])
    return rows_out, inputs.reshape(victims, -1, inputs.shape[-1])


def convolution(layer: nn.Conv2d, inputs: Tensor, blame: Tensor, victims: int) -> dict[str, Tensor]:
    """weight: b patches(a)^T, bias: sum b."""
    found = {"weight": convolution_weight(layer, inputs, blame, victims)}
    if layer.bias is not None:
        found["bias"] = _sums(blame, victims)
    return found


def batch_norm(layer: Norm, inputs: Tensor, blame: Tensor, victims: int) -> dict[str, Tensor]:
    """weight: sum b (a - mean) / std, bias: sum b.

    (sum b a - mean sum b) / std is the same, and needs no normalized copy of the input. The mean
    is the running one: a layer that takes its statistics from the batch needs no rule.
    """
    if layer.weight is None:
        return {}
    assert layer.running_mean is not None and layer.running_var is not None
    weight: Tensor
    plain: Tensor
    if suits(blame) and blame.dim() == 4:
        kept = layer.running_mean, layer.running_var, layer.eps
        weight, plain = _NormSums.apply(blame, inputs, *kept)  # type: ignore[no-untyped-call]
    else:
        plain, mixed = _Moments.apply(blame, inputs)  # type: ignore[no-untyped-call]
        weight = (mixed - layer.running_mean * plain) * torch.rsqrt(layer.running_var + layer.eps)
    if len(plain) == victims:
        return {"weight": weight, "bias": plain}
    found = (part.view(victims, -1, part.shape[1]).sum(1) for part in (weight, plain))
    return dict(zip(("weight", "bias"), found, strict=True))


def group_norm(
    layer: nn.GroupNorm, inputs: Tensor, blame: Tensor, victims: int
) -> dict[str, Tensor]:
    """weight: sum b norm(a), bias: sum b."""
    normal = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return {"weight": _sums(blame * normal, victims), "bias": _sums(blame, victims)}


def layer_norm(
    layer: nn.LayerNorm, inputs: Tensor, blame: Tensor, victims: int
) -> dict[str, Tensor]:
    """weight: sum b norm(a), bias: sum b, with the shape that is normalized."""
    normal = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    return {
        name: part.reshape(victims, -1, *layer.normalized_shape).sum(1)
        for name, part in (("weight", blame * normal), ("bias", blame))
    }


def affine(norm: nn.BatchNorm1d | nn.BatchNorm2d, inputs: Tensor) -> Tensor:
    """Run batch norm in eval mode as scale and shift.

    Torch's batch norm takes a dozen passes over the maps when it is differentiated twice.
    """
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean * scale
    shift = shift if norm.bias is None else shift + norm.bias
    channels = (-1, *(1,) * (inputs.dim() - 2))
    return multiply_add(inputs, scale.view(channels), shift.view(channels))


def short_affine(norm: nn.BatchNorm2d, inputs: Tensor) -> Tensor:
    """Run the same in short formats on a GPU.

    Torch's backward is slow there, and gives up channels last.
    """
    if not suits(inputs):
        return affine(norm, inputs)
    kept = norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps
    found: Tensor = _ShortAffine.apply(inputs, True, *kept)  # type: ignore[no-untyped-call]
    return found


def rectify(layer: nn.ReLU, inputs: Tensor) -> Tensor:
    """Run ReLU; torch's own, differentiated twice, makes a map of zeros and adds it."""
    if layer.inplace:
        return nn.ReLU.forward(layer, inputs)
    found: Tensor = _Rectified.apply(inputs)  # type: ignore[no-untyped-call]
    return found


RULES: dict[type[nn.Module], Rule] = {
    nn.Conv2d: convolution,
    nn.Linear: linear,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
    nn.InstanceNorm1d: batch_norm,
    nn.InstanceNorm2d: batch_norm,
    nn.InstanceNorm3d: batch_norm,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
}
"""By exact type: a subclass may compute something else."""

FORWARDS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.Conv2d: convolve,
    nn.BatchNorm1d: affine,
    nn.BatchNorm2d: affine,
}
"""(layer, input) -> output, for a batched pass: fast to differentiate twice."""

SHORT_FORWARDS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.BatchNorm2d: short_affine
}
"""The same for a pass in short formats on a GPU that is differentiated once."""


def wide_linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Run a linear layer in the format of its weights, whatever came before it."""
    return nn.Linear.forward(layer, inputs.to(layer.weight.dtype))


SHORT_TWICE: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.Conv2d: short_convolve,
    nn.Linear: wide_linear,
    nn.BatchNorm1d: affine,
    nn.BatchNorm2d: short_affine,
    nn.ReLU: rectify,
}
"""The same for one that is differentiated twice."""


def _sums(values: Tensor, victims: int) -> Tensor:
    """Sum each victim's values over all but the channels, which are dimension 1."""
    return values.reshape(victims, -1, values.shape[1], values[0, 0].numel()).sum((1, 3))


class _ShortAffine(torch.autograd.Function):
    """scale x + shift, channel by channel; its slope is one without a shift."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, shifted: bool, *kept: Any) -> Tensor:
        *tensors, ctx.eps = kept
        ctx.save_for_backward(*tensors)
        kernels = load_kernels()
        found: Tensor = kernels.affine(inputs, kernels.Statistics(*kept), shifted=shifted)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        kept = *ctx.saved_tensors, ctx.eps
        found: Tensor = _ShortAffine.apply(slope, False, *kept)  # type: ignore[no-untyped-call]
        return found, None, *(None for _ in kept)


class _Rectified(torch.autograd.Function):
    """max(x, 0), with a slope that goes through where it is positive."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        found = inputs.relu()
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        found: Tensor = _Masked.apply(slope, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return found


class _Masked(torch.autograd.Function):
    """The slope where a map is positive; it does not depend on how large the map is there."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, maps: Tensor) -> Tensor:
        ctx.save_for_backward(maps)
        found: Tensor = _threshold_backward(slope, maps, 0)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (maps,) = ctx.saved_tensors
        return _threshold_backward(slope, maps, 0), None


class _Outer(torch.autograd.Function):
    """b^T a for each victim, with few rows a victim."""

    @staticmethod
    def forward(ctx: Any, blame: Tensor, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(blame, inputs)
        if blame.shape[1] == 1:
            return blame.transpose(1, 2) * inputs
        return thin_product(blame.transpose(1, 2), inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        blame, inputs = ctx.saved_tensors
        return thin_product(inputs, slope.transpose(1, 2)), thin_product(blame, slope)


class _Moments(torch.autograd.Function):
    """sum b and sum b a over the positions of each row and channel; a slope takes one pass."""

    @staticmethod
    def forward(ctx: Any, blame: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(blame, inputs)
        positions = tuple(range(2, blame.dim()))
        if not positions:
            return blame.clone(), blame * inputs
        return blame.sum(positions), (blame * inputs).sum(positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_plain: Tensor, to_mixed: Tensor) -> tuple[Tensor, Tensor]:
        blame, inputs = ctx.saved_tensors
        shape = (*to_plain.shape, *(1,) * (blame.dim() - 2))
        to_plain, to_mixed = (slope.view(shape).to(blame.dtype) for slope in (to_plain, to_mixed))
        return multiply_add(inputs, to_mixed, to_plain), blame * to_mixed


class _NormSums(torch.autograd.Function):
    """The gradients of a batch norm's weight and bias of each row, on a GPU."""

    @staticmethod
    def forward(
        ctx: Any, blame: Tensor, inputs: Tensor, mean: Tensor, variance: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(blame, inputs, mean, variance)
        ctx.eps = eps
        kernels = load_kernels()
        kept = kernels.Statistics(mean, variance, None, None, eps)
        found: tuple[Tensor, Tensor] = kernels.norm_sums(blame, inputs, kept)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_weight: Tensor, to_bias: Tensor) -> tuple[Tensor | None, ...]:
        blame, inputs, mean, variance = ctx.saved_tensors
        if not blame.is_contiguous(memory_format=torch.channels_last):
            mixed = to_weight * torch.rsqrt(variance + ctx.eps)
            plain, mixed = (
                part[:, :, None, None].to(blame.dtype) for part in (to_bias - mean * mixed, mixed)
            )
            return torch.addcmul(plain, inputs, mixed), blame * mixed, None, None, None
        kernels = load_kernels()
        kept = kernels.Statistics(mean, variance, None, None, ctx.eps)
        found = kernels.norm_slopes(blame, inputs, to_weight, to_bias, kept)
        return (*found, None, None, None)
