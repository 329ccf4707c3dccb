"""Sharing the largest entries of a gradient: the rest is dropped, or fed back in later rounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError
from gradveil.core.types import Gradients, Knowledge
from gradveil.defenses.base import Defense, Moment, Seam, State

ROUNDS = ((20, 11), (10, 10), (0, 10))  # bits below those counted, and how many are counted


@dataclass(frozen=True)
class Pruning(Defense):
    """Set the `share` of entries with the smallest magnitudes to zero, in each tensor.

    At least one entry stays.
    """

    name: ClassVar[str] = "prune"
    line: ClassVar[str] = "in each tensor the share of smallest entries is set to zero"
    paper: ClassVar[str] = "Zhu et al. 2019, Deep Leakage from Gradients"
    example: ClassVar[str] = "prune:0.95"
    use: ClassVar[str] = "updates shall be small too; prune 99% or more"
    cost: ClassVar[str] = "little accuracy up to 99%"
    assessed: ClassVar[str | None] = "prune:0.99"
    first: ClassVar[str | None] = "share"
    acts_on: ClassVar[Seam] = "gradients"
    prunes: ClassVar[bool] = True
    breakers: ClassVar[tuple[str, ...]] = ("masked",)
    strongest: ClassVar[tuple[str, ...]] = ("masked",)

    share: float

    def __post_init__(self) -> None:
        check_fields(self)
        check_share(self.share, self.name)

    @classmethod
    def mild(cls) -> Defense | None:
        return cls(0.5)

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        masks = kept_each(gradients, self.share)
        return {name: value * masks[name] for name, value in gradients.items()}, state

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        return replace(knowledge, pruned=True)


@dataclass(frozen=True, eq=False)
class Residuals:
    """Hold u, the momentum-corrected gradients, and v, what of their sum was not shared yet."""

    momentum: Gradients
    unsent: Gradients


@dataclass(frozen=True)
class FeedbackPruning(Pruning):
    """Let u = m u + g, v = v + u, and share the largest entries of v, which leave v and u.

    Taking them out of u too is the paper's momentum factor masking: what was sent pulls no further.
    """

    name: ClassVar[str] = "prune-feedback"
    line: ClassVar[str] = (
        "the largest entries are shared, the rest adds up, with momentum, until it is shared in a "
        "later round"
    )
    paper: ClassVar[str] = "Lin et al. 2018, Deep Gradient Compression"
    example: ClassVar[str] = "prune-feedback:0.99"
    use: ClassVar[str] = "updates shall be small too, and pruning costs accuracy"
    cost: ClassVar[str] = "memory for what is not shared yet"
    breakers: ClassVar[tuple[str, ...]] = ("masked", "masked-rounds")
    strongest: ClassVar[tuple[str, ...]] = ("masked-rounds", "masked")

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise GradveilError(
                f"defense {self.name}: momentum {self.momentum:g}; it must be from 0 to below 1"
            )

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        before = state if isinstance(state, Residuals) else None
        momentum = {
            k: g + self.momentum * before.momentum[k] if before else g for k, g in gradients.items()
        }
        waiting = {k: u + before.unsent[k] if before else u for k, u in momentum.items()}
        sent = kept_each(waiting, self.share)
        after = Residuals(
            {k: u * ~sent[k] for k, u in momentum.items()},
            {k: v * ~sent[k] for k, v in waiting.items()},
        )
        return {k: v * sent[k] for k, v in waiting.items()}, after

    def pack_state(self, state: State) -> object:
        if not isinstance(state, Residuals):
            return None
        return {"momentum": dict(state.momentum), "unsent": dict(state.unsent)}

    def unpack_state(self, packed: Any, device: torch.device) -> State:
        moved: Any = super().unpack_state(packed, device)
        return None if moved is None else Residuals(**moved)

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        return replace(super().tell(knowledge, model), momentum=self.momentum)


def kept_each(gradients: Gradients, share: float) -> Gradients:
    """Return the mask of `kept` for each tensor; on a GPU all are made at once."""
    values = list(gradients.values())
    if values and all(v.is_cuda and v.dtype == torch.float32 for v in values):
        return dict(zip(gradients, keep_largest(values, share), strict=True))
    return {name: kept(value, share) for name, value in gradients.items()}


def kept(values: Tensor, share: float) -> Tensor:
    """Return a mask without exactly the `share` smallest magnitudes, rounded down.

    Of equal magnitudes the first go. At least one entry stays. By selection: `torch.quantile`
    refuses more than 16 million entries. A GPU sorts sooner than it selects, and it need not wait
    here: no step asks for a value.
    """
    dropped = count_dropped(values.numel(), share)
    magnitudes = values.abs().flatten()
    if dropped < 1:
        return torch.ones_like(values, dtype=torch.bool)
    threshold = (
        magnitudes.sort().values[dropped - 1]
        if magnitudes.is_cuda
        else magnitudes.kthvalue(dropped).values
    )
    equal, above = magnitudes == threshold, magnitudes > threshold
    first = dropped - (magnitudes.numel() - equal.sum() - above.sum())
    return (above | (equal & (equal.cumsum(0, dtype=torch.int32) > first))).view_as(values)


def count_dropped(size: int, share: float) -> int:
    """Return how many of `size` entries the share is, rounded down; at least one entry stays."""
    return min(math.floor(round(share * size, 6)), size - 1)


def keep_largest(values: Sequence[Tensor], share: float) -> list[Tensor]:
    """Return the masks of `kept` for tensors of float32 on one device, by counting bits.

    The bits of magnitudes, read as integers, have their order. A histogram of the first bits tells
    in which bin a rank lies; histograms of the next bits, among the entries of that bin, tell the
    rest. Each round serves all tensors, and none asks the device for a value. A NaN counts as
    larger than any number.
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


def check_share(share: float, name: str) -> None:
    """Refuse a share of entries that is not in [0, 1)."""
    if not 0 <= share < 1:
        raise GradveilError(
            f"defense {name}: share {share:g}; it must be from 0 (nothing is cut) to below 1"
        )
