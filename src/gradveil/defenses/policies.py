"""Defences on the data: a policy, a hybrid of several, or random ones, which replace the images before gradients are computed."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Knowledge
from gradveil.defenses.base import Defense
from gradveil.transforms import LIBRARY, Policy, Preparation, Transform
from gradveil.transforms.differentiable import Anew, Drawn, draw
from gradveil.transforms.policy import POLICY_LENGTH


@dataclass(frozen=True)
class Transforming(Defense):
    """What policies have in common: the images are prepared, by crop and flip and by a policy. They go through uint8, as pictures do."""

    acts_on: ClassVar[Literal["nothing", "model", "batch", "gradients"]] = "batch"

    @property
    def random(self) -> bool:
        members = self.used.policy.members
        return self.augments or len(members) > 1 or any(step.signed for step in members[0])

    @property
    def augments(self) -> bool:
        """Whether images are cropped and flipped first."""
        return self.used.flip

    @property
    def used(self) -> Preparation:
        """What is done to each image."""
        raise NotImplementedError

    def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
        prepared = self.used((batch.images * 255).round().to(torch.uint8), rng)
        return replace(batch, images=prepared.to(batch.images.dtype) / 255)

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        return replace(knowledge, policy=Anew(self.used))

    def reveal(self, images: Tensor, rng: Generator) -> Drawn:
        return draw(self.used, images, rng)


@dataclass(frozen=True)
class PolicyDefense(Transforming):
    """One policy for all images, or for each image one of a hybrid's, drawn at random."""

    name: ClassVar[str] = "policy"
    line: ClassVar[str] = (
        "images are transformed by a policy, a hybrid (A+B), or those of a search (PATH.toml)"
    )
    paper: ClassVar[str] = (
        "Gao et al. 2021, Privacy-preserving Collaborative Learning with Automatic Transformation Search"
    )
    example: ClassVar[str] = "3-1-7+43-18-18"
    first: ClassVar[str | None] = "policy"

    policy: Policy
    augment: bool = True

    @property
    def used(self) -> Preparation:
        return _preparation(self.policy, self.augment)

    def __str__(self) -> str:
        plain = self.augment and self.policy != Policy()
        return (
            str(self.policy)
            if plain
            else f"{self.name}:{self.policy}" + ("" if self.augment else ",augment=no")
        )


@dataclass(frozen=True)
class RandomPolicies(Transforming):
    """Each image gets one of `count` policies of three transformations, which were drawn once from `seed`."""

    name: ClassVar[str] = "random"
    line: ClassVar[str] = (
        "each image is transformed by one of ten random policies: the baseline of a search"
    )
    paper: ClassVar[str] = (
        "Gao et al. 2021, Privacy-preserving Collaborative Learning with Automatic Transformation Search"
    )
    example: ClassVar[str] = "random:count=10"
    first: ClassVar[str | None] = "count"

    count: int = 10
    seed: int = 0
    augment: bool = True

    def __post_init__(self) -> None:
        if self.count < 1:
            raise GradveilError(
                f"defense random: count {self.count}; there must be at least 1 policy"
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
    def used(self) -> Preparation:
        return _preparation(self.policy, self.augment)


def _preparation(policy: Policy, augment: bool) -> Preparation:
    return (
        Preparation(policy=policy) if augment else Preparation(padding=0, flip=False, policy=policy)
    )
