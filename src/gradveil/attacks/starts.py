"""Images to start a search from, in the model's normalized space z, where pixel = z * std + mean.

A start is a value; `bind` draws it for the victims at hand. Rows are drawn one after the other, so
that a row does not depend on how many follow it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation
from gradveil.engine.gradients import Frame, pixel_frame

BatchShape = tuple[int, int, int, int]
"""(B, C, H, W): the images of one victim."""

AWAY = 0.25  # from a class mean: the deviation of a further restart's pixels, which are in [0, 1]


@dataclass(frozen=True)
class Start(ABC):
    """Images to start from."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the `Knowledge` fields without which it cannot run."""
        return ()

    @abstractmethod
    def bind(
        self, seen: Sequence[Observation], rng: Generator, restarts: int, labels: Tensor
    ) -> Tensor:
        """Return normalized images (victims x restarts, B, C, H, W) on the generator's device.

        `labels` are those of the rows: (rows, B), or (rows, B, classes) where they are optimized.
        """


@dataclass(frozen=True)
class DrawnStart(Start):
    """A start that draws every row in the same way."""

    def bind(
        self, seen: Sequence[Observation], rng: Generator, restarts: int, labels: Tensor
    ) -> Tensor:
        frame, shape = find_frame(seen[0], rng.device), _shape(seen[0])
        return torch.stack([self.row(shape, rng, frame) for _ in range(len(seen) * restarts)])

    @abstractmethod
    def row(self, shape: BatchShape, rng: Generator, frame: Frame) -> Tensor:
        """Draw one row, (B, C, H, W)."""


@dataclass(frozen=True)
class Normal(DrawnStart):
    """Independent N(0, 1) values: as much spread as the data has, pixel by pixel."""

    def row(self, shape: BatchShape, rng: Generator, frame: Frame) -> Tensor:
        return torch.randn(shape, generator=rng, device=rng.device, dtype=frame[0].dtype)


@dataclass(frozen=True)
class Patterned(DrawnStart):
    """A random tile for each image, repeated over it and cut off at its edges.

    The tile has `tile` x `tile` pixels, uniform in [0, 1]: geometric initialization (Wei et al.
    2020).
    """

    tile: int = 4

    def __post_init__(self) -> None:
        if self.tile < 1:
            raise GradveilError(
                f"tile {self.tile}: a patterned start needs a tile of at least 1 pixel"
            )

    def row(self, shape: BatchShape, rng: Generator, frame: Frame) -> Tensor:
        batch, channels, height, width = shape
        size = (batch, channels, self.tile, self.tile)
        tiles = torch.rand(size, generator=rng, device=rng.device, dtype=frame[0].dtype)
        down, across = math.ceil(height / self.tile), math.ceil(width / self.tile)
        return _normalize(tiles.repeat(1, 1, down, across)[..., :height, :width], frame)


@dataclass(frozen=True, eq=False)
class Given(Start):
    """Pixel images of the caller's choice.

    (C, H, W) are used for all images, (B, C, H, W) for every row, (rows, B, C, H, W) as they are.
    """

    images: Tensor = field(repr=False)

    def bind(
        self, seen: Sequence[Observation], rng: Generator, restarts: int, labels: Tensor
    ) -> Tensor:
        whole = (len(seen) * restarts, *_shape(seen[0]))
        if tuple(self.images.shape) not in (whole, whole[1:], whole[2:]):
            raise GradveilError(
                f"start images have shape {tuple(self.images.shape)}: expected {whole[2:]}, "
                f"{whole[1:]} or {whole}"
            )
        frame = find_frame(seen[0], rng.device)
        return _normalize(self.images.to(frame[0]).expand(whole), frame)


@dataclass(frozen=True)
class ClassMean(Start):
    """The mean image of the label's class in public data; further restarts add noise to it.

    Without it they would all be one search.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        return ("means",)

    def bind(
        self, seen: Sequence[Observation], rng: Generator, restarts: int, labels: Tensor
    ) -> Tensor:
        expected = (seen[0].classes, *seen[0].image_shape)
        if labels.dim() != 2:
            raise GradveilError(
                "a start from class means needs labels: they cannot be optimized along"
            )
        starts = []
        for victim, rows in zip(seen, labels.cpu().chunk(len(seen)), strict=True):
            means = victim.knowledge.means
            assert means is not None
            if tuple(means.shape) != expected:
                raise GradveilError(
                    f"class means of shape {tuple(means.shape)}: expected {expected}"
                )
            chosen = means.cpu()[rows]
            for restart in chosen[1:]:
                drawn = torch.randn(restart.shape, generator=rng, device=rng.device)
                restart += AWAY * drawn.to(restart)
            starts.append(chosen)
        return Given(torch.cat(starts)).bind(seen, rng, restarts, labels)


def find_frame(victim: Observation, device: torch.device) -> Frame:
    """Return mean and std of the model's normalization, in the type of the shared gradients."""
    dtype = next(iter(victim.gradients.values())).dtype
    mean, std = pixel_frame(victim.model, victim.image_shape)
    return mean.to(device, dtype), std.to(device, dtype)


def _shape(victim: Observation) -> BatchShape:
    return (victim.size, *victim.image_shape)


def _normalize(pixels: Tensor, frame: Frame) -> Tensor:
    mean, std = frame
    return (pixels - mean) / std
