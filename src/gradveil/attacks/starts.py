"""Where a search starts: images in the model's normalized space z, where pixel = z * std + mean.

A start is a value. Rows are drawn one after the other, so a row does not depend on how many follow it. Everything is drawn on the
generator's device and stays there.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation
from gradveil.engine.gradients import Frame

Shape = tuple[int, int, int, int]
"""(B, C, H, W): the batch of one victim."""


@dataclass(frozen=True)
class Initial(ABC):
    """Called with the number of rows, the shape of each, a generator and the frame; gives (rows, B, C, H, W)."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of `Knowledge` fields."""
        return ()

    def knowing(self, seen: Sequence[Observation], labels: Tensor) -> "Initial":
        """The start for these victims, with the labels (rows, B) or (rows, B, classes) of the rows."""
        return self

    @abstractmethod
    def __call__(self, rows: int, shape: Shape, rng: Generator, frame: Frame) -> Tensor:
        """The start itself."""


@dataclass(frozen=True)
class DrawnStart(Initial):
    """A start whose rows are alike, each drawn anew."""

    def __call__(self, rows: int, shape: Shape, rng: Generator, frame: Frame) -> Tensor:
        mean, std = (part.to(rng.device) for part in frame)
        return torch.stack([self.row(shape, rng, (mean, std)) for _ in range(rows)])

    @abstractmethod
    def row(self, shape: Shape, rng: Generator, frame: Frame) -> Tensor:
        """One row, (B, C, H, W)."""


@dataclass(frozen=True)
class Normal(DrawnStart):
    """Independent N(0, 1): as much spread as the data has, pixel by pixel."""

    def row(self, shape: Shape, rng: Generator, frame: Frame) -> Tensor:
        return torch.randn(shape, generator=rng, device=rng.device, dtype=frame[0].dtype)


@dataclass(frozen=True)
class Uniform(DrawnStart):
    """Pixels uniform in [0, 1]."""

    def row(self, shape: Shape, rng: Generator, frame: Frame) -> Tensor:
        return _normalized(_pixels(shape, rng, frame), frame)


@dataclass(frozen=True)
class Zeros(DrawnStart):
    """z = 0: the mean color."""

    def row(self, shape: Shape, rng: Generator, frame: Frame) -> Tensor:
        return torch.zeros(shape, device=rng.device, dtype=frame[0].dtype)


@dataclass(frozen=True)
class Patterned(DrawnStart):
    """A random tile for each image, `tile` x `tile` pixels uniform in [0, 1], repeated over it and cut off at its edges.

    Geometric initialization (Wei et al. 2020).
    """

    tile: int = 4

    def __post_init__(self) -> None:
        if self.tile < 1:
            raise GradveilError(
                f"tile {self.tile}: a patterned start needs a tile of at least 1 pixel"
            )

    def row(self, shape: Shape, rng: Generator, frame: Frame) -> Tensor:
        batch, channels, height, width = shape
        tiles = _pixels((batch, channels, self.tile, self.tile), rng, frame)
        down, across = math.ceil(height / self.tile), math.ceil(width / self.tile)
        return _normalized(tiles.repeat(1, 1, down, across)[..., :height, :width], frame)


@dataclass(frozen=True, eq=False)
class Given(Initial):
    """Pixel images of the caller's choice: (C, H, W) for all, (B, C, H, W) for every row, or (rows, B, C, H, W)."""

    images: Tensor = field(repr=False)

    def __call__(self, rows: int, shape: Shape, rng: Generator, frame: Frame) -> Tensor:
        whole = (rows, *shape)
        if tuple(self.images.shape) not in (whole, whole[1:], whole[2:]):
            raise GradveilError(
                f"start images have shape {tuple(self.images.shape)}: expected {whole[2:]}, {whole[1:]} or {whole}"
            )
        mean, std = (part.to(rng.device) for part in frame)
        return _normalized(self.images.to(mean).expand(whole), (mean, std))


@dataclass(frozen=True)
class ClassMean(Initial):
    """The mean image of the label's class in public data."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("means",)

    def knowing(self, seen: Sequence[Observation], labels: Tensor) -> Initial:
        expected = (seen[0].classes, *seen[0].image_shape)
        if labels.dim() != 2:
            raise GradveilError(
                "a start from class means needs labels: they cannot be optimized along"
            )
        starts = []
        for one, own in zip(seen, labels.cpu().chunk(len(seen)), strict=True):
            means = one.knowledge.means
            assert means is not None
            if tuple(means.shape) != expected:
                raise GradveilError(
                    f"class means of shape {tuple(means.shape)}: expected {expected}"
                )
            starts.append(means.cpu()[own])
        return Given(torch.cat(starts))

    def __call__(self, rows: int, shape: Shape, rng: Generator, frame: Frame) -> Tensor:
        raise GradveilError("class means depend on the victims: call knowing(seen, labels) first")


def _pixels(shape: Shape, rng: Generator, frame: Frame) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device, dtype=frame[0].dtype)


def _normalized(pixels: Tensor, frame: Frame) -> Tensor:
    mean, std = frame
    return (pixels - mean) / std
