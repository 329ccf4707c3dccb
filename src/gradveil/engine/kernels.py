"""Small Triton kernels for a GPU, where plain torch would take several passes over the memory.

Each has a plain torch twin in the module that calls it, which serves on a CPU and tests it.
"""

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

BLOCK = 1024  # entries handled together by a program
CHUNK = 8192  # entries of a gradient summed by a program
POSITIONS = 64  # of the maps, multiplied in one go
ENTRIES = 2048  # of the maps, scaled by one program


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


def products(found: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return <g', g> and <g', g'> for each victim, in one pass and in float32."""
    found, target = _alike(found, target)
    victims, size = len(found), found[0].numel()
    chunks = triton.cdiv(size, CHUNK)
    sums = torch.empty(2, victims, chunks, device=found.device)
    _products[(victims, chunks)](found, target, sums[0], sums[1], size, chunks, CHUNK, BLOCK)
    dot, square = sums.sum(2).unbind()
    return dot, square


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _products(  # type: ignore[no-untyped-def]
    found, target, dots, squares, size, chunks, chunk: tl.constexpr, block: tl.constexpr
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
    tl.store(dots + victim * chunks + tl.program_id(1), tl.sum(dot))
    tl.store(squares + victim * chunks + tl.program_id(1), tl.sum(square))


def mix(found: Tensor, target: Tensor, to_found: Tensor, to_target: Tensor) -> Tensor:
    """Return a_v g' + b_v g for each victim v, in one pass."""
    found, target = _alike(found, target)
    out = torch.empty_like(found)
    size = found[0].numel()
    _mix[(len(found), triton.cdiv(size, BLOCK))](
        found, target, to_found, to_target, out, size, BLOCK
    )
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mix(  # type: ignore[no-untyped-def]
    found, target, to_found, to_target, out, size, block: tl.constexpr
):
    victim = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * block + tl.arange(0, block)
    inside = index < size
    g = tl.load(found + victim * size + index, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(target + victim * size + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + victim * size + index,
        tl.load(to_found + victim) * g + tl.load(to_target + victim) * t,
        mask=inside,
    )


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


def moments(blame: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum b and sum b a over the positions, (images, channels) each, in float32."""
    count, channels, height, width = blame.shape
    sums = torch.empty(2, count, channels, device=blame.device)
    tile = min(64, _tile(channels))
    grid = (count, triton.cdiv(channels, tile))
    _moments[grid](
        blame,
        inputs,
        sums[0],
        sums[1],
        channels,
        height * width,
        width,
        *blame.stride(),
        *inputs.stride(),
        tile,
        POSITIONS,
    )
    plain, mixed = sums.unbind()
    return plain, mixed


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _moments(  # type: ignore[no-untyped-def]
    blame,
    inputs,
    plains,
    mixes,
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
    plain = tl.zeros((tile,), tl.float32)
    mixed = tl.zeros((tile,), tl.float32)
    for start in range(0, positions, block):
        p = start + tl.arange(0, block)
        y = p // width
        x = p % width
        there = (p < positions)[:, None] & (c < channels)[None, :]
        b = tl.load(
            blame
            + image * out_image
            + (y * out_down + x * out_across)[:, None]
            + c[None, :] * out_channel,
            mask=there,
            other=0.0,
        )
        a = tl.load(
            inputs
            + image * in_image
            + (y * in_down + x * in_across)[:, None]
            + c[None, :] * in_channel,
            mask=there,
            other=0.0,
        )
        plain += tl.sum(b.to(tl.float32), 0)
        mixed += tl.sum(b.to(tl.float32) * a.to(tl.float32), 0)
    tl.store(plains + image * channels + c, plain, mask=c < channels)
    tl.store(mixes + image * channels + c, mixed, mask=c < channels)


def scale_shift(maps: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """Return scale x + shift, channel by channel, in one pass and through float32.

    The maps come out with channels last.
    """
    maps = maps.contiguous(memory_format=torch.channels_last)
    found = torch.empty_like(maps)
    total = maps.numel()
    _scale_shift[(triton.cdiv(total, ENTRIES),)](
        maps,
        scale,
        scale if shift is None else shift,
        found,
        total,
        maps.shape[1],
        shift is not None,
        ENTRIES,
    )
    return found


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scale_shift(  # type: ignore[no-untyped-def]
    maps, scale, shift, found, total, channels, shifted: tl.constexpr, block: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < total
    c = index % channels
    value = tl.load(maps + index, mask=inside, other=0.0).to(tl.float32) * tl.load(
        scale + c, mask=inside, other=0.0
    )
    if shifted:
        value += tl.load(shift + c, mask=inside, other=0.0)
    tl.store(found + index, value, mask=inside)
