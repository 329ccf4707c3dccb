"""Attacks that do not look at the gradient: what they score costs the attacker nothing, and is the level to beat."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.labels import Known
from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation, Reconstruction


@dataclass(frozen=True, eq=False)
class Blind(Attack):
    """Guesses images by no more than their shape, and labels where they are known. The distance is infinite: none was measured."""

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        found = []
        for done, one in enumerate(seen, 1):
            dtype = next(iter(one.gradients.values())).dtype
            images = (
                self.guess(one, rng).to("cpu", dtype).expand(one.size, *one.image_shape).clone()
            )
            found.append(Reconstruction(images, one.knowledge.labels, math.inf))
            progress(done, len(seen))
        return found

    @abstractmethod
    def guess(self, one: Observation, rng: Generator) -> Tensor:
        """(size, C, H, W), or (C, H, W) for every image of the victim."""


@dataclass(frozen=True)
class BlindNoise(Blind):
    """Every value uniform in [0, 1]."""

    def guess(self, one: Observation, rng: Generator) -> Tensor:
        return torch.rand(one.size, *one.image_shape, generator=rng, device=rng.device)

    def __str__(self) -> str:
        return "blind: noise"


@dataclass(frozen=True)
class BlindGrey(Blind):
    """Every value 0.5."""

    def guess(self, one: Observation, rng: Generator) -> Tensor:
        return torch.full(one.image_shape, 0.5)

    def __str__(self) -> str:
        return "blind: grey"


@dataclass(frozen=True, eq=False)
class BlindImage(Blind):
    """One image (C, H, W) for all: a data set's mean color or mean image, say. `name` says which."""

    name: str
    image: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        _check_pixels(self.image, str(self))

    def guess(self, one: Observation, rng: Generator) -> Tensor:
        _check_shape(self.image, one.image_shape, str(self))
        return self.image

    def __str__(self) -> str:
        return f"blind: {self.name}"


@dataclass(frozen=True, eq=False)
class BlindClassMean(Blind):
    """The image of each label's class, from images (classes, C, H, W): the class means of data like the victim's."""

    images: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        _check_pixels(self.images, str(self))

    @property
    def needs(self) -> tuple[str, ...]:
        return ("labels",)

    def guess(self, one: Observation, rng: Generator) -> Tensor:
        _check_shape(self.images, (one.classes, *one.image_shape), str(self))
        return self.images[Known().infer([one], rng)[0].to(self.images.device)]

    def __str__(self) -> str:
        return "blind: class mean"


def _check_pixels(images: Tensor, name: str) -> None:
    if not (images.is_floating_point() and bool(((images >= 0) & (images <= 1)).all())):
        low, high = (float(value) for value in images.aminmax())
        raise GradveilError(
            f"{name!r} got {images.dtype} values from {low:g} to {high:g}: expected floating point in [0, 1]"
        )


def _check_shape(images: Tensor, expected: tuple[int, ...], name: str) -> None:
    if tuple(images.shape) != expected:
        raise GradveilError(
            f"{name!r} got images of shape {tuple(images.shape)}: the victims need {expected}"
        )
