"""The patches of a 2-D convolution, laid side by side for each victim, and their adjoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.engine.fused import load_kernels, suits


@dataclass(frozen=True)
class PatchLayout:
    """How a layer's patches lie. `edges`: zeros (before, after) in height, then width."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    edges: tuple[tuple[int, int], tuple[int, int]]
    groups: int
    victims: int


def lay_out(layer: nn.Conv2d, inputs: Tensor, victims: int) -> tuple[Tensor, PatchLayout]:
    """Return the input, padded where that is not with zeros, and the layout of its patches."""
    edges = find_edges(layer)
    if layer.padding_mode != "zeros":
        inputs = F.pad(inputs, (*edges[1], *edges[0]), mode=layer.padding_mode)
        edges = ((0, 0), (0, 0))
    moves = two(layer.kernel_size), two(layer.stride), two(layer.dilation)
    return inputs, PatchLayout(*moves, edges, layer.groups, victims)


def find_patches(inputs: Tensor, layout: PatchLayout, out: torch.Size) -> Tensor:
    """Return (victims x groups, channels x kernel area, positions of all rows).

    On a CPU that is one copy, on a GPU `F.unfold` would copy row by row.
    """
    (top, bottom), (left, right) = layout.edges
    if suits(inputs):
        found: Tensor = load_kernels().patches(
            inputs, layout.kernel, layout.stride, layout.dilation, (top, left), out, mirrored=False
        )
        return by_victim(found, layout)
    padded = F.pad(inputs, (left, right, top, bottom))
    rows, channels, down, across = padded.stride()
    (step_h, step_w), (stride_h, stride_w) = layout.dilation, layout.stride
    victims, groups = layout.victims, layout.groups
    each, wide = len(padded) // victims, padded.shape[1] // groups
    windows = padded.as_strided(
        (victims, groups, wide, *layout.kernel, each, *out),
        (
            each * rows,
            wide * channels,
            channels,
            down * step_h,
            across * step_w,
            rows,
            down * stride_h,
            across * stride_w,
        ),
    )
    area = layout.kernel[0] * layout.kernel[1]
    return windows.reshape(victims * groups, wide * area, each * out[0] * out[1])


def unfold(inputs: Tensor, layout: PatchLayout, out: torch.Size) -> Tensor:
    """Return the patches of `find_patches`; it can be differentiated any number of times."""
    found: Tensor = _Unfolded.apply(inputs, layout, out)  # type: ignore[no-untyped-call]
    return found


class _Unfolded(torch.autograd.Function):
    """The patches of each victim and group, a linear function of the maps."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layout: PatchLayout, out: torch.Size) -> Tensor:
        ctx.layout, ctx.inputs, ctx.out = layout, inputs.shape, out
        return find_patches(inputs, layout, out)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        settings = ctx.layout, ctx.inputs, ctx.out
        return _Folded.apply(slope, *settings), None, None  # type: ignore[no-untyped-call]


class _Folded(torch.autograd.Function):
    """The adjoint of `_Unfolded`: each number of the patches, added where it came from."""

    @staticmethod
    def forward(
        ctx: Any, parts: Tensor, layout: PatchLayout, inputs: torch.Size, out: torch.Size
    ) -> Tensor:
        ctx.layout, ctx.out = layout, out
        return fold(parts, layout, inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        settings = ctx.layout, ctx.out
        return _Unfolded.apply(slope, *settings), None, None, None  # type: ignore[no-untyped-call]


def fold(parts: Tensor, layout: PatchLayout, inputs: torch.Size) -> Tensor:
    """Add patches (victims x groups, channels x kernel area, positions) into maps of this shape."""
    (top, bottom), (left, right) = layout.edges
    padded = inputs[2] + top + bottom, inputs[3] + left + right
    positions = parts.shape[2] * layout.victims // inputs[0]
    rows = by_row(parts, layout, (inputs[0], -1, positions))
    found = F.fold(rows, padded, layout.kernel, layout.dilation, stride=layout.stride)
    return found[:, :, top : padded[0] - bottom, left : padded[1] - right]


def by_victim(rows: Tensor, layout: PatchLayout) -> Tensor:
    """Turn (rows, channels, positions) into (victims x groups, channels, positions).

    The channels are those of the group, the positions those of all the victim's rows.
    """
    parts = rows.reshape(
        layout.victims, -1, layout.groups, rows.shape[1] // layout.groups, rows.shape[2]
    )
    return parts.permute(0, 2, 3, 1, 4).reshape(layout.victims * layout.groups, parts.shape[3], -1)


def by_row(parts: Tensor, layout: PatchLayout, like: Sequence[int]) -> Tensor:
    """Turn them back, into the shape `like`."""
    spread = parts.reshape(
        layout.victims, layout.groups, parts.shape[1], like[0] // layout.victims, -1
    )
    return spread.permute(0, 3, 1, 2, 4).reshape(*like)


def find_edges(layer: nn.Conv2d) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the zeros (before, after) for height, then width."""
    if layer.padding == "same":
        down, across = (
            step * (size - 1)
            for step, size in zip(two(layer.dilation), two(layer.kernel_size), strict=True)
        )
        return (down // 2, down - down // 2), (across // 2, across - across // 2)
    # The only other word is "valid".
    down, across = (0, 0) if isinstance(layer.padding, str) else two(layer.padding)
    return (down, down), (across, across)


def two(value: tuple[int, ...]) -> tuple[int, int]:
    first, second = value
    return first, second
