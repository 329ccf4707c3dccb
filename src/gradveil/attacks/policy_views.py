"""What the gradient is taken of: the images looked for, or what the client's policy makes of them.

An attacker who knows the policy looks for the images before it, and matches the gradient of the transformed ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import drawn_seed
from gradveil.core.types import Observation

Transform = Callable[[Tensor], Tensor]
"""Pixel images (B, C, H, W) of one victim to others."""

Views = Callable[[Tensor], list[Tensor]]
"""Pixel images (rows, B, C, H, W) to one or more versions of them; the mean of their distances counts."""


@runtime_checkable
class Joinable(Protocol):
    """A transform that can take other victims' images along in one call."""

    def beside(self, others: Sequence[Transform]) -> Transform: ...


@runtime_checkable
class Drawable(Protocol):
    """A policy that can draw once and keep what it drew."""

    def draw(self, images: Tensor, rng: Generator) -> Transform: ...


@dataclass(frozen=True)
class Through(ABC):
    """A value; `bind` gives the function for the victims at hand, each with so many rows."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of `Knowledge` fields."""
        return ()

    @property
    def aims_at(self) -> Literal["used", "original"]:
        return "original"

    @abstractmethod
    def bind(self, seen: Sequence[Observation], restarts: int, rng: Generator) -> Views:
        """For rows in the order of the victims."""


@dataclass(frozen=True)
class Itself(Through):
    """The images as the client used them."""

    @property
    def aims_at(self) -> Literal["used", "original"]:
        return "used"

    def bind(self, seen: Sequence[Observation], restarts: int, rng: Generator) -> Views:
        return lambda pixels: [pixels]


@dataclass(frozen=True)
class KnownTransform(Through):
    """The policy with the client's own draws."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("transform",)

    def bind(self, seen: Sequence[Observation], restarts: int, rng: Generator) -> Views:
        return _one_view(
            [
                one.knowledge.transform
                for one in seen
                for _ in range(restarts)
                if one.knowledge.transform
            ]
        )


@dataclass(frozen=True)
class GuessedTransform(Through):
    """The policy is known, its draws are not: each restart draws once and keeps it, and the gradient tells which was best."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("policy",)

    def bind(self, seen: Sequence[Observation], restarts: int, rng: Generator) -> Views:
        return _one_view([_drawn(one, rng) for one in seen for _ in range(restarts)])


@dataclass(frozen=True)
class ExpectedTransform(Through):
    """The policy is known, its draws are not: the mean over `draws` new ones at each step."""

    draws: int = 4

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise GradveilError(f"draws {self.draws}: an expectation needs at least 1")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("policy",)

    def bind(self, seen: Sequence[Observation], restarts: int, rng: Generator) -> Views:
        policies = [
            one.knowledge.policy for one in seen if one.knowledge.policy for _ in range(restarts)
        ]
        one_call = all(policy == policies[0] for policy in policies)

        def view(pixels: Tensor) -> Tensor:
            if one_call:
                return policies[0](pixels.flatten(0, 1), rng).view_as(pixels)
            return torch.stack(
                [policy(row, rng) for policy, row in zip(policies, pixels, strict=True)]
            )

        return lambda pixels: [view(pixels) for _ in range(self.draws)]


def _drawn(one: Observation, rng: Generator) -> Transform:
    policy = one.knowledge.policy
    assert policy is not None
    if isinstance(policy, Drawable):
        return policy.draw(torch.zeros(one.size, *one.image_shape), rng)
    seed = drawn_seed(rng)
    return lambda images: policy(images, Generator().manual_seed(seed))


def _one_view(transforms: Sequence[Transform]) -> Views:
    run = _joined(transforms) or partial(_each, transforms)
    return lambda pixels: [run(pixels)]


def _each(transforms: Sequence[Transform], pixels: Tensor) -> Tensor:
    return torch.stack([transform(row) for transform, row in zip(transforms, pixels, strict=True)])


def _joined(transforms: Sequence[Transform]) -> Transform | None:
    """All rows in one call, where the transforms are of one kind; those of different policies refuse."""
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
