"""The images of a split in memory, a class-balanced part of them, and their batches.

`Images` holds uint8 pixels; `Batches` gives float batches in [0, 1], shuffled and prepared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch

SPLITS = ("train", "test")
BATCHES_AHEAD = 64  # prepared in one call: enough to keep a GPU busy, few enough for its memory


@dataclass(frozen=True, eq=False)
class Images:
    """One split: uint8 images (N, C, H, W), usually mapped from the cache, and labels (N,).

    `classes` are their names. `mean` and `std` are those of the training split, for each channel,
    of values in [0, 1].
    """

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
        """Height and width in pixels: images are square after loading."""
        return self.images.shape[2]

    def __len__(self) -> int:
        return len(self.images)

    def select(self, indices: Tensor | Sequence[int]) -> "Images":
        """Return these images alone, in the order of the indices, as a copy in memory."""
        chosen = torch.as_tensor(indices)
        if not len(chosen):
            chosen = chosen.long()
        # Torch would read booleans as a mask, and its message about floats names no choice.
        if chosen.dtype not in (torch.int64, torch.int32):
            raise GradveilError(
                f"indices of type {chosen.dtype} cannot select images: "
                f"give whole numbers from 0 to {len(self) - 1}"
            )
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(outside):
            raise GradveilError(
                f"no image {int(outside[0])} in {self.name} {self.split}: "
                f"choose from 0 to {len(self) - 1}"
            )
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])


def balanced(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Sorted indices of a random part of every class: round(fraction * count), at least one.

    With the same seed a smaller fraction is a subset of a larger one.
    """
    kept = []
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator(seed, "fraction", label))
        kept.append(members[order[: max(1, round(fraction * len(members)))]])
    return torch.cat(kept).sort().values


@dataclass(frozen=True, eq=False)
class Batches:
    """Iterate once over uint8 images and labels, as float batches in [0, 1] on the same device.

    With a generator the order is shuffled and `prepare` (crop, flip, policy) changes the images;
    both draw from it, alike on every device. Without a generator the order is kept and `prepare`
    must be None.
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
                f"{len(self.images)} images and {len(self.labels)} labels: "
                "there must be as many, and at least one"
            )
        if self.prepare and not self.rng:
            raise GradveilError("random preparation of images needs a generator")

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.images)
        size = min(self.size, count)
        if self.rng is None:
            order = torch.arange(count)
        else:
            order = torch.randperm(count, generator=self.rng)
        for rows in order.to(self.images.device).split(size * BATCHES_AHEAD):
            images = self.images[rows]
            if self.prepare and self.rng:
                images = self.prepare(images, self.rng)
            labels = self.labels[rows]
            for some, theirs in zip(images.split(size), labels.split(size), strict=True):
                yield Batch(some.float().div_(255), theirs)
