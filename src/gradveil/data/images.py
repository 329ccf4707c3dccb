"""Decoded images of one split, and the class-balanced part of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch

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
        if chosen.dtype not in (
            torch.int64,
            torch.int32,
        ):  # torch would read booleans as a mask and refuse floats in other words
            raise GradveilError(
                f"indices of type {chosen.dtype} cannot select images: give whole numbers from 0 to {len(self) - 1}"
            )
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(outside):
            raise GradveilError(
                f"no image {int(outside[0])} in {self.name} {self.split}: choose from 0 to {len(self) - 1}"
            )
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


AHEAD = (
    64  # batches prepared in one go: large enough to keep a GPU busy, small enough for its memory
)


@dataclass(frozen=True, eq=False)
class Batches:
    """Iterates once over uint8 images and their labels, as float batches in [0, 1] on the device where the images lie.

    With a generator the order is shuffled and `prepare` (crop, flip, policy) changes the images; both are drawn from it, in
    the same way on every device. Without one the order is kept and `prepare` must be None.
    """

    images: Tensor
    labels: Tensor
    size: int
    rng: Generator | None = None
    prepare: Callable[[Tensor, Generator], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise GradveilError(f"batch size {self.size}: it must be at least 1")
        if len(self.images) != len(self.labels) or not len(self.images):
            raise GradveilError(
                f"{len(self.images)} images and {len(self.labels)} labels: there must be as many, and at least one"
            )
        if self.prepare and not self.rng:
            raise GradveilError("random preparation of images needs a generator")

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.images)
        size = min(self.size, count)
        order = (
            torch.arange(count) if self.rng is None else torch.randperm(count, generator=self.rng)
        )
        for rows in order.to(self.images.device).split(size * AHEAD):
            images = self.images[rows]
            if self.prepare and self.rng:
                images = self.prepare(images, self.rng)
            labels = self.labels[rows]
            for some, theirs in zip(images.split(size), labels.split(size), strict=True):
                yield Batch(some.float().div_(255), theirs)
