"""Decoded images of one split, and the class-balanced part of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator

SPLITS = ("train", "test")


@dataclass(frozen=True, eq=False)
class Images:
    """One split as uint8 NCHW, usually mapped from the cache; `mean` and `std` are those of the training split in [0, 1]."""

    name: str
    split: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        return self.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width: images are square after loading."""
        return self.images.shape[2]

    def __len__(self) -> int:
        return len(self.images)

    def select(self, indices: Tensor | Sequence[int]) -> "Images":
        """These images alone, in the order of the indices, as a copy in memory."""
        chosen = torch.as_tensor(indices)
        if not len(chosen):
            chosen = chosen.long()
        if chosen.dtype not in (torch.int64, torch.int32):  # torch would read booleans as a mask and refuse floats in other words
            raise GradveilError(f"indices of type {chosen.dtype} cannot select images: give whole numbers from 0 to {len(self) - 1}")
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(outside):
            raise GradveilError(f"no image {int(outside[0])} in {self.name} {self.split}: choose from 0 to {len(self) - 1}")
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])


def balanced(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Indices, in order, of a random part of every class: round(fraction * count) of it, at least one.

    With one seed a smaller fraction is a subset of a larger one.
    """
    kept = []
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator(seed, "fraction", label))
        kept.append(members[order[: max(1, round(fraction * len(members)))]])
    return torch.cat(kept).sort().values
