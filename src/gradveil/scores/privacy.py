"""The privacy score S_pri of a policy (Gao et al. 2021, Eq. 5-7).

It says how early a gradient resembles the private image's; lower is meant to be more private.
GradSim is the cosine between the gradients of two images for one label. S_pri is the area under it
along the line from uniform noise x0 to the transformed image T(x), x'(i) = (1 - i) x0 + i T(x),
averaged over images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, unknown
from gradveil.core.seeds import generator
from gradveil.core.types import Loss
from gradveil.engine.device import images_at_once
from gradveil.engine.gradients import cross_entropy, in_mode
from gradveil.engine.lines import LineProducts, Products
from gradveil.scores.scorer import Estimate, Scorer, check_images, image_blocks, prepared
from gradveil.transforms import Policy

TINY = 1e-8  # a gradient shorter than this resembles nothing
POINTS = 20  # of a line, besides the image
GPU_GRADIENTS = 8_400  # images x points that keep a GPU busy


def per_tensor(found: Products) -> Tensor:
    """Return GradSim as both public code bases compute it: the mean of the tensors' cosines."""
    return _cosine(found.dots, found.squares).mean(0)


def whole(found: Products) -> Tensor:
    """Return GradSim as the paper writes it: a single cosine over all parameters."""
    return _cosine(found.dots.sum(0), found.squares.sum(0))


def trapezoid(similarity: Tensor) -> Tensor:
    """Return the area under each line of (lines, points), by the trapezoidal rule."""
    return (similarity[:, 1:] + similarity[:, :-1]).mean(1) / 2


def left_sum(similarity: Tensor) -> Tensor:
    """Return the area under each line of (lines, points), by its left ends."""
    return similarity[:, :-1].mean(1)


AreaRule = tuple[Callable[[Products], Tensor], Callable[[Tensor], Tensor]]
"""How gradients are compared, and how the area is taken."""

AREA_RULES: MappingProxyType[str, AreaRule] = MappingProxyType(
    {"code": (per_tensor, trapezoid), "paper": (whole, left_sum)}
)
"""By name. The published tables come from `code`."""


@dataclass(frozen=True, eq=False)
class PrivacyScorer(Scorer):
    """The score on uint8 images with a semi-trained model: `points` + 1 gradients an image.

    `fast` lets a GPU compute in bf16.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    rule: str = "code"
    points: int = POINTS
    augment: bool = True
    seed: int = 0
    loss: Loss = cross_entropy
    fast: bool = True

    names: ClassVar[tuple[str, ...]] = ("privacy",)

    def __post_init__(self) -> None:
        check_images(self.images, self.labels)
        if self.rule not in AREA_RULES:
            raise unknown("rule", self.rule, AREA_RULES)
        if self.points < 1:
            raise GradveilError(f"points {self.points}: a line needs at least 1 besides the image")

    @property
    def unit(self) -> int:  # type: ignore[override]  # depends on the device
        if self._device.type != "cuda":
            return 1
        return max(1, GPU_GRADIENTS // (self.points + 1) // self.blocks[0])

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        return image_blocks(len(self.images))

    def score(self, policies: Sequence[Policy], block: int) -> dict[str, Tensor]:
        first, size = sum(self.blocks[:block]), self.blocks[block]
        images = self.images[first : first + size].to(self._device)
        noise = torch.rand(images.shape, generator=generator(self.seed, "noise", block))
        dtype = next(self.model.parameters()).dtype
        noise = noise.to(self._device, dtype).repeat(len(policies), 1, 1, 1)
        used = prepared(images, policies, self.seed, block, self.augment).flatten(0, 1)
        labels = self.labels[first : first + size].to(self._device).long().repeat(len(policies))
        found = self.lines(used.to(dtype) / 255, labels, noise)
        return {"privacy": found.double().cpu().view(len(policies), size)}

    def lines(self, images: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Return the area under GradSim from each noise to its image, (images,)."""
        similarity, area = AREA_RULES[self.rule]
        parts = max(1, self._most // (self.points + 1))
        way = torch.linspace(0, 1, self.points + 1, device=images.device, dtype=images.dtype)
        way = way.view(-1, 1, 1, 1)
        found = []
        with in_mode(self.model, False):
            for rows in torch.arange(len(images), device=images.device).split(parts):
                points = torch.lerp(noise[rows, None], images[rows, None], way)
                found.append(area(similarity(self._products(points, labels[rows]))))
        return torch.cat(found)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def _products(self) -> LineProducts:
        return LineProducts(self.model, self.loss, fast=self.fast)

    @cached_property
    def _most(self) -> int:
        first = self.images[:1].to(next(self.model.parameters()))
        return images_at_once(self.model, first, short=self.fast and first.is_cuda)


def privacy_score(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    policy: Policy,
    *,
    rule: str = "code",
    seed: int = 0,
) -> Estimate:
    """Return S_pri of a policy on uint8 images, a value for each; `rule` is `code` or `paper`."""
    scorer = PrivacyScorer(model, images, labels, rule=rule, seed=seed)
    return scorer.estimates([policy])[0]["privacy"]


def _cosine(dots: Tensor, squares: Tensor) -> Tensor:
    norms = squares.sqrt().clamp_min(TINY)
    return dots / (norms * norms[..., -1:])
