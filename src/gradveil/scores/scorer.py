"""Scores of policies: values on a block of images at a time, and how the images are prepared."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.transforms import Policy
from gradveil.transforms.preparation import crop_and_flip

FIRST_BLOCKS = (10, 10, 20)  # images
LATER_BLOCK = 30  # images
CROP_PADDING = 4  # pixels


@dataclass(frozen=True)
class Estimate:
    """The mean of `values`, one for each image or batch, and its standard error."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise GradveilError("an estimate needs at least one value")

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / self.n

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None for a single value."""
        if self.n < 2:
            return None
        squares = math.fsum((value - self.mean) ** 2 for value in self.values)
        return math.sqrt(squares / (self.n - 1) / self.n)


class Scorer(ABC):
    """A score with its model and images, of policies or of attacks.

    It can be pickled, and so travel to another machine.

    Every value is a function of the seed, the policy and the block that its image is in: neither
    the other policies of a call, nor the order of calls, nor the device's memory change it beyond
    rounding. So work can be split in any way.
    """

    names: ClassVar[tuple[str, ...]]
    """The quantities it measures; a search ranks by the first."""

    unit: int = 1
    """Policies that are best scored together, in one call."""

    @property
    @abstractmethod
    def blocks(self) -> tuple[int, ...]:
        """The number of values of each block. All blocks together are the whole score."""

    @abstractmethod
    def score(self, policies: Sequence[Any], block: int) -> Mapping[str, Tensor]:
        """Return, by name, (policies, values of the block) in float64 on the CPU."""

    def estimates(self, policies: Sequence[Any]) -> list[dict[str, Estimate]]:
        """Return the whole score of each policy, by name."""
        parts = [self.score(policies, block) for block in range(len(self.blocks))]
        whole = {
            name: torch.cat([part[name] for part in parts], dim=1).tolist() for name in self.names
        }
        return [
            {name: Estimate(tuple(values[row])) for name, values in whole.items()}
            for row in range(len(policies))
        ]


def image_blocks(images: int, first: Sequence[int] = FIRST_BLOCKS) -> tuple[int, ...]:
    """Return the sizes of the blocks after which a race looks at its policies, small ones first.

    A rest of less than half a block joins the last.
    """
    sizes: list[int] = []
    while left := images - sum(sizes):
        size = first[len(sizes)] if len(sizes) < len(first) else LATER_BLOCK
        sizes.append(size if left >= size + size // 2 or left == size else left)
    return tuple(sizes)


def prepared(
    images: Tensor,
    policies: Sequence[Policy],
    seed: int,
    block: int,
    augment: bool,
    *,
    alike: int = 1,
) -> Tensor:
    """Crop and flip the images, then apply each policy: (policies, images, C, H, W).

    The crop and flip are the same for every policy, so that nothing else differs. Every `alike`
    images in a row share their draws, which are those of as many fewer images.
    """
    base = images
    if augment:
        rng = generator(seed, "crop", block)
        base = crop_and_flip(images, CROP_PADDING, True, rng, alike=alike)
    return torch.stack(
        [
            policy(base, generator(seed, "policy", str(policy), block), alike=alike)
            for policy in policies
        ]
    )


def check_images(images: Tensor, labels: Tensor) -> None:
    """Refuse all but uint8 images (N, C, H, W) with class indices (N,)."""
    if images.dtype != torch.uint8 or images.dim() != 4 or not len(images):
        raise GradveilError(
            f"images of type {images.dtype} and shape {tuple(images.shape)}: "
            "expected uint8 NCHW, at least one"
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise GradveilError(
            f"labels of type {labels.dtype} and shape {tuple(labels.shape)}: "
            f"expected a class index for each of {len(images)} images"
        )
