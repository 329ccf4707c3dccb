"""The weight gradient of a 2-D convolution, victim by victim, from its input and the loss gradient at its output.

Each victim's patches are laid side by side, and one product for each victim gives the gradient: dW = b patches(a)^T. The two
derivatives that a matching attack needs are products of the same kind, so a step is a few large batched products and no loop.
And the convolution itself, for a pass in which nobody asks for its weight's summed gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradveil.engine.device import load_kernels, suits

MANY_PATCHES = 200_000  # numbers in one image's patches


@dataclass(frozen=True)
class Shape:
    """What the products need to know of a layer. `edges`: zeros (before, after) in height, then width."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    edges: tuple[tuple[int, int], tuple[int, int]]
    groups: int
    victims: int


def convolution_weight(layer: nn.Conv2d, inputs: Tensor, blame: Tensor, victims: int) -> Tensor:
    """(victims, *weight shape). Differentiable once more by input and blame."""
    edges = _padding(layer)
    if layer.padding_mode != "zeros":
        inputs = F.pad(inputs, (*edges[1], *edges[0]), mode=layer.padding_mode)
        edges = ((0, 0), (0, 0))
    shape = Shape(
        _pair(layer.kernel_size),
        _pair(layer.stride),
        _pair(layer.dilation),
        edges,
        layer.groups,
        victims,
    )
    found: Tensor = _PatchProducts.apply(inputs, blame, shape)  # type: ignore[no-untyped-call]
    return found.view(victims, *layer.weight.shape)


def line_products(
    layer: nn.Conv2d, inputs: Tensor, blame: Tensor, lines: int
) -> tuple[Tensor, Tensor]:
    """<g, g_last> and <g, g> of each image's weight gradient, (lines, images of the line), on a GPU: no gradient is written out."""
    (top, _), (left, _) = _padding(layer)
    shape = _pair(layer.kernel_size), _pair(layer.stride), _pair(layer.dilation), (top, left)
    found: tuple[Tensor, Tensor] = load_kernels().line_products(inputs, blame, lines, *shape)
    return found


def suits_one_by_one(layer: nn.Conv2d, inputs: Tensor, blame: Tensor) -> bool:
    """Whether, on a CPU, torch's own weight gradient image by image is faster than one product of all patches: for large layers."""
    plain = (
        type(layer) is nn.Conv2d
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )
    patches = inputs.shape[1] * layer.kernel_size[0] * layer.kernel_size[1] * blame[0, 0].numel()
    return plain and not inputs.is_cuda and patches > MANY_PATCHES


def weights_one_by_one(layer: nn.Conv2d, inputs: Tensor, blame: Tensor) -> Tensor:
    """(images, *weight shape)."""
    back = torch.ops.aten.convolution_backward
    settings = (
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        (0, 0),
        layer.groups,
        (False, True, False),
    )
    return torch.cat(
        [
            back(blame[i : i + 1], inputs[i : i + 1], layer.weight, None, *settings)[1][None]
            for i in range(len(inputs))
        ]
    )


class _PatchProducts(torch.autograd.Function):
    """b patches(a)^T for each victim and group."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, blame: Tensor, shape: Shape) -> Tensor:
        patches = _by_victim(_patches(inputs, shape, blame.shape[2:]), shape)
        flat = _by_victim(blame.flatten(2), shape)
        ctx.save_for_backward(patches, flat)
        ctx.shape, ctx.inputs, ctx.blame = shape, inputs.shape, blame.shape
        return torch.bmm(flat, patches.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        patches, flat = ctx.saved_tensors
        shape: Shape = ctx.shape
        to_blame = _by_row(torch.bmm(slope, patches), shape, ctx.blame)
        if suits(flat) and shape.stride == (1, 1):
            return (
                _spread(slope, _by_row(flat, shape, ctx.blame), shape, ctx.inputs),
                to_blame,
                None,
            )
        (top, bottom), (left, right) = shape.edges
        padded = ctx.inputs[2] + top + bottom, ctx.inputs[3] + left + right
        to_patches = _by_row(
            torch.bmm(slope.transpose(1, 2), flat),
            shape,
            (ctx.inputs[0], -1, patches.shape[2] * shape.victims // ctx.inputs[0]),
        )
        to_padded = F.fold(to_patches, padded, shape.kernel, shape.dilation, stride=shape.stride)
        return to_padded[:, :, top : padded[0] - bottom, left : padded[1] - right], to_blame, None


def _spread(slope: Tensor, blame: Tensor, shape: Shape, inputs: torch.Size) -> Tensor:
    """The slope at the input: the kernel, transposed, times mirrored patches of the blame. `F.fold` is slow on a GPU."""
    (kernel_h, kernel_w), (step_h, step_w), ((top, _), (left, _)) = (
        shape.kernel,
        shape.dilation,
        shape.edges,
    )
    corner = (kernel_h - 1) * step_h - top, (kernel_w - 1) * step_w - left
    patches = load_kernels().patches(
        blame, shape.kernel, (1, 1), shape.dilation, corner, inputs[2:], mirrored=True
    )
    parts = slope.view(len(slope), slope.shape[1], -1, kernel_h * kernel_w)
    turned = parts.transpose(1, 2).reshape(len(slope), parts.shape[2], -1)
    return _by_row(torch.bmm(turned, _by_victim(patches, shape)), shape, inputs)


def _patches(inputs: Tensor, shape: Shape, out: torch.Size) -> Tensor:
    """(rows, channels x kernel area, positions), in one copy; `F.unfold` copies row by row on a GPU."""
    (top, bottom), (left, right) = shape.edges
    if suits(inputs):
        found: Tensor = load_kernels().patches(
            inputs, shape.kernel, shape.stride, shape.dilation, (top, left), out, mirrored=False
        )
        return found
    padded = F.pad(inputs, (left, right, top, bottom))
    rows, channels, down, across = padded.stride()
    (step_h, step_w), (stride_h, stride_w) = shape.dilation, shape.stride
    windows = padded.as_strided(
        (*padded.shape[:2], *shape.kernel, *out),
        (rows, channels, down * step_h, across * step_w, down * stride_h, across * stride_w),
    )
    return windows.reshape(len(padded), -1, out[0] * out[1])


def _by_victim(rows: Tensor, shape: Shape) -> Tensor:
    """(rows, channels, positions) to (victims x groups, channels of the group, all positions of the victim's rows)."""
    parts = rows.reshape(
        shape.victims, -1, shape.groups, rows.shape[1] // shape.groups, rows.shape[2]
    )
    return parts.permute(0, 2, 3, 1, 4).reshape(shape.victims * shape.groups, parts.shape[3], -1)


def _by_row(parts: Tensor, shape: Shape, like: Sequence[int]) -> Tensor:
    """The way back, to the shape `like`."""
    spread = parts.reshape(
        shape.victims, shape.groups, parts.shape[1], like[0] // shape.victims, -1
    )
    return spread.permute(0, 3, 1, 2, 4).reshape(*like)


def convolve(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """The layer's output. Where its weight asks for no gradient, in a form that costs nothing for it when differentiated twice."""
    if (
        layer.weight.requires_grad
        or isinstance(layer.padding, str)
        or layer.padding_mode != "zeros"
    ):
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
    def forward(
        ctx: Any, slope: Tensor, inputs: Tensor, weight: Tensor, settings: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.settings = settings
        stride, padding, dilation, groups = settings
        back = torch.ops.aten.convolution_backward
        found: Tensor = back(
            slope,
            inputs,
            weight,
            None,
            stride,
            padding,
            dilation,
            False,
            (0, 0),
            groups,
            (True, False, False),
        )[0]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return F.conv2d(slope, weight, None, *ctx.settings), None, None, None


def _padding(layer: nn.Conv2d) -> tuple[tuple[int, int], tuple[int, int]]:
    """(before, after) for height, then width."""
    if layer.padding == "same":
        down, across = (
            step * (size - 1)
            for step, size in zip(_pair(layer.dilation), _pair(layer.kernel_size), strict=True)
        )
        return (down // 2, down - down // 2), (across // 2, across - across // 2)
    down, across = (
        (0, 0) if isinstance(layer.padding, str) else _pair(layer.padding)
    )  # the other word is "valid"
    return (down, down), (across, across)


def _pair(value: tuple[int, ...]) -> tuple[int, int]:
    first, second = value
    return first, second
