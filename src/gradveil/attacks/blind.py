"""Blind guesses: attacks that do not look at the gradient.

Their score costs an attacker nothing, so it is the level that an attack has to beat. All that they
use of public images are their means.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.labels import Known
from gradveil.core.errors import GradveilError
from gradveil.core.types import ImageShape, Observation, Reconstruction


@dataclass(frozen=True, eq=False)
class Blind(Attack):
    """A guess by the shape of the images, and by their labels where it needs them.

    The distance of its reconstructions is infinite: none was measured.
    """

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        found = []
        for done, victim in enumerate(seen, 1):
            self.check(victim)
            labels = Known().bind([victim], rng)[0] if "labels" in self.needs else None
            guess = self.guess(victim.size, victim.image_shape, labels, rng)
            dtype = next(iter(victim.gradients.values())).dtype
            images = guess.to("cpu", dtype).expand(victim.size, *victim.image_shape).clone()
            found.append(Reconstruction(images, victim.knowledge.labels, math.inf))
            progress(done, len(seen))
        return found

    def check(self, victim: Observation) -> None:
        """Refuse a victim whose images the guess does not fit."""
        return

    @abstractmethod
    def guess(self, count: int, shape: ImageShape, labels: Tensor | None, rng: Generator) -> Tensor:
        """Return `count` images (count, C, H, W), or one image (C, H, W) for all of them."""


@dataclass(frozen=True)
class BlindNoise(Blind):
    """Every value uniform in [0, 1]."""

    def guess(self, count: int, shape: ImageShape, labels: Tensor | None, rng: Generator) -> Tensor:
        return torch.rand(count, *shape, generator=rng, device=rng.device)

    def __str__(self) -> str:
        return "blind: noise"


@dataclass(frozen=True)
class BlindGray(Blind):
    """Every value 0.5."""

    def guess(self, count: int, shape: ImageShape, labels: Tensor | None, rng: Generator) -> Tensor:
        return torch.full(shape, 0.5)

    def __str__(self) -> str:
        return "blind: gray"


@dataclass(frozen=True, eq=False)
class BlindImage(Blind):
    """The same image (C, H, W) for all victims, such as the mean color; `name` says which."""

    name: str
    image: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        _check_pixels(self.image, str(self))

    def check(self, victim: Observation) -> None:
        _check_shape(self.image, victim.image_shape, str(self))

    def guess(self, count: int, shape: ImageShape, labels: Tensor | None, rng: Generator) -> Tensor:
        return self.image

    def __str__(self) -> str:
        return f"blind: {self.name}"


@dataclass(frozen=True, eq=False)
class BlindClassMean(Blind):
    """The image of each label's class, from the class means (classes, C, H, W) of public images.

    `name` says which means these are.
    """

    images: Tensor = field(repr=False)
    name: str = "class mean"

    def __post_init__(self) -> None:
        _check_pixels(self.images, str(self))

    @property
    def needs(self) -> tuple[str, ...]:
        return ("labels",)

    def check(self, victim: Observation) -> None:
        _check_shape(self.images, (victim.classes, *victim.image_shape), str(self))

    def guess(self, count: int, shape: ImageShape, labels: Tensor | None, rng: Generator) -> Tensor:
        assert labels is not None
        return self.images[labels.to(self.images.device)]

    def __str__(self) -> str:
        return f"blind: {self.name}"


@dataclass(frozen=True, eq=False)
class PublicMeans:
    """Means of public images, float32 in [0, 1].

    `classes` (classes, C, H, W) is the mean image of each class, `image` (C, H, W) that of all
    images, and `color` (C, H, W) their mean color everywhere.
    """

    classes: Tensor
    image: Tensor
    color: Tensor


def find_means(images: Tensor, labels: Tensor, classes: int) -> PublicMeans:
    """Return the means of images (N, C, H, W), uint8 or floating point in [0, 1].

    Computed class by class: a whole split as floats may not fit the memory. A class without images
    gets the mean of all.
    """
    _check_public(images, labels, classes)
    scale = 1 if images.is_floating_point() else 255
    counts = torch.bincount(labels, minlength=classes)
    means = torch.zeros(classes, *images.shape[1:], dtype=torch.float64, device=images.device)
    for label in counts.nonzero().flatten().tolist():
        means[label] = images[labels == label].double().mean(0) / scale
    image = torch.einsum("k,kchw->chw", counts.double() / counts.sum(), means)
    means[counts == 0] = image
    color = image.mean(dim=(1, 2), keepdim=True).expand_as(image).float().clone()
    return PublicMeans(means.float(), image.float(), color)


def make_blind_attacks(means: PublicMeans | None = None) -> dict[str, Blind]:
    """Return the blind attacks by their names in tables; without means, noise and gray alone."""
    attacks: list[Blind] = [BlindNoise(), BlindGray()]
    if means is not None:
        attacks += [BlindImage("mean color", means.color), BlindClassMean(means.classes)]
    return {str(attack): attack for attack in attacks}


def stack_guesses(
    attacks: Sequence[Blind], shape: ImageShape, labels: Tensor, rngs: Sequence[Generator]
) -> Tensor:
    """Return every attack's guess of each image, (images, attacks, C, H, W), for `over_blind`.

    `labels` (images,) are those of the images; each image has a generator.
    """
    return torch.stack(
        [
            torch.stack(
                [attack.guess(1, shape, label, rng).expand(1, *shape)[0] for attack in attacks]
            )
            for label, rng in zip(labels.split(1), rngs, strict=True)
        ]
    )


def _check_public(images: Tensor, labels: Tensor, classes: int) -> None:
    if images.dim() != 4 or not len(images):
        raise GradveilError(
            f"public images of shape {tuple(images.shape)}: expected (N, C, H, W), at least one"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise GradveilError(
            f"public images of type {images.dtype}: expected uint8, or floating point in [0, 1]"
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise GradveilError(
            f"public labels of shape {tuple(labels.shape)} and type {labels.dtype}: expected one "
            f"class index for each of {len(images)} images"
        )
    low, high = (int(value) for value in labels.aminmax())
    if not 0 <= low <= high < classes:
        raise GradveilError(
            f"public labels from {low} to {high}: expected class indices from 0 to {classes - 1}"
        )


def _check_pixels(images: Tensor, name: str) -> None:
    if not (images.is_floating_point() and bool(((images >= 0) & (images <= 1)).all())):
        low, high = (float(value) for value in images.aminmax())
        raise GradveilError(
            f"{name!r} got {images.dtype} values from {low:g} to {high:g}: "
            "expected floating point in [0, 1]"
        )


def _check_shape(images: Tensor, expected: tuple[int, ...], name: str) -> None:
    if tuple(images.shape) != expected:
        raise GradveilError(
            f"{name!r} got images of shape {tuple(images.shape)}: the victims need {expected}"
        )
