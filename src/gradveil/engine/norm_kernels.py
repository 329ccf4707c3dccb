"""Triton kernels for normalization by the statistics of each victim, differentiated twice.

Maps are views (groups, rows, channels, positions), all with the same strides; a group has a mean
and a 1 / std for each channel. Each derivative takes two kernels: one adds up products over a
group, in parts, and the other makes the new maps out of these sums. `norms` has the formulas, and
a plain torch twin of each.
"""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

ENTRIES = 64  # positions of all rows, handled together by a program
CHANNELS = 32
MOST_PARTS = 16  # in which the sums of a group are made
PART = 256  # entries that are worth a part


def forward(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return w z + b, and mean and 1 / std, (2, groups, channels)."""
    sums = _sums(values, None, values, None)
    found = torch.empty_like(values)
    groups, _, channels, _ = values.shape
    kept = torch.empty(2, groups, channels, device=values.device)
    _forward[_grid(values)](
        values, sums, *_filled(weight, bias, values), kept, found, eps, *_sizes(values, sums),
        weight is not None, bias is not None, ENTRIES, CHANNELS,
    )  # fmt: skip
    return found, kept


def backward(
    slope: Tensor, values: Tensor, weight: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slopes at the values, and at weight and bias, (groups, channels)."""
    (slope,) = _alike(values, slope)
    sums = _sums(slope, None, values, kept)
    found, both = torch.empty_like(values), torch.empty_like(kept)
    _backward[_grid(values)](
        slope, values, sums, kept, *_filled(weight, None, values)[:1], both, found,
        *_sizes(values, sums), weight is not None, ENTRIES, CHANNELS,
    )  # fmt: skip
    mixed, plain = both.unbind()
    return found, mixed, plain


def second(
    u: Tensor,
    slope: Tensor,
    values: Tensor,
    weight: Tensor | None,
    kept: Tensor,
    first: tuple[Tensor, Tensor],
    to_first: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slopes of `backward` at its slope, its values and its weight.

    `first` are the slopes at weight and bias that it found. `u` and `to_first` are the slopes at
    what it returned.
    """
    u, slope = _alike(values, u, slope)
    sums = _sums(u, slope, values, kept)
    to_slope, to_values = torch.empty_like(values), torch.empty_like(values)
    to_weight = torch.empty_like(kept[0])
    numbers = [part.to(kept).contiguous() for part in (*first, *to_first)]
    _second[_grid(values)](
        u, slope, values, sums, kept, *_filled(weight, None, values)[:1], *numbers, to_weight,
        to_slope, to_values, *_sizes(values, sums), weight is not None, ENTRIES, CHANNELS,
    )  # fmt: skip
    return to_slope, to_values, to_weight


def scale(values: Tensor, factor: Tensor, shift: Tensor | None) -> Tensor:
    """Return factor x + shift, with numbers (groups, channels) in float32."""
    _, rows, channels, positions = values.shape
    found = torch.empty_like(values)
    _scale[_grid(values)](
        values, factor.contiguous(), factor if shift is None else shift.contiguous(), found,
        rows * positions, channels, positions, *values.stride(), shift is not None, ENTRIES,
        CHANNELS,
    )  # fmt: skip
    return found


def sums(slope: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum g x and sum g over each group, (groups, channels), in float32."""
    (slope,) = _alike(values, slope)
    none = torch.zeros(values.shape[0], values.shape[2], device=values.device)
    plain, mixed = _sums(slope, None, values, none)[:2].sum(1).unbind()
    return mixed, plain


def _alike(values: Tensor, *others: Tensor) -> list[Tensor]:
    """Return the others in the format and the order of the memory of the values."""
    return [
        other
        if other.stride() == values.stride() and other.dtype == values.dtype
        else torch.empty_like(values).copy_(other)
        for other in others
    ]


def _filled(weight: Tensor | None, bias: Tensor | None, values: Tensor) -> Sequence[Tensor]:
    """Return both, (groups, channels); one that is missing is never read."""
    return [values if part is None else part.contiguous() for part in (weight, bias)]


def _grid(values: Tensor) -> tuple[int, int, int]:
    """Return the numbers of programs; only the first may exceed 65,535."""
    groups, rows, channels, positions = values.shape
    return triton.cdiv(rows * positions, ENTRIES), groups, triton.cdiv(channels, CHANNELS)


def _sizes(values: Tensor, sums: Tensor) -> tuple[int, ...]:
    """Return the numbers of groups, of a group's entries, of channels, positions and parts.

    Then come the strides of groups, rows, channels and positions.
    """
    groups, rows, channels, positions = values.shape
    return groups, rows * positions, channels, positions, sums.shape[1], *values.stride()


def _sums(first: Tensor, second: Tensor | None, values: Tensor, kept: Tensor | None) -> Tensor:
    """Return sums of a, a (x - c) and a b over each group, (3, parts, groups, channels).

    c is the mean. Without one it is the first entry of the group, and a is x - c itself: such sums
    give mean and variance without a loss of digits.
    """
    groups, rows, channels, positions = values.shape
    parts = min(MOST_PARTS, triton.cdiv(rows * positions, PART))
    found = torch.empty(3, parts, groups, channels, device=values.device)
    _add[(groups, parts, triton.cdiv(channels, CHANNELS))](
        first, values if second is None else second, values, values if kept is None else kept,
        found, *_sizes(values, found), kept is None, second is not None, ENTRIES, CHANNELS,
    )  # fmt: skip
    return found


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add(  # type: ignore[no-untyped-def]
    first,
    second,
    values,
    means,
    found,
    groups,
    entries,
    channels,
    positions: tl.constexpr,
    parts: tl.constexpr,
    of_group,
    of_row,
    of_channel,
    of_position,
    itself: tl.constexpr,
    crossed: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = tl.program_id(2) * tile + tl.arange(0, tile)
    held = c < channels
    base = group * of_group
    if itself:
        center = tl.load(values + base + c * of_channel, mask=held, other=0.0).to(tl.float32)
    else:
        center = tl.load(means + group * channels + c, mask=held, other=0.0)
    plain = tl.zeros((tile,), tl.float32)
    mixed = tl.zeros((tile,), tl.float32)
    cross = tl.zeros((tile,), tl.float32)
    for start in range(part * block, entries, parts * block):
        e = start + tl.arange(0, block)
        there = (e < entries)[:, None] & held[None, :]
        at = base + (e // positions * of_row + e % positions * of_position)[:, None]
        at += c[None, :] * of_channel
        x = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
        x = tl.where(there, x - center[None, :], 0.0)
        a = x
        if not itself:
            a = tl.load(first + at, mask=there, other=0.0).to(tl.float32)
        plain += tl.sum(a, 0)
        mixed += tl.sum(a * x, 0)
        if crossed:
            b = tl.load(second + at, mask=there, other=0.0).to(tl.float32)
            cross += tl.sum(a * b, 0)
    to = (part * groups + group) * channels + c
    step = parts * groups * channels
    tl.store(found + to, plain, mask=held)
    tl.store(found + step + to, mixed, mask=held)
    if crossed:
        tl.store(found + 2 * step + to, cross, mask=held)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _places(  # type: ignore[no-untyped-def]
    entries,
    channels,
    positions: tl.constexpr,
    of_group,
    of_row,
    of_channel,
    of_position,
    block: tl.constexpr,
    tile: tl.constexpr,
):
    """Return the program's group and channels, and where its entries of the maps lie.

    `held` and `there` tell which channels and entries are within the maps.
    """
    e = tl.program_id(0) * block + tl.arange(0, block)
    group = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * tile + tl.arange(0, tile)
    held = c < channels
    there = (e < entries)[:, None] & held[None, :]
    at = group * of_group + (e // positions * of_row + e % positions * of_position)[:, None]
    at += c[None, :] * of_channel
    return group, c, held, there, at


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scale(  # type: ignore[no-untyped-def]
    values,
    factors,
    shifts,
    found,
    entries,
    channels,
    positions: tl.constexpr,
    of_group,
    of_row,
    of_channel,
    of_position,
    shifted: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
):
    group, c, held, there, at = _places(
        entries, channels, positions, of_group, of_row, of_channel, of_position, block, tile
    )
    factor = tl.load(factors + group * channels + c, mask=held, other=0.0).to(tl.float32)
    y = tl.load(values + at, mask=there, other=0.0).to(tl.float32) * factor[None, :]
    if shifted:
        shift = tl.load(shifts + group * channels + c, mask=held, other=0.0).to(tl.float32)
        y += shift[None, :]
    tl.store(found + at, y, mask=there)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _whole(sums, kind, group, c, held, groups, channels, parts: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the parts of a sum, for some channels of a group."""
    found = tl.load(sums + (kind * parts * groups + group) * channels + c, mask=held, other=0.0)
    for part in range(1, parts):
        found += tl.load(
            sums + ((kind * parts + part) * groups + group) * channels + c, mask=held, other=0.0
        )
    return found


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _forward(  # type: ignore[no-untyped-def]
    values,
    sums,
    weights,
    biases,
    kept,
    found,
    eps,
    groups,
    entries,
    channels,
    positions: tl.constexpr,
    parts: tl.constexpr,
    of_group,
    of_row,
    of_channel,
    of_position,
    weighted: tl.constexpr,
    biased: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
):
    group, c, held, there, at = _places(
        entries, channels, positions, of_group, of_row, of_channel, of_position, block, tile
    )
    base = group * of_group
    center = tl.load(values + base + c * of_channel, mask=held, other=0.0).to(tl.float32)
    away = _whole(sums, 0, group, c, held, groups, channels, parts) / entries
    square = _whole(sums, 1, group, c, held, groups, channels, parts) / entries
    mean = center + away
    r = tl.rsqrt(tl.maximum(square - away * away, 0.0) + eps)
    if tl.program_id(0) == 0:
        tl.store(kept + group * channels + c, mean, mask=held)
        tl.store(kept + (groups + group) * channels + c, r, mask=held)
    scale = r
    if weighted:
        scale *= tl.load(weights + group * channels + c, mask=held, other=0.0).to(tl.float32)
    x = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
    y = (x - mean[None, :]) * scale[None, :]
    if biased:
        shift = tl.load(biases + group * channels + c, mask=held, other=0.0).to(tl.float32)
        y += shift[None, :]
    tl.store(found + at, y, mask=there)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _backward(  # type: ignore[no-untyped-def]
    slope,
    values,
    sums,
    kept,
    weights,
    both,
    found,
    groups,
    entries,
    channels,
    positions: tl.constexpr,
    parts: tl.constexpr,
    of_group,
    of_row,
    of_channel,
    of_position,
    weighted: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
):
    group, c, held, there, at = _places(
        entries, channels, positions, of_group, of_row, of_channel, of_position, block, tile
    )
    mean = tl.load(kept + group * channels + c, mask=held, other=0.0)
    r = tl.load(kept + (groups + group) * channels + c, mask=held, other=0.0)
    plain = _whole(sums, 0, group, c, held, groups, channels, parts)
    mixed = _whole(sums, 1, group, c, held, groups, channels, parts) * r
    if tl.program_id(0) == 0:
        tl.store(both + group * channels + c, mixed, mask=held)
        tl.store(both + (groups + group) * channels + c, plain, mask=held)
    scale = r
    if weighted:
        scale *= tl.load(weights + group * channels + c, mask=held, other=0.0).to(tl.float32)
    g = tl.load(slope + at, mask=there, other=0.0).to(tl.float32)
    x = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
    z = (x - mean[None, :]) * r[None, :]
    y = scale[None, :] * (g - (plain / entries)[None, :] - z * (mixed / entries)[None, :])
    tl.store(found + at, y, mask=there)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _second(  # type: ignore[no-untyped-def]
    us,
    slope,
    values,
    sums,
    kept,
    weights,
    mixes,
    plains,
    to_mixes,
    to_plains,
    to_weight,
    to_slope,
    to_values,
    groups,
    entries,
    channels,
    positions: tl.constexpr,
    parts: tl.constexpr,
    of_group,
    of_row,
    of_channel,
    of_position,
    weighted: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
):
    group, c, held, there, at = _places(
        entries, channels, positions, of_group, of_row, of_channel, of_position, block, tile
    )
    number = group * channels + c
    mean = tl.load(kept + number, mask=held, other=0.0)
    r = tl.load(kept + groups * channels + number, mask=held, other=0.0)
    u_plain = _whole(sums, 0, group, c, held, groups, channels, parts)
    u_mixed = _whole(sums, 1, group, c, held, groups, channels, parts) * r
    together = _whole(sums, 2, group, c, held, groups, channels, parts)
    mixed = tl.load(mixes + number, mask=held, other=0.0)
    plain = tl.load(plains + number, mask=held, other=0.0)
    to_mixed = tl.load(to_mixes + number, mask=held, other=0.0)
    to_plain = tl.load(to_plains + number, mask=held, other=0.0)
    scale = r
    if weighted:
        scale *= tl.load(weights + number, mask=held, other=0.0).to(tl.float32)
    common = together - (u_plain * plain + u_mixed * mixed) / entries
    if tl.program_id(0) == 0:
        tl.store(to_weight + number, r * common, mask=held)
    of_u = -scale * mixed / entries
    of_g = to_mixed - scale * u_mixed / entries
    of_one = -(of_u * u_plain + of_g * plain) / entries
    of_z = -(of_u * u_mixed + of_g * mixed + scale * common) / entries
    u = tl.load(us + at, mask=there, other=0.0).to(tl.float32)
    g = tl.load(slope + at, mask=there, other=0.0).to(tl.float32)
    x = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
    z = (x - mean[None, :]) * r[None, :]
    at_slope = scale[None, :] * (
        u - (u_plain / entries)[None, :] - z * (u_mixed / entries)[None, :]
    )
    at_slope += to_plain[None, :] + to_mixed[None, :] * z
    at_values = of_u[None, :] * u + of_g[None, :] * g + of_z[None, :] * z + of_one[None, :]
    tl.store(to_slope + at, at_slope, mask=there)
    tl.store(to_values + at, r[None, :] * at_values, mask=there)
