"""Small Triton kernels for a GPU, where plain torch would take several passes over the memory.

Each has a plain torch twin in the module that calls it, which serves on a CPU and tests it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

BLOCK = 1024  # entries handled together by a program
CHUNK = 8192  # entries of a gradient summed by a program
POSITIONS = 64  # of the maps, multiplied in one go


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
    """Return (rows, channels x kernel area, positions) of patches, with zeros outside the map.

    The first pixel of the map lies at `corner` of the padded map.
    """
    maps = maps.contiguous()
    rows, channels, height, width = maps.shape
    found = torch.empty(
        rows,
        channels * kernel[0] * kernel[1],
        out[0] * out[1],
        dtype=maps.dtype,
        device=maps.device,
    )
    grid = (triton.cdiv(found.numel(), BLOCK),)
    _patches[grid](
        maps,
        found,
        found.numel(),
        height,
        width,
        *out,
        *kernel,
        *stride,
        *dilation,
        *corner,
        mirrored,
        BLOCK,
    )
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
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < total
    x = index % out_w
    rest = index // out_w
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
    tl.store(target + index, value, mask=inside)


def _alike(found: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with each victim's numbers in one order of the memory."""
    if found.stride() == target.stride() == torch.empty_like(found).stride() and (
        found.stride(0) == found[0].numel()
    ):
        return found, target
    return found.contiguous(), target.contiguous()


def products(
    found: Sequence[Tensor], target: Sequence[Tensor], factors: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return sum f <g', g> and sum f <g', g'> over gradients in lists, for each victim.

    One pass over each gradient, in float32.
    """
    victims = len(found[0])
    counts = [triton.cdiv(g[0].numel(), CHUNK) for g in found]
    sums = torch.empty(2, victims, sum(counts), device=found[0].device)
    first = 0
    for g, t, factor, chunks in zip(found, target, factors, counts, strict=True):
        g, t = _alike(g, t)
        _products[(victims, chunks)](
            g, t, sums[0], sums[1], factor, g[0].numel(), first, sums.shape[2], CHUNK, BLOCK
        )
        first += chunks
    dot, square = sums.sum(2).unbind()
    return dot, square


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _products(  # type: ignore[no-untyped-def]
    found,
    target,
    dots,
    squares,
    factor,
    size,
    before,
    chunks,
    chunk: tl.constexpr,
    block: tl.constexpr,
):
    victim = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * chunk
    dot = tl.zeros((block,), tl.float32)
    square = tl.zeros((block,), tl.float32)
    for start in range(0, chunk, block):
        index = first + start + tl.arange(0, block)
        inside = index < size
        g = tl.load(found + victim * size + index, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(target + victim * size + index, mask=inside, other=0.0).to(tl.float32)
        dot += g * t
        square += g * g
    at = victim * chunks + before + tl.program_id(1)
    tl.store(dots + at, factor * tl.sum(dot))
    tl.store(squares + at, factor * tl.sum(square))


def mix(
    found: Tensor, target: Tensor, to_found: Tensor, to_target: Tensor, factor: float
) -> Tensor:
    """Return f (2 a_v g' + b_v g) for each victim v, in one pass."""
    found, target = _alike(found, target)
    # The slope of a sum over victims is one number that all of them share.
    to_found, to_target = to_found.contiguous(), to_target.contiguous()
    out = torch.empty_like(found)
    size = found[0].numel()
    # Only the first number of programs may exceed 65,535, and a gradient may be large.
    _mix[(triton.cdiv(size, BLOCK), len(found))](
        found, target, to_found, to_target, out, factor, size, BLOCK
    )
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mix(  # type: ignore[no-untyped-def]
    found, target, to_found, to_target, out, factor, size, block: tl.constexpr
):
    victim = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * block + tl.arange(0, block)
    inside = index < size
    g = tl.load(found + victim * size + index, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(target + victim * size + index, mask=inside, other=0.0).to(tl.float32)
    a = 2 * factor * tl.load(to_found + victim).to(tl.float32)
    b = factor * tl.load(to_target + victim).to(tl.float32)
    tl.store(out + victim * size + index, a * g + b * t, mask=inside)


def line_products(
    inputs: Tensor,
    blame: Tensor,
    lines: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    corner: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return <g, g_last> and <g, g> for the weight gradient g of each image, in float32.

    Both are (lines, images of the line). A program makes a tile of every gradient of a line in
    turn, the last image's first, and keeps sums of products alone.
    """
    count, channels, height, width = inputs.shape
    _, wide, out_h, out_w = blame.shape
    tile_out, tile_in = _tile(wide), _tile(channels)
    tiles = triton.cdiv(wide, tile_out) * kernel[0] * kernel[1] * triton.cdiv(channels, tile_in)
    sums = torch.empty(2, tiles, count, device=inputs.device)
    _line_products[(tiles, lines)](
        inputs, blame, sums[0], sums[1], count // lines, channels, wide, height, width,
        *inputs.stride(), *blame.stride(), count, out_h * out_w, out_w,
        *kernel, *stride, *dilation, *corner, tile_out, tile_in, POSITIONS,
        num_warps=8 if tile_out * tile_in > 64 * 64 else 4,
    )  # fmt: skip
    dots, squares = sums.sum(1).view(2, lines, -1).unbind()
    return dots, squares


def _tile(channels: int) -> int:
    return min(128, max(16, 1 << (channels - 1).bit_length()))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _line_products(  # type: ignore[no-untyped-def]
    inputs,
    blame,
    dots,
    squares,
    images,
    channels,
    wide,
    height: tl.constexpr,
    width: tl.constexpr,
    in_image,
    in_channel,
    in_down,
    in_across,
    out_image,
    out_channel,
    out_down,
    out_across,
    count,
    positions: tl.constexpr,
    out_w: tl.constexpr,
    kernel_h: tl.constexpr,
    kernel_w: tl.constexpr,
    stride_h: tl.constexpr,
    stride_w: tl.constexpr,
    step_h: tl.constexpr,
    step_w: tl.constexpr,
    top: tl.constexpr,
    left: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
    block: tl.constexpr,
):
    tile = tl.program_id(0)
    line = tl.program_id(1)
    parts = tl.cdiv(channels, tile_in)
    c = (tile % parts) * tile_in + tl.arange(0, tile_in)
    index = (tile // parts) % (kernel_h * kernel_w)
    i = index // kernel_w
    j = index % kernel_w
    k = (tile // parts) // (kernel_h * kernel_w) * tile_out + tl.arange(0, tile_out)
    last = tl.zeros((tile_out, tile_in), tl.float32)
    for turn in range(images):
        image = (line * images + images - 1 - turn).to(tl.int64)
        found = tl.zeros((tile_out, tile_in), tl.float32)
        for start in range(0, positions, block):
            p = start + tl.arange(0, block)
            y = p // out_w
            x = p % out_w
            b = tl.load(
                blame
                + image * out_image
                + k[:, None] * out_channel
                + (y * out_down + x * out_across)[None, :],
                mask=(k < wide)[:, None] & (p < positions)[None, :],
                other=0.0,
            )
            row = y * stride_h + i * step_h - top
            column = x * stride_w + j * step_w - left
            there = (p < positions) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            a = tl.load(
                inputs
                + image * in_image
                + (row * in_down + column * in_across)[:, None]
                + c[None, :] * in_channel,
                mask=there[:, None] & (c < channels)[None, :],
                other=0.0,
            )
            found = tl.dot(b, a, found)
        last = tl.where(turn == 0, found, last)
        tl.store(dots + tile * count + image, tl.sum(tl.sum(found * last, 1), 0))
        tl.store(squares + tile * count + image, tl.sum(tl.sum(found * found, 1), 0))


class Statistics(NamedTuple):
    """What a batch norm in eval mode has for each channel: weight and bias may be missing."""

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def norm_sums(blame: Tensor, inputs: Tensor, kept: Statistics) -> tuple[Tensor, Tensor]:
    """Return sum b (a - mean) / std and sum b over the positions, (images, channels) each.

    They are the gradients of weight and bias, in float32.
    """
    count, channels, height, width = blame.shape
    sums = torch.empty(2, count, channels, device=blame.device)
    tile = 16  # channels: few, so that there are programs for all of the GPU
    _norm_sums[(count, triton.cdiv(channels, tile))](
        blame, inputs, kept.mean, kept.variance, sums[0], sums[1], kept.eps, channels,
        height * width, width, *blame.stride(), *inputs.stride(), tile, POSITIONS,
    )  # fmt: skip
    to_weight, to_bias = sums.unbind()
    return to_weight, to_bias


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_sums(  # type: ignore[no-untyped-def]
    blame,
    inputs,
    means,
    variances,
    weights,
    biases,
    eps,
    channels,
    positions: tl.constexpr,
    width: tl.constexpr,
    out_image,
    out_channel,
    out_down,
    out_across,
    in_image,
    in_channel,
    in_down,
    in_across,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * tile + tl.arange(0, tile)
    held = c < channels
    # Taken off first: the difference of two large sums would have few digits.
    mean = tl.load(means + c, mask=held, other=0.0).to(tl.float32)
    plain = tl.zeros((tile,), tl.float32)
    mixed = tl.zeros((tile,), tl.float32)
    for start in range(0, positions, block):
        p = start + tl.arange(0, block)
        y = p // width
        x = p % width
        there = (p < positions)[:, None] & held[None, :]
        b = tl.load(
            blame
            + image * out_image
            + (y * out_down + x * out_across)[:, None]
            + c[None, :] * out_channel,
            mask=there,
            other=0.0,
        ).to(tl.float32)
        a = tl.load(
            inputs
            + image * in_image
            + (y * in_down + x * in_across)[:, None]
            + c[None, :] * in_channel,
            mask=there,
            other=0.0,
        ).to(tl.float32)
        plain += tl.sum(b, 0)
        mixed += tl.sum(b * (a - mean[None, :]), 0)
    r = tl.rsqrt(tl.load(variances + c, mask=held, other=1.0).to(tl.float32) + eps)
    tl.store(weights + image * channels + c, mixed * r, mask=held)
    tl.store(biases + image * channels + c, plain, mask=held)


def norm_slopes(
    blame: Tensor, inputs: Tensor, to_weight: Tensor, to_bias: Tensor, kept: Statistics
) -> tuple[Tensor, Tensor]:
    """Return the slopes of `norm_sums` at blame and input, from those at its sums, in one pass.

    The maps come out with channels last.
    """
    blame, inputs = _last(blame), _last(inputs)
    to_weight, to_bias = to_weight.contiguous(), to_bias.contiguous()
    to_blame, to_inputs = torch.empty_like(blame), torch.empty_like(inputs)
    count, channels, height, width = blame.shape
    tile = min(64, _tile(channels))
    positions = height * width
    _norm_slopes[(count, triton.cdiv(positions, POSITIONS), triton.cdiv(channels, tile))](
        blame, inputs, to_weight, to_bias, kept.mean, kept.variance, to_blame, to_inputs,
        kept.eps, channels, positions, tile, POSITIONS,
    )  # fmt: skip
    return to_blame, to_inputs


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_slopes(  # type: ignore[no-untyped-def]
    blame,
    inputs,
    to_weight,
    to_bias,
    means,
    variances,
    to_blame,
    to_inputs,
    eps,
    channels,
    positions,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * block + tl.arange(0, block)
    c = tl.program_id(2) * tile + tl.arange(0, tile)
    held = c < channels
    there = (p < positions)[:, None] & held[None, :]
    at = image * positions * channels + p[:, None] * channels + c[None, :]
    r = tl.rsqrt(tl.load(variances + c, mask=held, other=1.0).to(tl.float32) + eps)
    mixed = r * tl.load(to_weight + image * channels + c, mask=held, other=0.0).to(tl.float32)
    plain = tl.load(to_bias + image * channels + c, mask=held, other=0.0).to(tl.float32)
    mean = tl.load(means + c, mask=held, other=0.0).to(tl.float32)
    b = tl.load(blame + at, mask=there, other=0.0).to(tl.float32)
    a = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
    tl.store(to_blame + at, plain[None, :] + (a - mean[None, :]) * mixed[None, :], mask=there)
    tl.store(to_inputs + at, b * mixed[None, :], mask=there)


def affine(maps: Tensor, kept: Statistics, *, shifted: bool) -> Tensor:
    """Run batch norm in eval mode, in one pass and through float32; else its slope, unshifted.

    The maps come out with channels last.
    """
    maps = _last(maps)
    found = torch.empty_like(maps)
    count, channels, height, width = maps.shape
    tile, positions = min(64, _tile(channels)), count * height * width
    missing = kept.mean  # never read
    _affine[(triton.cdiv(positions, POSITIONS), triton.cdiv(channels, tile))](
        maps,
        kept.mean,
        kept.variance,
        missing if kept.weight is None else kept.weight,
        missing if kept.bias is None else kept.bias,
        found,
        kept.eps,
        channels,
        positions,
        kept.weight is not None,
        kept.bias is not None,
        shifted,
        tile,
        POSITIONS,
    )
    return found


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _affine(  # type: ignore[no-untyped-def]
    maps,
    means,
    variances,
    weights,
    biases,
    found,
    eps,
    channels,
    positions,
    weighted: tl.constexpr,
    biased: tl.constexpr,
    shifted: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    c = tl.program_id(1) * tile + tl.arange(0, tile)
    held = c < channels
    there = (p < positions)[:, None] & held[None, :]
    at = p[:, None] * channels + c[None, :]
    scale = tl.rsqrt(tl.load(variances + c, mask=held, other=1.0).to(tl.float32) + eps)
    if weighted:
        scale *= tl.load(weights + c, mask=held, other=0.0).to(tl.float32)
    value = tl.load(maps + at, mask=there, other=0.0).to(tl.float32)
    if shifted:
        value -= tl.load(means + c, mask=held, other=0.0).to(tl.float32)[None, :]
    value *= scale[None, :]
    if shifted and biased:
        value += tl.load(biases + c, mask=held, other=0.0).to(tl.float32)[None, :]
    tl.store(found + at, value, mask=there)


def _last(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)
