"""Convolutions with weights for each victim by a call of torch's for each, differentiable twice.

On a CPU that is faster than products of patches.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Torch's public `torch.nn.grad` wraps this operator in calls that make it twice.
_convolution_backward = torch.ops.aten.convolution_backward


class Moves(NamedTuple):
    """The settings of a 2-D convolution that is padded by zeros, alike on both sides."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def convolve_one_by_one(inputs: Tensor, weight: Tensor, moves: Moves) -> Tensor:
    """Return the convolution of each victim's rows with its weight, (victims, *weight shape)."""
    found: Tensor = _Convolved.apply(inputs, weight, moves)  # type: ignore[no-untyped-call]
    return found


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, moves: Moves) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.moves = moves
        return _convolve(inputs, weight, moves)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs = ctx.needs_input_grad
        saved = (*ctx.saved_tensors, ctx.moves, needs[0])
        found = _Slopes.apply(slope, *saved)  # type: ignore[no-untyped-call]
        return found[0] if needs[0] else None, found[1] if needs[1] else None, None


class _Slopes(torch.autograd.Function):
    """The slopes at inputs x and weights w for the slope g at the output x * w."""

    @staticmethod
    def forward(
        ctx: Any, slope: Tensor, inputs: Tensor, weight: Tensor, moves: Moves, at_inputs: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(slope, inputs, weight)
        ctx.moves = moves
        ctx.set_materialize_grads(False)
        to_inputs = _to_inputs(slope, inputs, weight, moves) if at_inputs else slope.new_empty(0)
        return to_inputs, _to_weight(slope, inputs, weight.shape, moves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None) -> tuple[Tensor | None, ...]:
        """Differentiate <u, slope at x> + <v, slope at w> = <u * w + x * v, g>."""
        slope, inputs, weight = ctx.saved_tensors
        moves, needs = ctx.moves, ctx.needs_input_grad
        to_slope = to_inputs = to_weight = None
        if u is not None:
            to_slope = _convolve(u, weight, moves) if needs[0] else None
            to_weight = _to_weight(slope, u, weight.shape, moves) if needs[2] else None
        if v is not None:
            if needs[0]:
                part = _convolve(inputs, v, moves)
                to_slope = part if to_slope is None else to_slope.add_(part)
            to_inputs = _to_inputs(slope, inputs, v, moves) if needs[1] else None
        return to_slope, to_inputs, to_weight, None, None


def _convolve(inputs: Tensor, weight: Tensor, moves: Moves) -> Tensor:
    rows = inputs.chunk(len(weight))
    return torch.cat([F.conv2d(x, w, None, *moves) for x, w in zip(rows, weight, strict=True)])


def _to_inputs(slope: Tensor, inputs: Tensor, weight: Tensor, moves: Moves) -> Tensor:
    parts = zip(slope.chunk(len(weight)), inputs.chunk(len(weight)), weight, strict=True)
    return torch.cat([_backward(g, x, w, moves, at_weight=False) for g, x, w in parts])


def _to_weight(slope: Tensor, inputs: Tensor, shape: tuple[int, ...], moves: Moves) -> Tensor:
    like = slope.new_empty(shape[1:])  # of which nothing but the shape counts
    parts = zip(slope.chunk(shape[0]), inputs.chunk(shape[0]), strict=True)
    return torch.stack([_backward(g, x, like, moves, at_weight=True) for g, x in parts])


def _backward(
    slope: Tensor, inputs: Tensor, weight: Tensor, moves: Moves, *, at_weight: bool
) -> Tensor:
    stride, padding, dilation, groups = moves
    settings = stride, padding, dilation, False, (0, 0), groups
    wanted = (not at_weight, at_weight, False)  # of the slopes at input, weight and bias
    found = _convolution_backward(slope, inputs, weight, None, *settings, wanted)
    slopes: Tensor = found[1 if at_weight else 0]
    return slopes
