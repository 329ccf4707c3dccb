"""Convolutions with a weight for each victim, as grouped ones of torch's, differentiable twice.

Maps lie as (rows of a victim, victims x channels, ...), so that one call does the work of all
victims. On a CPU that is faster than a call for each, and than products of patches.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradveil.engine.patches import PatchLayout, by_victim, find_patches

THIN = 8  # input channels below which a product of patches gives the weight's slope faster

# Torch's public `torch.nn.grad` wraps this operator in calls that make it twice.
_convolution_backward = torch.ops.aten.convolution_backward


class Moves(NamedTuple):
    """The settings of a 2-D convolution that is padded by zeros, alike on both sides."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def as_groups(rows: Tensor, victims: int) -> Tensor:
    """Turn (victims x rows, channels, ...) into (rows of a victim, victims x channels, ...)."""
    found: Tensor = rows.unflatten(0, (victims, -1)).transpose(0, 1).flatten(1, 2)
    return found


def as_rows(maps: Tensor, victims: int) -> Tensor:
    """Turn them back."""
    found: Tensor = maps.unflatten(1, (victims, -1)).transpose(0, 1).flatten(0, 1)
    return found


def convolve_grouped(maps: Tensor, weight: Tensor, moves: Moves) -> Tensor:
    """Return the convolution of each victim's maps with its weight, (victims, *weight shape)."""
    found: Tensor = _Convolved.apply(maps, weight, moves)  # type: ignore[no-untyped-call]
    return found


def weight_gradient(maps: Tensor, blame: Tensor, shape: tuple[int, ...], moves: Moves) -> Tensor:
    """Return the weight gradient of each victim, of this shape: (victims, *weight shape).

    It can be differentiated once more, by maps and blame.
    """
    given = maps, blame, shape, moves
    found: Tensor = _WeightGradient.apply(*given)  # type: ignore[no-untyped-call]
    return found


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, blame: Tensor, shape: tuple[int, ...], moves: Moves
    ) -> Tensor:
        ctx.save_for_backward(inputs, blame)
        ctx.moves = moves
        return _to_weight(blame, inputs, shape, moves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inputs, blame = ctx.saved_tensors
        to_inputs = _to_inputs(blame, inputs, slope, ctx.moves)
        return to_inputs, _convolve(inputs, slope, ctx.moves), None, None


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
    stride, padding, dilation, groups = moves
    settings = stride, padding, dilation, groups * len(weight)
    return F.conv2d(inputs, weight.flatten(0, 1), None, *settings)


def _to_inputs(slope: Tensor, inputs: Tensor, weight: Tensor, moves: Moves) -> Tensor:
    return _backward(slope, inputs, weight, moves, at_weight=False)


def _to_weight(slope: Tensor, inputs: Tensor, shape: tuple[int, ...], moves: Moves) -> Tensor:
    if shape[2] < THIN:
        return _patch_products(slope, inputs, shape, moves)
    like = slope.new_empty(shape)  # of which nothing but the shape counts
    return _backward(slope, inputs, like, moves, at_weight=True).view(shape)


def _backward(
    slope: Tensor, inputs: Tensor, weight: Tensor, moves: Moves, *, at_weight: bool
) -> Tensor:
    stride, padding, dilation, groups = moves
    settings = stride, padding, dilation, False, (0, 0), groups * len(weight)
    wanted = (not at_weight, at_weight, False)  # of the slopes at input, weight and bias
    found = _convolution_backward(slope, inputs, weight.flatten(0, 1), None, *settings, wanted)
    slopes: Tensor = found[1 if at_weight else 0]
    return slopes


def _patch_products(slope: Tensor, inputs: Tensor, shape: tuple[int, ...], moves: Moves) -> Tensor:
    (down, across), kernel = moves.padding, (shape[3], shape[4])
    edges = (down, down), (across, across)
    layout = PatchLayout(kernel, moves.stride, moves.dilation, edges, moves.groups * shape[0], 1)
    patches = find_patches(inputs, layout, slope.shape[2:])
    flat = by_victim(slope.flatten(2), layout)
    return torch.bmm(flat, patches.transpose(1, 2)).view(shape)
