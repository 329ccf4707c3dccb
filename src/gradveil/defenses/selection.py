"""The largest entries of many tensors at once, by counting bits in place of sorting.

Float32 magnitudes have the order of their bits read as integers. A histogram of the first bits
tells in which bin a rank lies; histograms of the next bits, among the entries of that bin, tell the
rest. Each round serves all tensors, and none asks the device for a value.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

ROUNDS = ((20, 11), (10, 10), (0, 10))  # bits below those counted, and how many are counted


def count_dropped(size: int, share: float) -> int:
    """Return how many of `size` entries the share is, rounded down; at least one entry stays."""
    return min(math.floor(round(share * size, 6)), size - 1)


def keep_largest(values: Sequence[Tensor], share: float) -> list[Tensor]:
    """Return masks without the `share` smallest magnitudes of each tensor, rounded down.

    Of equal magnitudes the first go. At least one entry of a tensor stays. All are float32 on one
    device; a NaN counts as larger than any number.
    """
    sizes = tuple(value.numel() for value in values)
    owner, starts, rank = _ranks(sizes, share, values[0].device)
    bits = torch.cat([value.detach().flatten() for value in values]).abs().view(torch.int32)
    prefix = torch.zeros_like(rank)
    alive = torch.ones_like(bits)
    for shift, wide in ROUNDS:
        parts = bits >> shift
        if shift + wide < 31:  # else all entries take part
            alive = ((parts >> wide) == prefix[owner]).to(torch.int32)
        bins = 1 << wide
        index = (parts & (bins - 1)) + owner * bins
        counts = torch.zeros(len(sizes) * bins, dtype=torch.int32, device=bits.device)
        counts = counts.scatter_add_(0, index, alive).view(-1, bins)
        reached = counts.cumsum(1)
        chosen = (reached < rank[:, None]).sum(1, keepdim=True)
        rank = rank - (reached - counts).gather(1, chosen)[:, 0]
        prefix = prefix * bins + chosen[:, 0]
    # `prefix` is now the threshold, and `rank` how many of the entries equal to it go.
    limit = prefix[owner]
    equal = bits == limit
    order = equal.cumsum(0)
    before = (order - equal.to(order.dtype))[starts]
    mask = (bits > limit) | (equal & (order > (before + rank)[owner]))
    return [part.view_as(value) for part, value in zip(mask.split(sizes), values, strict=True)]


@lru_cache(maxsize=2)
def _ranks(
    sizes: tuple[int, ...], share: float, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensor of each entry, the first entry of each tensor, and how many of it go.

    Kept, because copying them to a device waits for it.
    """
    counts = torch.tensor(sizes)
    owner = torch.repeat_interleave(counts)
    rank = torch.tensor([count_dropped(size, share) for size in sizes])
    first = counts.cumsum(0) - counts
    return owner.to(device), first.to(device), rank.to(device)
