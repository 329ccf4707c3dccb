"""Batches of a split that lies on one device: shuffled, prepared and sliced there, many batches at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch

AHEAD = 64  # batches prepared in one go: large enough to keep a GPU busy, small enough for its memory


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
            raise GradveilError(f"{len(self.images)} images and {len(self.labels)} labels: there must be as many, and at least one")
        if self.prepare and not self.rng:
            raise GradveilError("random preparation of images needs a generator")

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.images)
        size = min(self.size, count)
        order = torch.arange(count) if self.rng is None else torch.randperm(count, generator=self.rng)
        for rows in order.to(self.images.device).split(size * AHEAD):
            images = self.images[rows]
            if self.prepare and self.rng:
                images = self.prepare(images, self.rng)
            labels = self.labels[rows]
            for some, theirs in zip(images.split(size), labels.split(size), strict=True):
                yield Batch(some.float().div_(255), theirs)
