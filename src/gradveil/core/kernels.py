"""Small Triton kernels for a GPU, where torch's own operations would take several passes over the same memory.

Each has a plain torch twin in the module that calls it, which is the test's oracle and the way on a CPU.
"""

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

from gradveil.core.line_kernels import line_products, moments, scale_shift

__all__ = ["line_products", "mix", "moments", "patches", "products", "scale_shift"]

BLOCK = 1024
CHUNK = 8192


def patches(
    maps: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    corner: tuple[int, int],
    out: tuple[int, int],
    *,
    mirrored: bool,
) -> Tensor:
    """(rows, channels x kernel area, positions): zeros outside the map, whose first pixel lies at `corner` of the padded one."""
    maps = maps.contiguous()
    rows, channels, height, width = maps.shape
    found = torch.empty(rows, channels * kernel[0] * kernel[1], out[0] * out[1], dtype=maps.dtype, device=maps.device)
    grid = (triton.cdiv(found.numel(), BLOCK),)
    _patches[grid](maps, found, found.numel(), height, width, *out, *kernel, *stride, *dilation, *corner, mirrored, BLOCK)
    return found


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _patches(  # type: ignore[no-untyped-def]
    source,
    target,
    total,
    height: tl.constexpr,
    width: tl.constexpr,
    out_h: tl.constexpr,
    out_w: tl.constexpr,
    kernel_h: tl.constexpr,
    kernel_w: tl.constexpr,
    stride_h: tl.constexpr,
    stride_w: tl.constexpr,
    step_h: tl.constexpr,
    step_w: tl.constexpr,
    top: tl.constexpr,
    left: tl.constexpr,
    mirrored: tl.constexpr,
    block: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < total
    x = place % out_w
    rest = place // out_w
    y = rest % out_h
    rest = rest // out_h
    j = rest % kernel_w
    rest = rest // kernel_w
    i = rest % kernel_h
    plane = rest // kernel_h
    if mirrored:
        i = kernel_h - 1 - i
        j = kernel_w - 1 - j
    row = y * stride_h + i * step_h - top
    column = x * stride_w + j * step_w - left
    there = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    value = tl.load(source + (plane * height + row) * width + column, mask=there, other=0.0)
    tl.store(target + place, value, mask=inside)


def products(found: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """<g', g> and <g', g'> for each victim, in one pass and in float32."""
    found, target = found.contiguous(), target.contiguous()
    victims, size = len(found), found[0].numel()
    chunks = triton.cdiv(size, CHUNK)
    sums = torch.empty(2, victims, chunks, device=found.device)
    _products[(victims, chunks)](found, target, sums[0], sums[1], size, chunks, CHUNK, BLOCK)
    dot, own = sums.sum(2).unbind()
    return dot, own


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _products(found, target, dots, owns, size, chunks, chunk: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    victim = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * chunk
    dot = tl.zeros((block,), tl.float32)
    own = tl.zeros((block,), tl.float32)
    for start in range(0, chunk, block):
        place = first + start + tl.arange(0, block)
        inside = place < size
        g = tl.load(found + victim * size + place, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(target + victim * size + place, mask=inside, other=0.0).to(tl.float32)
        dot += g * t
        own += g * g
    tl.store(dots + victim * chunks + tl.program_id(1), tl.sum(dot))
    tl.store(owns + victim * chunks + tl.program_id(1), tl.sum(own))


def mix(found: Tensor, target: Tensor, to_found: Tensor, to_target: Tensor) -> Tensor:
    """a_v g' + b_v g for each victim v, in one pass."""
    found, target = found.contiguous(), target.contiguous()
    out = torch.empty_like(found)
    size = found[0].numel()
    _mix[(len(found), triton.cdiv(size, BLOCK))](found, target, to_found, to_target, out, size, BLOCK)
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mix(found, target, to_found, to_target, out, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    victim = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < size
    g = tl.load(found + victim * size + place, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(target + victim * size + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + victim * size + place, tl.load(to_found + victim) * g + tl.load(to_target + victim) * t, mask=inside)
