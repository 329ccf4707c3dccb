"""The weight gradient of a 2-D convolution, victim by victim, from its input and the loss gradient at its output."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MAP_SIZE = 200  # below it, or with few channels in, copying patches costs less than many small products (measured on a CPU)
CHANNELS = 16


def convolution_weight(layer: nn.Conv2d, inputs: Tensor, blame: Tensor, victims: int) -> Tensor:
    """One of two ways with the same result, the faster for this shape."""
    if layer.padding_mode == "zeros":
        edges = _padding(layer)
    else:
        (left, right), (top, bottom) = reversed(_padding(layer))
        inputs = F.pad(inputs, (left, right, top, bottom), mode=layer.padding_mode)
        edges = [(0, 0), (0, 0)]
    wide = blame.shape[2] * blame.shape[3] >= MAP_SIZE and inputs.shape[1] // layer.groups >= CHANNELS
    return (shifted if wide else unfolded)(layer, inputs, edges, blame, victims)


def unfolded(layer: nn.Conv2d, inputs: Tensor, edges: list[tuple[int, int]], blame: Tensor, victims: int) -> Tensor:
    """All patches side by side (a copy of kernel-area times the input), then one product for each victim."""
    (top, bottom), (left, right) = edges
    padded = F.pad(inputs, (left, right, top, bottom))
    patches = F.unfold(padded, _pair(layer.kernel_size), dilation=_pair(layer.dilation), stride=_pair(layer.stride))
    rows = (victims, -1, layer.groups)
    found = torch.einsum(
        "vrgop,vrgip->vgoi",
        blame.reshape(*rows, layer.out_channels // layer.groups, patches.shape[2]),
        patches.view(*rows, patches.shape[1] // layer.groups, patches.shape[2]),
    )
    return found.reshape(victims, *layer.weight.shape)


def shifted(layer: nn.Conv2d, inputs: Tensor, edges: list[tuple[int, int]], blame: Tensor, victims: int) -> Tensor:
    """One product for each kernel offset, with no copy of patches.

    Lay the padded input and the output gradient on grids of the same width. Then moving by a kernel offset is moving by a constant
    along the flattened grid, so each product reads a plain slice. A stride splits the input into one grid for each phase.
    The result is laid out offset by offset: a view, not contiguous.
    """
    (kernel_h, kernel_w), (stride_h, stride_w), (step_h, step_w) = map(_pair, (layer.kernel_size, layer.stride, layer.dilation))
    (top, _), (left, _) = edges
    out_h, out_w = blame.shape[2:]
    height, width = out_h + (kernel_h - 1) * step_h // stride_h, out_w + (kernel_w - 1) * step_w // stride_w
    right, bottom = width * stride_w - inputs.shape[3] - left, height * stride_h - inputs.shape[2] - top
    grid = F.pad(inputs, (left, right, top, bottom)).reshape(*inputs.shape[:2], height, stride_h, width, stride_w)
    planes = grid.permute(3, 5, 0, 1, 2, 4).reshape(-1, inputs.shape[1], height, width)
    count = stride_h * stride_w
    phases = _flat(planes, layer.groups, count * victims)
    phases = phases.view(count, -1, *phases.shape[1:])
    tail = (height - out_h) * width + width - out_w
    flat = _flat(F.pad(blame, (0, width - out_w, 0, height - out_h)), layer.groups, victims)
    offsets = [
        (i * step_h % stride_h * stride_w + j * step_w % stride_w, i * step_h // stride_h * width + j * step_w // stride_w)
        for i in range(kernel_h)
        for j in range(kernel_w)
    ]
    found: Tensor = _Products.apply(phases, flat[:, :, : flat.shape[2] - tail], offsets)  # type: ignore[no-untyped-call]
    return found.permute(1, 2, 3, 0).reshape(victims, *layer.weight.shape)


class _Products(torch.autograd.Function):
    """For each (phase, shift): blame times the transposed slice of that phase. Gradients accumulate in place."""

    @staticmethod
    def forward(ctx: Any, phases: Tensor, blame: Tensor, offsets: list[tuple[int, int]]) -> Tensor:
        ctx.save_for_backward(phases, blame)
        ctx.offsets = offsets
        found = blame.new_empty(len(offsets), len(blame), blame.shape[1], phases.shape[2])
        for out, (phase, shift) in zip(found, offsets, strict=True):
            torch.bmm(blame, phases[phase, :, :, shift : shift + blame.shape[2]].transpose(1, 2), out=out)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        phases, blame = ctx.saved_tensors
        to_phases, to_blame = torch.zeros_like(phases), torch.zeros_like(blame)
        length, room = phases.shape[3], phases.shape[3] - blame.shape[2]
        framed = F.pad(blame, (room, room))  # then slices are read, and what is written is whole: products in place are faster so
        for part, (phase, shift) in zip(slope, ctx.offsets, strict=True):
            to_phases[phase].baddbmm_(part.transpose(1, 2), framed[:, :, room - shift : room - shift + length])
            to_blame.baddbmm_(part, phases[phase, :, :, shift : shift + blame.shape[2]])
        return to_phases, to_blame, None


def _flat(maps: Tensor, groups: int, victims: int) -> Tensor:
    """(rows, channels, h, w) to (victims x groups, channels of the group, all positions of the victim's rows)."""
    parts = maps.reshape(victims, -1, groups, maps.shape[1] // groups, maps.shape[2] * maps.shape[3])
    return parts.permute(0, 2, 3, 1, 4).reshape(victims * groups, parts.shape[3], -1)


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
