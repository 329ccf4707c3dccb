"""Defenses on the data: policies that replace the images before gradients are computed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Knowledge
from gradveil.defenses.base import Defense, Seam, is_built_in
from gradveil.transforms import LIBRARY, Policy, Preparation, Transform
from gradveil.transforms.differentiable import Anew, Drawn, draw
from gradveil.transforms.policy import POLICY_LENGTH
from gradveil.transforms.published import GAO

MOST_POLICIES = 10_000  # of a random defense: each is drawn and kept


@dataclass(frozen=True)
class Transforming(Defense, ABC):
    """Prepare the images by crop and flip and by a policy: they pass through uint8, as pictures."""

    acts_on: ClassVar[Seam] = "batch"
    breakers: ClassVar[tuple[str, ...]] = (
        "early-step",
        "transform-known",
        "transform-drawn",
        "transform-guessed",
        "class-mean",
    )
    strongest: ClassVar[tuple[str, ...]] = ("transform-known",)
    instead: ClassVar[tuple[str | None, ...]] = (None,)  # for the images as they were used

    @classmethod
    def mild(cls) -> Defense | None:
        """Return a rotation by 7 degrees to the left or the right, without crop and flip."""
        return PolicyDefense(Policy.parse("2"), augment=False)

    @property
    def random(self) -> bool:
        members = self.preparation.policy.members
        return self.augments or len(members) > 1 or any(step.signed for step in members[0])

    @property
    def augments(self) -> bool:
        """Whether images are cropped and flipped first."""
        return self.preparation.flip

    @property
    def control(self) -> Defense | None:
        return PolicyDefense(Policy()) if self.augments else None

    @property
    @abstractmethod
    def preparation(self) -> Preparation:
        """The preparation of each image."""

    def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
        prepared = self.preparation((batch.images * 255).round().to(torch.uint8), rng)
        return replace(batch, images=prepared.to(batch.images.dtype) / 255)

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        return replace(knowledge, policy=Anew(self.preparation))

    def reveal(self, images: Tensor, rng: Generator) -> Drawn:
        return draw(self.preparation, images, rng)

    def conflict(self, earlier: Defense) -> str | None:
        if isinstance(earlier, Transforming) and earlier.augments and self.augments:
            return (
                f"{earlier} and {self} would crop and flip twice; join policies by + or -, or set "
                "augment=no on one"
            )
        return super().conflict(earlier)


@dataclass(frozen=True)
class PolicyDefense(Transforming):
    """Transform all images by a policy, or each image by one of a hybrid's, drawn at random."""

    name: ClassVar[str] = "policy"
    line: ClassVar[str] = (
        "images are transformed by a policy, a hybrid (A+B), or those of a search (PATH.toml)"
    )
    paper: ClassVar[str] = GAO
    example: ClassVar[str] = "3-1-7+43-18-18"
    use: ClassVar[str] = "accuracy counts, and a search was made on such images"
    cost: ClassVar[str] = "a few points of accuracy; training takes as long"
    assessed: ClassVar[str | None] = "3-1-7+43-18-18"
    first: ClassVar[str | None] = "policy"

    policy: Policy
    augment: bool = True

    @property
    def scored_on(self) -> tuple[str, ...]:
        return self.policy.scored_on

    @property
    def preparation(self) -> Preparation:
        return _preparation(self.policy, self.augment)

    def without_augmentation(self) -> Defense:
        return replace(self, augment=False)

    def __str__(self) -> str:
        if not is_built_in(type(self)):
            return super().__str__()
        if self.augment and self.policy != Policy():
            return str(self.policy)
        return f"{self.name}:{self.policy}" + ("" if self.augment else ",augment=no")


@dataclass(frozen=True)
class RandomPolicies(Transforming):
    """Transform each image by one of `count` policies of three transformations.

    The policies are drawn once, from `seed`.
    """

    name: ClassVar[str] = "random"
    line: ClassVar[str] = (
        "each image is transformed by one of ten random policies: the baseline of a search"
    )
    paper: ClassVar[str] = GAO
    example: ClassVar[str] = "random:count=10"
    use: ClassVar[str] = "as the baseline of a search"
    cost: ClassVar[str] = "some points of accuracy"
    first: ClassVar[str | None] = "count"

    count: int = 10
    seed: int = 0
    augment: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.count < 1:
            raise GradveilError(
                f"defense random: count {self.count}; there must be at least 1 policy"
            )
        if self.count > MOST_POLICIES:
            raise GradveilError(
                f"defense random: count {self.count}; there may be at most {MOST_POLICIES:,}"
            )

    @cached_property
    def policy(self) -> Policy:
        """The policies, as one hybrid."""
        rng = generator(self.seed, "random policies")
        drawn = torch.randint(len(LIBRARY), (self.count, POLICY_LENGTH), generator=rng).tolist()
        return Policy(
            tuple(tuple(Transform.parse(str(index)) for index in member) for member in drawn)
        )

    @property
    def preparation(self) -> Preparation:
        return _preparation(self.policy, self.augment)

    def without_augmentation(self) -> Defense:
        return replace(self, augment=False)


def _preparation(policy: Policy, augment: bool) -> Preparation:
    if augment:
        return Preparation(policy=policy)
    return Preparation(padding=0, flip=False, policy=policy)
