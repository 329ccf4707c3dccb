"""Policy views: whether a search looks for the images before or after the client's policy.

An attacker who knows the policy looks for the images before it: at each step it applies the policy
to them, and matches the gradient of the result.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import drawn_seed
from gradveil.core.types import Observation

Transform = Callable[[Tensor], Tensor]
"""From pixel images (B, C, H, W) of one victim to others."""


class Views(ABC):
    """Versions of pixel images (rows, B, C, H, W); the mean of their distances counts."""

    @abstractmethod
    def __call__(self, pixels: Tensor) -> list[Tensor]:
        """Return the versions, each in the shape of the images."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> "Views":
        """Return the views of these rows alone."""


class Unchanged(Views):
    """The images as they are."""

    def __call__(self, pixels: Tensor) -> list[Tensor]:
        return [pixels]

    def select(self, rows: Sequence[int]) -> Views:
        return self


@dataclass(frozen=True, eq=False)
class Fixed(Views):
    """One version: each row after its own transform."""

    transforms: Sequence[Transform]

    def __call__(self, pixels: Tensor) -> list[Tensor]:
        return [self._transform_rows(pixels)]

    def select(self, rows: Sequence[int]) -> Views:
        return Fixed([self.transforms[row] for row in rows])

    @cached_property
    def _transform_rows(self) -> Transform:
        return _join(self.transforms) or partial(_transform_each, self.transforms)


@dataclass(frozen=True, eq=False)
class Redrawn(Views):
    """`draws` versions, each row after its policy with new random numbers."""

    policies: Sequence[Callable[[Tensor, Generator], Tensor]]
    rng: Generator
    draws: int

    def __call__(self, pixels: Tensor) -> list[Tensor]:
        return [self._draw(pixels) for _ in range(self.draws)]

    def select(self, rows: Sequence[int]) -> Views:
        return Redrawn([self.policies[row] for row in rows], self.rng, self.draws)

    def _draw(self, pixels: Tensor) -> Tensor:
        first = self.policies[0]
        if all(policy == first for policy in self.policies):
            return first(pixels.flatten(0, 1), self.rng).view_as(pixels)
        return torch.stack(
            [policy(row, self.rng) for policy, row in zip(self.policies, pixels, strict=True)]
        )


@runtime_checkable
class Joinable(Protocol):
    """A transform that can transform the images of other victims in the same call."""

    def beside(self, others: Sequence[Transform]) -> Transform: ...


@runtime_checkable
class Drawable(Protocol):
    """A policy that can draw its random numbers once, and keep them."""

    def draw(self, images: Tensor, rng: Generator) -> Transform: ...


@dataclass(frozen=True)
class PolicyView(ABC):
    """A way to look through the policy; `bind` returns the function for the victims at hand."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the `Knowledge` fields without which it cannot run."""
        return ()

    @property
    def aims_at(self) -> Literal["used", "original"]:
        """Whether the search finds the images that the client used, or those before its policy."""
        return "original"

    @abstractmethod
    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Views:
        """Return the views of images (victims x restarts, B, C, H, W)."""


@dataclass(frozen=True)
class Itself(PolicyView):
    """Look for the images as the client used them."""

    @property
    def aims_at(self) -> Literal["used", "original"]:
        return "used"

    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Views:
        return Unchanged()


@dataclass(frozen=True)
class KnownTransform(PolicyView):
    """Apply the policy with the random numbers that the client drew."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("transform",)

    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Views:
        known = [victim.knowledge.transform for victim in seen for _ in range(restarts)]
        return Fixed([transform for transform in known if transform is not None])


@dataclass(frozen=True)
class GuessedTransform(PolicyView):
    """Draw the policy's random numbers once for each restart; the gradient tells the best guess."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("policy",)

    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Views:
        return Fixed([_draw(victim, rng) for victim in seen for _ in range(restarts)])


@dataclass(frozen=True)
class ExpectedTransform(PolicyView):
    """Take the mean distance over `draws` new random numbers of the policy at each step."""

    draws: int = 4

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise GradveilError(f"draws {self.draws}: an expectation needs at least 1")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("policy",)

    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Views:
        known = [victim.knowledge.policy for victim in seen for _ in range(restarts)]
        return Redrawn([policy for policy in known if policy is not None], rng, self.draws)


def _draw(victim: Observation, rng: Generator) -> Transform:
    policy = victim.knowledge.policy
    assert policy is not None
    if isinstance(policy, Drawable):
        return policy.draw(torch.zeros(victim.size, *victim.image_shape), rng)
    seed = drawn_seed(rng)
    return lambda images: policy(images, Generator().manual_seed(seed))


def _transform_each(transforms: Sequence[Transform], pixels: Tensor) -> Tensor:
    return torch.stack([transform(row) for transform, row in zip(transforms, pixels, strict=True)])


def _join(transforms: Sequence[Transform]) -> Transform | None:
    """Return one call for all rows where the transforms allow it; different policies do not."""
    first = transforms[0]
    if not isinstance(first, Joinable) or any(
        type(other) is not type(first) for other in transforms
    ):
        return None
    try:
        together = first.beside(transforms[1:])
    except GradveilError:
        return None
    return lambda pixels: together(pixels.flatten(0, 1)).view_as(pixels)
