"""Triton kernels for the weight gradients of convolutions, which read the maps where they lie.

For the input a, the blame b (the loss gradient at the output) and a slope s at the weight gradient
of each victim, with the sum over the positions p and taps t of a kernel:

    weight_products   g[o, t, c] = sum over p of b[p, o] a[p + t, c]
    blame_slope       db[p, o] = sum over t and c of a[p + t, c] s[o, t, c]
    input_slope       da[p, c] = sum over t and o of b[p - t, o] s[o, t, c]

Each is a matrix product whose patches are never written out: a program gathers the entries that it
multiplies. All maps have channels last. Sums are taken in float32.
"""

from math import gcd
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

from gradveil.engine.patches import PatchLayout

LEAST = 16  # entries on each side of a block that the GPU multiplies
DEPTH = 64  # entries summed by one product of blocks
WIDEST = 128  # rows or columns of a block
TAPS = 3  # of one kernel row, that share a block of the blame
STAGES = 3  # of loads that run ahead of the products


class Tile(NamedTuple):
    """The blocks that a program multiplies, (rows, depth) and (depth, columns), and its means."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    taps: int = 1


def weight_products(
    inputs: Tensor, blame: Tensor, layout: PatchLayout, tile: Tile | None = None
) -> Tensor:
    """Return (victims, outputs, kernel area, channels), the weight gradient of each victim."""
    inputs, blame = _last(inputs), _last(blame)
    count, channels, height, width = inputs.shape
    _, outputs, out_h, out_w = blame.shape
    kernel_h, kernel_w = layout.kernel
    entries = kernel_h * kernel_w * channels
    flat = channels < LEAST
    if tile is None:
        positions = count // layout.victims * out_h * out_w
        taps = 1 if flat else min(TAPS, kernel_w)
        tile = choose_tile(outputs, entries if flat else channels, positions, taps)
    if flat:
        parts = triton.cdiv(entries, tile.columns)
    else:
        parts = triton.cdiv(channels, tile.columns) * kernel_h * triton.cdiv(kernel_w, tile.taps)
    found = inputs.new_empty(layout.victims, outputs, kernel_h * kernel_w, channels)
    _weight_products[(layout.victims * triton.cdiv(outputs, tile.rows) * parts,)](
        inputs, blame, found, count // layout.victims, channels, outputs, height, width,
        out_h, out_w, *_moves(layout), flat, tile.taps, tile.rows, tile.columns, tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return found


def blame_slope(
    inputs: Tensor,
    slope: Tensor,
    out: tuple[int, int],
    layout: PatchLayout,
    tile: Tile | None = None,
) -> Tensor:
    """Return (rows, outputs, *out), the slope at the blame.

    `slope` is that at the weight gradient, (victims, outputs, kernel area, channels).
    """
    inputs, slope = _last(inputs), slope.contiguous()
    count, channels, height, width = inputs.shape
    victims, outputs, area, _ = slope.shape
    positions = count // victims * out[0] * out[1]
    flat = channels < LEAST
    if tile is None:
        tile = choose_tile(positions, outputs, area * channels if flat else channels)
    found = _maps((count, outputs, *out), inputs)
    tiles = triton.cdiv(positions, tile.rows) * triton.cdiv(outputs, tile.columns)
    _blame_slope[(victims * tiles,)](
        inputs, slope, found, count // victims, channels, outputs, height, width, *out,
        *_moves(layout), flat, tile.rows, tile.columns, tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return found


def input_slope(
    blame: Tensor,
    slope: Tensor,
    size: tuple[int, int],
    layout: PatchLayout,
    tile: Tile | None = None,
) -> Tensor:
    """Return (rows, channels, *size), the slope at the input.

    `slope` is that at the weight gradient, (victims, outputs, kernel area, channels). With a
    stride, input positions fall into phases (their remainders), and only some taps reach a phase:
    a program handles positions of one phase.
    """
    blame, slope = _last(blame), slope.contiguous()
    count, outputs, out_h, out_w = blame.shape
    victims, _, _, channels = slope.shape
    (stride_h, stride_w), (step_h, step_w) = layout.stride, layout.dilation
    positions = count // victims * triton.cdiv(size[0], stride_h) * triton.cdiv(size[1], stride_w)
    if tile is None:
        tile = choose_tile(positions, channels, outputs)
    found = _maps((count, channels, *size), blame)
    tiles = triton.cdiv(positions, tile.rows) * triton.cdiv(channels, tile.columns)
    _input_slope[(victims * tiles * stride_h * stride_w,)](
        blame, slope, found, count // victims, channels, outputs, *size, out_h, out_w,
        *_moves(layout), stride_h // gcd(stride_h, step_h), stride_w // gcd(stride_w, step_w),
        tile.rows, tile.columns, tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return found


def choose_tile(rows: int, columns: int, depth: int, taps: int = 1) -> Tile:
    """Return the tile for a product of this size. All tuning is here and in the constants."""
    high = _power(rows, WIDEST)
    wide = _power(columns, WIDEST if taps == 1 else WIDEST // 2)  # a sum for each tap is held
    warps = 8 if high * wide * taps > WIDEST**2 else 4
    return Tile(high, wide, _power(depth, DEPTH), warps, STAGES, taps)


def _power(size: int, most: int) -> int:
    """Return the power of two that holds `size`, within what a block can have."""
    return min(most, max(LEAST, 1 << (size - 1).bit_length()))


def _last(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


def _moves(layout: PatchLayout) -> tuple[int, ...]:
    """Return kernel, stride, dilation and the zeros before the map, each in height and width."""
    (top, _), (left, _) = layout.edges
    return (*layout.kernel, *layout.stride, *layout.dilation, top, left)


def _maps(shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _read(  # type: ignore[no-untyped-def]
    maps, image, row, column, c, there, height: tl.constexpr, width: tl.constexpr, channels
):
    """Load a block of maps with channels last; 0 outside the map. All indices broadcast."""
    there = there & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    index = ((image * height + row) * width + column) * channels
    return tl.load(maps + index + c, mask=there, other=0.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _weight_products(  # type: ignore[no-untyped-def]
    inputs, blame, found, rows,
    channels: tl.constexpr, outputs: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    out_h: tl.constexpr, out_w: tl.constexpr, kernel_h: tl.constexpr, kernel_w: tl.constexpr,
    stride_h: tl.constexpr, stride_w: tl.constexpr, step_h: tl.constexpr, step_w: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, flat: tl.constexpr, taps: tl.constexpr,
    tile_out: tl.constexpr, tile_in: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    entries: tl.constexpr = kernel_h * kernel_w * channels
    positions: tl.constexpr = out_h * out_w
    tiles_out: tl.constexpr = (outputs + tile_out - 1) // tile_out
    across: tl.constexpr = 1 if flat else (kernel_w + taps - 1) // taps
    span: tl.constexpr = entries if flat else channels
    tiles_in: tl.constexpr = (span + tile_in - 1) // tile_in
    groups: tl.constexpr = 1 if flat else kernel_h * across
    tiles: tl.constexpr = tiles_out * groups * tiles_in
    victim = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    o = tile % tiles_out * tile_out + tl.arange(0, tile_out)
    n = tile // tiles_out % tiles_in * tile_in + tl.arange(0, tile_in)
    group = tile // tiles_out // tiles_in
    inside = (n < span)[None, :]
    if flat:  # columns are entries of the patch, each with a tap and a channel
        c = (n % channels)[None, :]
        i = (n // channels // kernel_w)[None, :]
        j = (n // channels % kernel_w)[None, :]
    else:  # columns are channels, seen by `taps` taps in turn
        c = n[None, :]
        i = group // across
        j = group % across * taps
    total = rows * positions
    first = tl.zeros((tile_out, tile_in), tl.float32)
    second = tl.zeros((tile_out, tile_in), tl.float32)
    third = tl.zeros((tile_out, tile_in), tl.float32)
    for start in range(0, total, block):
        p = start + tl.arange(0, block)
        b = tl.load(
            blame + ((victim * total + p) * outputs)[None, :] + o[:, None],
            mask=(o < outputs)[:, None] & (p < total)[None, :],
            other=0.0,
        )
        there = (p < total)[:, None] & inside
        image = (victim * rows + p // positions)[:, None]
        row = (p % positions // out_w * stride_h - top)[:, None] + i * step_h
        column = (p % out_w * stride_w - left)[:, None] + j * step_w
        a = _read(inputs, image, row, column, c, there, height, width, channels)
        first = tl.dot(b, a, first, input_precision="ieee")
        if taps > 1:
            a = _read(inputs, image, row, column + step_w, c, there, height, width, channels)
            second = tl.dot(b, a, second, input_precision="ieee")
        if taps > 2:
            a = _read(inputs, image, row, column + 2 * step_w, c, there, height, width, channels)
            third = tl.dot(b, a, third, input_precision="ieee")
    target = found + victim * (outputs * entries) + (o * entries)[:, None] + n[None, :]
    if not flat:
        target += (i * kernel_w + j) * channels
    kind = found.dtype.element_ty
    tl.store(target, first.to(kind), mask=(o < outputs)[:, None] & inside)
    if taps > 1:
        rest = tl.where(j + 1 < kernel_w, outputs, 0)  # the last group of a row may be short
        tl.store(target + channels, second.to(kind), mask=(o < rest)[:, None] & inside)
    if taps > 2:
        rest = tl.where(j + 2 < kernel_w, outputs, 0)
        tl.store(target + 2 * channels, third.to(kind), mask=(o < rest)[:, None] & inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _blame_slope(  # type: ignore[no-untyped-def]
    inputs, slope, found, rows,
    channels: tl.constexpr, outputs: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    out_h: tl.constexpr, out_w: tl.constexpr, kernel_h: tl.constexpr, kernel_w: tl.constexpr,
    stride_h: tl.constexpr, stride_w: tl.constexpr, step_h: tl.constexpr, step_w: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, flat: tl.constexpr, tile_p: tl.constexpr,
    tile_out: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    entries: tl.constexpr = kernel_h * kernel_w * channels
    positions: tl.constexpr = out_h * out_w
    tiles_out: tl.constexpr = (outputs + tile_out - 1) // tile_out
    span: tl.constexpr = entries if flat else channels
    chunks: tl.constexpr = (span + block - 1) // block
    turns: tl.constexpr = chunks if flat else chunks * kernel_h * kernel_w
    total = rows * positions
    tiles = tl.cdiv(total, tile_p) * tiles_out
    victim = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    o = tile % tiles_out * tile_out + tl.arange(0, tile_out)
    p = tile // tiles_out * tile_p + tl.arange(0, tile_p)
    image = (victim * rows + p // positions)[:, None]
    row = (p % positions // out_w * stride_h - top)[:, None]
    column = (p % out_w * stride_w - left)[:, None]
    weights = slope + victim * (outputs * entries) + (o * entries)[None, :]
    result = tl.zeros((tile_p, tile_out), tl.float32)
    for turn in range(turns):  # one loop over taps and channels: loads run ahead of products
        n = turn % chunks * block + tl.arange(0, block)
        inside = n < span
        if flat:
            tap = (n // channels)[None, :]
            c = n % channels
        else:
            tap = turn // chunks
            c = n
            n += tap * channels
        a = _read(
            inputs,
            image,
            row + tap // kernel_w * step_h,
            column + tap % kernel_w * step_w,
            c[None, :],
            (p < total)[:, None] & inside[None, :],
            height,
            width,
            channels,
        )
        s = tl.load(weights + n[:, None], mask=inside[:, None] & (o < outputs)[None, :], other=0.0)
        result = tl.dot(a, s, result, input_precision="ieee")
    tl.store(
        found + ((victim * total + p) * outputs)[:, None] + o[None, :],
        result.to(found.dtype.element_ty),
        mask=(p < total)[:, None] & (o < outputs)[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _first_tap(  # type: ignore[no-untyped-def]
    phase, stride: tl.constexpr, step: tl.constexpr, every: tl.constexpr, kernel: tl.constexpr
):
    """Return the first tap that reaches positions of this phase, and how many do.

    `phase` counts from the corner of the padded map. The taps are `every` apart.
    """
    first = phase * 0 + kernel
    for tap in tl.static_range(every):
        first = tl.where((phase - tap * step) % stride == 0, tap, first)
    return first, (kernel - first + every - 1) // every


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _input_slope(  # type: ignore[no-untyped-def]
    blame, slope, found, rows,
    channels: tl.constexpr, outputs: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    out_h: tl.constexpr, out_w: tl.constexpr, kernel_h: tl.constexpr, kernel_w: tl.constexpr,
    stride_h: tl.constexpr, stride_w: tl.constexpr, step_h: tl.constexpr, step_w: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, every_h: tl.constexpr, every_w: tl.constexpr,
    tile_p: tl.constexpr, tile_in: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    entries: tl.constexpr = kernel_h * kernel_w * channels
    down: tl.constexpr = (height + stride_h - 1) // stride_h
    across: tl.constexpr = (width + stride_w - 1) // stride_w
    tiles_in: tl.constexpr = (channels + tile_in - 1) // tile_in
    phases: tl.constexpr = stride_h * stride_w
    chunks: tl.constexpr = (outputs + block - 1) // block
    total = rows * (down * across)
    tiles = tl.cdiv(total, tile_p) * tiles_in * phases
    victim = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    c = tile % tiles_in * tile_in + tl.arange(0, tile_in)
    phase = tile // tiles_in % phases
    p = tile // tiles_in // phases * tile_p + tl.arange(0, tile_p)
    y = p % (down * across) // across * stride_h + phase // stride_w
    x = p % across * stride_w + phase % stride_w
    image = victim * rows + p // (down * across)
    inside = (p < total) & (y < height) & (x < width)
    first_h, count_h = _first_tap(phase // stride_w + top, stride_h, step_h, every_h, kernel_h)
    first_w, count_w = _first_tap(phase % stride_w + left, stride_w, step_w, every_w, kernel_w)
    weights = slope + victim * (outputs * entries) + c[None, :]
    result = tl.zeros((tile_p, tile_in), tl.float32)
    for turn in range(count_h * count_w * chunks):
        tap = turn // chunks
        i = first_h + tap // tl.maximum(count_w, 1) * every_h
        j = first_w + tap % tl.maximum(count_w, 1) * every_w
        o = turn % chunks * block + tl.arange(0, block)
        b = _read(
            blame,
            image[:, None],
            ((y + top - i * step_h) // stride_h)[:, None],
            ((x + left - j * step_w) // stride_w)[:, None],
            o[None, :],
            inside[:, None] & (o < outputs)[None, :],
            out_h,
            out_w,
            outputs,
        )
        s = tl.load(
            weights + (o * entries + (i * kernel_w + j) * channels)[:, None],
            mask=(o < outputs)[:, None] & (c < channels)[None, :],
            other=0.0,
        )
        result = tl.dot(b, s, result, input_precision="ieee")
    index = ((image * height + y) * width + x) * channels
    tl.store(
        found + index[:, None] + c[None, :],
        result.to(found.dtype.element_ty),
        mask=inside[:, None] & (c < channels)[None, :],
    )
