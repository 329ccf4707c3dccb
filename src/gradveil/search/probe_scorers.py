"""The score behind the probe: policies times images are rows of one attack, and each is scored against the image truly used."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.attacks import Attack
from gradveil.audits.scoring import CEILING
from gradveil.clients import Client, check_batch
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.scores import over_blind, signatures, ssim
from gradveil.scores.identification import TIE
from gradveil.scores.scorers import Scorer, image_blocks, prepared
from gradveil.search.strikes import Strike, check_attack
from gradveil.transforms import Policy, Preparation

FIRST_BLOCKS = (5, 5, 10, 20)  # an image costs hundreds of iterations: a race looks as soon as it may (simulated: a fifth less work)


@dataclass(frozen=True, eq=False)
class ProbeScorer(Scorer):
    """dB over the best blind guess, SSIM, and whether the used image is nearest to the found one; each against the used image.

    Images are prepared with the same crop and flip for every policy (`augment`), then by the policy, and attacked one to a victim
    with known labels, from a start that is the same for every policy. An image is to be identified among `candidates`, other
    images prepared in the same way. `guesses` are (images, guesses, C, H, W) in [0, 1]. The last guess is noise: it stands in where an
    attack diverged or a gradient cannot be shared, so that every image counts. `sizes` are those of the blocks; None: a race's.
    """

    names: ClassVar[tuple[str, ...]] = ("over_blind", "ssim", "identified")

    model: nn.Module = field(repr=False)
    classes: int
    images: Tensor = field(repr=False)  # uint8 NCHW
    labels: Tensor = field(repr=False)
    candidates: Tensor = field(repr=False)  # uint8 NCHW, none of the images
    guesses: Tensor = field(repr=False)
    attack: Attack
    augment: bool = True
    seed: int = 0
    unit: int = 1
    victims_at_once: int = 16
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("images", "candidates"):
            check_pixels(name, getattr(self, name), self.images.shape[1:])
        check_batch(Batch(self.images.float() / 255, self.labels), self.classes, "the probe")
        if self.guesses.ndim != 5 or self.guesses.shape[2:] != self.images.shape[1:] or len(self.guesses) != len(self.images):
            expected = f"({len(self.images)}, guesses, {', '.join(map(str, self.images.shape[1:]))})"
            raise GradveilError(f"guesses of shape {tuple(self.guesses.shape)}: expected {expected}")
        for name in ("unit", "victims_at_once"):
            if getattr(self, name) < 1:
                raise GradveilError(f"{name.replace('_', ' ')} {getattr(self, name)}: it must be at least 1")
        if min(self.blocks) < 1 or sum(self.blocks) != len(self.images):
            raise GradveilError(f"blocks of {self.blocks}: expected sizes that add up to {len(self.images)} images")
        check_attack(self.attack)
        self._check_model()

    @property
    def blocks(self) -> tuple[int, ...]:
        return race_blocks(len(self.images)) if self.sizes is None else self.sizes

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def score(self, policies: Sequence[Policy], block: int) -> dict[str, Tensor]:
        if not policies:
            return {name: torch.empty(0, self.blocks[block], dtype=torch.float64) for name in self.names}
        start, size = sum(self.blocks[:block]), self.blocks[block]
        rows = torch.arange(start, start + size)
        used = self._pixels(prepared(self.images[rows].to(self.device), policies, self.seed, block, self.augment))
        strike = Strike(Client(self.model, self.classes), self.attack, self.seed, self.victims_at_once)
        found, there = strike(used.flatten(0, 1), self.labels[rows].repeat(len(policies)), rows.tolist() * len(policies))
        guesses = self.guesses[rows].to(self.device)
        found = torch.where(there.view(-1, 1, 1, 1), found, guesses[:, -1].to(found).repeat(len(policies), 1, 1, 1)).view_as(used)
        if not bool(there.all()):
            lost = f"{int((~there).sum())} of {len(there)} images under {', '.join(map(str, policies))}"
            warnings.warn(f"{lost} gave an attack nothing to find: they score as a guess of noise", GradveilWarning, stacklevel=2)
        each = [self._scores(*one, guesses) for one in zip(policies, found, used, strict=True)]
        return {name: torch.stack([scores[i] for scores in each]).cpu() for i, name in enumerate(self.names)}

    def _scores(self, policy: Policy, found: Tensor, used: Tensor, guesses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        over = over_blind(found, used, guesses).clamp(-CEILING, CEILING)
        prepare = Preparation(policy=policy) if self.augment else policy
        others = prepare(self.candidates.to(self.device), generator(self.seed, "candidates", str(policy)))
        return over, ssim(found, used), nearest(found, used, self._pixels(others))

    def _pixels(self, images: Tensor) -> Tensor:
        return images.to(next(self.model.parameters()).dtype) / 255

    def _check_model(self) -> None:
        """Refuse a model that can share the gradient of none of the images: it does not fit them, or it is dead."""
        client, problem = Client(self.model, self.classes), None
        for image, label in zip(self.images, self.labels, strict=True):
            try:
                client.share([Batch(self._pixels(image[None]), label[None])], generator(self.seed))
                return
            except GradveilError as error:
                problem = error
        raise GradveilError(str(problem).removeprefix("victim 0: "))


def race_blocks(images: int) -> tuple[int, ...]:
    return image_blocks(images, FIRST_BLOCKS)


def nearest(found: Tensor, used: Tensor, others: Tensor) -> Tensor:
    """1 where `found[i]` is nearer to `used[i]` than to any of the others, by the rule of `scores.identify`; else 0."""
    made = signatures(found)
    likeness = (made * signatures(used)).sum(1, keepdim=True)
    nearer = made @ signatures(others).T > likeness + TIE
    return (made.any(1) & ~nearer.any(1)).double()


def check_pixels(name: str, images: Tensor, shape: Sequence[int]) -> None:
    """Refuse what is not uint8 images of this shape."""
    if images.dtype != torch.uint8 or images.ndim != 4 or not len(images) or images.shape[1:] != tuple(shape):
        got = f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
        expected = ", ".join(map(str, shape)) if len(shape) == 3 else "channels, height, width"
        raise GradveilError(f"{name} are {got}: expected uint8 of shape (images, {expected}), at least one image")
