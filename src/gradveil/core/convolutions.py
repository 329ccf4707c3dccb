"""The weight gradient of a 2-D convolution, victim by victim, from its input and the loss gradient at its output.

Each victim's patches are laid side by side, and one product for each victim gives the gradient: dW = b patches(a)^T. The two
derivatives that a matching attack needs are products of the same kind, so a step is a few large batched products and no loop.
And the convolution itself, for a pass in which nobody asks for its weight's summed gradient.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Shape:
    """What the products need to know of a layer."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    victims: int


def convolution_weight(layer: nn.Conv2d, inputs: Tensor, blame: Tensor, victims: int) -> Tensor:
    """(victims, *weight shape). Differentiable once more by input and blame."""
    (top, bottom), (left, right) = _padding(layer)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(inputs, (left, right, top, bottom), mode=mode) if top + bottom + left + right else inputs
    shape = Shape(_pair(layer.kernel_size), _pair(layer.stride), _pair(layer.dilation), layer.groups, victims)
    found: Tensor = _PatchProducts.apply(padded, blame, shape)  # type: ignore[no-untyped-call]
    return found.view(victims, *layer.weight.shape)


class _PatchProducts(torch.autograd.Function):
    """b patches(a)^T for each victim and group."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, blame: Tensor, shape: Shape) -> Tensor:
        patches = _by_victim(_patches(padded, blame.shape[2:], shape), shape)
        flat = _by_victim(blame.flatten(2), shape)
        ctx.save_for_backward(patches, flat)
        ctx.shape, ctx.padded, ctx.blame = shape, padded.shape, blame.shape
        return torch.bmm(flat, patches.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        patches, flat = ctx.saved_tensors
        shape: Shape = ctx.shape
        to_blame = _by_row(torch.bmm(slope, patches), shape, len_rows=ctx.blame[0]).view(ctx.blame)
        if flat.is_cuda and shape.stride == (1, 1):
            return _spread(slope, flat, shape, ctx.padded, ctx.blame), to_blame, None
        to_patches = _by_row(torch.bmm(slope.transpose(1, 2), flat), shape, len_rows=ctx.padded[0])
        to_padded = F.fold(to_patches, ctx.padded[2:], shape.kernel, shape.dilation, stride=shape.stride)
        return to_padded, to_blame, None


def _spread(slope: Tensor, flat: Tensor, shape: Shape, padded: torch.Size, blame: torch.Size) -> Tensor:
    """The slope at the padded input, as patches of the blame times the mirrored kernel: `F.fold` is slow on a GPU."""
    (kernel_h, kernel_w), (step_h, step_w) = shape.kernel, shape.dilation
    down, right = (kernel_h - 1) * step_h, (kernel_w - 1) * step_w
    around = F.pad(_by_row(flat, shape, len_rows=blame[0]).view(blame), (right, right, down, down))
    patches = _by_victim(_patches(around, padded[2:], shape), shape)
    kernels = slope.view(len(slope), slope.shape[1], -1, kernel_h * kernel_w).flip(3)
    mirrored = kernels.transpose(1, 2).reshape(len(slope), kernels.shape[2], -1)
    return _by_row(torch.bmm(mirrored, patches), shape, len_rows=padded[0]).view(padded)


def convolve(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """The layer's output. Where its weight asks for no gradient, in a form that costs nothing for it when differentiated twice."""
    if layer.weight.requires_grad or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        plain: Tensor = layer._conv_forward(inputs, layer.weight, layer.bias)
        return plain
    settings = layer.stride, layer.padding, layer.dilation, layer.groups
    found: Tensor = _Convolution.apply(inputs, layer.weight, settings)  # type: ignore[no-untyped-call]
    return found if layer.bias is None else found + layer.bias.view(-1, 1, 1)


class _Convolution(torch.autograd.Function):
    """By its input alone. Torch's own second derivative works out the weight's as well, asked for or not: a third of the time."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.settings = settings
        return F.conv2d(inputs, weight, None, *settings)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return _Transposed.apply(slope, *ctx.saved_tensors, ctx.settings), None, None  # type: ignore[no-untyped-call]


class _Transposed(torch.autograd.Function):
    """Its adjoint, whose own adjoint is the convolution again."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, inputs: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.settings = settings
        stride, padding, dilation, groups = settings
        back = torch.ops.aten.convolution_backward
        found: Tensor = back(slope, inputs, weight, None, stride, padding, dilation, False, (0, 0), groups, (True, False, False))[0]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return F.conv2d(slope, weight, None, *ctx.settings), None, None, None


def _patches(padded: Tensor, out: torch.Size, shape: Shape) -> Tensor:
    """(rows, channels x kernel area, positions): a view of overlapping windows, copied once. `F.unfold` copies row by row on a GPU."""
    rows, channels, down, right = padded.stride()
    (step_h, step_w), (stride_h, stride_w) = shape.dilation, shape.stride
    windows = padded.as_strided(
        (*padded.shape[:2], *shape.kernel, *out),
        (rows, channels, down * step_h, right * step_w, down * stride_h, right * stride_w),
    )
    return windows.reshape(len(padded), -1, out[0] * out[1])


def _by_victim(rows: Tensor, shape: Shape) -> Tensor:
    """(rows, channels, positions) to (victims x groups, channels of the group, all positions of the victim's rows)."""
    parts = rows.reshape(shape.victims, -1, shape.groups, rows.shape[1] // shape.groups, rows.shape[2])
    return parts.permute(0, 2, 3, 1, 4).reshape(shape.victims * shape.groups, parts.shape[3], -1)


def _by_row(parts: Tensor, shape: Shape, len_rows: int) -> Tensor:
    """The way back."""
    own = len_rows // shape.victims
    spread = parts.reshape(shape.victims, shape.groups, parts.shape[1], own, -1)
    return spread.permute(0, 3, 1, 2, 4).reshape(len_rows, shape.groups * parts.shape[1], -1)


def _padding(layer: nn.Conv2d) -> list[tuple[int, int]]:
    """(before, after) for height, then width."""
    if layer.padding == "same":
        totals = [step * (size - 1) for step, size in zip(_pair(layer.dilation), _pair(layer.kernel_size), strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(layer.padding, str):  # "valid"
        return [(0, 0), (0, 0)]
    return [(amount, amount) for amount in _pair(layer.padding)]


def _pair(value: tuple[int, ...]) -> tuple[int, int]:
    first, second = value
    return first, second
