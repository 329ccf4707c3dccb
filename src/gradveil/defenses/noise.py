"""Noise on the shared gradients."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError
from gradveil.core.types import Gradients, Knowledge
from gradveil.defenses.base import Defense, Moment, Seam, State

BREAKERS = ("likelihood", "averaged")
"""The attacks known to undo noise whose kind and scale are told."""


@dataclass(frozen=True)
class Noise(Defense, ABC):
    """Share g + scale n for each entry, n standard."""

    first: ClassVar[str | None] = "scale"
    acts_on: ClassVar[Seam] = "gradients"
    noisy: ClassVar[bool] = True
    breakers: ClassVar[tuple[str, ...]] = BREAKERS
    strongest: ClassVar[tuple[str, ...]] = ("likelihood",)

    scale: float

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.scale < float("inf"):
            raise GradveilError(
                f"defense {self.name}: scale {self.scale:g}; it must be 0 or more, and finite"
            )

    @classmethod
    def mild(cls) -> Defense | None:
        return cls(1e-6)

    @property
    def random(self) -> bool:
        return self.scale > 0

    @abstractmethod
    def draw(self, like: Tensor, rng: Generator) -> Tensor:
        """Return standard noise of this shape, type and device."""

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        return {
            name: value + self.scale * self.draw(value, rng) for name, value in gradients.items()
        }, state

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        return tell_noise(knowledge, self.name, self.scale)


@dataclass(frozen=True)
class GaussianNoise(Noise):
    """Noise with n ~ N(0, 1)."""

    name: ClassVar[str] = "gaussian"
    line: ClassVar[str] = "normal noise of this standard deviation is added to the gradient"
    paper: ClassVar[str] = "Zhu et al. 2019, Deep Leakage from Gradients"
    example: ClassVar[str] = "gaussian:1e-2"
    use: ClassVar[str] = "no guarantee is needed; try several scales"
    cost: ClassVar[str] = "accuracy, more with each larger scale"
    assessed: ClassVar[str | None] = "gaussian:1e-2"

    def draw(self, like: Tensor, rng: Generator) -> Tensor:
        return gaussian(like, rng)


@dataclass(frozen=True)
class LaplacianNoise(Noise):
    """Noise whose n has density exp(-|n|) / 2: standard deviation sqrt(2)."""

    name: ClassVar[str] = "laplacian"
    line: ClassVar[str] = "Laplace noise of this scale is added to the gradient"
    paper: ClassVar[str] = "Zhu et al. 2019, Deep Leakage from Gradients"
    example: ClassVar[str] = "laplacian:1e-2"
    use: ClassVar[str] = "no guarantee is needed; try several scales"
    cost: ClassVar[str] = "accuracy, more with each larger scale"

    def draw(self, like: Tensor, rng: Generator) -> Tensor:
        """Return the difference of two exponential variables."""
        both = torch.empty(2, *like.shape, device=rng.device).exponential_(generator=rng)
        return (both[0] - both[1]).to(like)


def gaussian(like: Tensor, rng: Generator) -> Tensor:
    """Draw standard normal numbers of this shape, type and device."""
    return torch.randn(like.shape, generator=rng, device=rng.device).to(like)


def tell_noise(knowledge: Knowledge, kind: str, scale: float) -> Knowledge:
    """Add the noise to what is known; it covers zeros that were cut before.

    Two Gaussian noises are a single one, of scale sqrt(a^2 + b^2); of others only the larger is
    told.
    """
    if not scale:
        return knowledge
    if knowledge.noise is not None and knowledge.noise[0] == kind == "gaussian":
        scale = math.hypot(scale, knowledge.noise[1])
    elif knowledge.noise is not None and knowledge.noise[1] > scale:
        kind, scale = knowledge.noise
    return replace(knowledge, noise=(kind, scale), pruned=None)
