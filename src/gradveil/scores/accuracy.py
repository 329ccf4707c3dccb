"""The accuracy score S_acc of a policy (Gao et al. 2021, Eq. 8-10, after Mellor et al. 2021).

It says how differently an untrained model answers to the policy's images; higher is better. For the
rows J_n = d(sum of logits)/dx_n of a batch, with v the eigenvalues of their correlation matrix, it
is -sum(log(v + k) + 1 / (v + k)), k = 1e-5: at most minus the number of images, where the rows are
uncorrelated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.engine.device import images_at_once, tf32
from gradveil.engine.gradients import in_mode, pixel_frame
from gradveil.scores.scorer import Estimate, Scorer, check_images, prepared
from gradveil.transforms import Policy

K = 1e-5
BATCHES = 10
CONSTANT_ROW = 1e-12  # a row with less spread resembles no other


@dataclass(frozen=True, eq=False)
class AccuracyScorer(Scorer):
    """The score on uint8 images with an untrained model: a value for each batch of neighbors.

    `distinct` keeps the first image of each class in a batch, as the published code does without
    saying so: of 100 CIFAR-100 images about 63, and only so can a score reach the published
    threshold of -85, since 100 images give -100 at best. `fast` lets a GPU use TF32.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    batches: int = BATCHES
    distinct: bool = True
    augment: bool = True
    seed: int = 0
    fast: bool = True

    names: ClassVar[tuple[str, ...]] = ("accuracy",)

    def __post_init__(self) -> None:
        check_images(self.images, self.labels)
        if self.batches < 1 or len(self.images) < 2 * self.batches:
            raise GradveilError(
                f"{len(self.images)} images in {self.batches} batches: "
                "the accuracy score needs at least 2 in each"
            )

    @property
    def unit(self) -> int:  # type: ignore[override]  # depends on the device
        return 16 if self._device.type == "cuda" else 1

    @property
    def blocks(self) -> tuple[int, ...]:
        return (self.batches,)

    def score(self, policies: Sequence[Policy], block: int) -> dict[str, Tensor]:
        indices = torch.cat(self.chosen)
        images = self.images[indices].to(self._device)
        used = prepared(images, policies, self.seed, block, self.augment).flatten(0, 1)
        with tf32(self.fast):
            parts = [
                jacobians(self.model, some.to(self._dtype) / 255) for some in used.split(self._most)
            ]
        rows = torch.cat(parts).view(len(policies), len(indices), -1)
        batches = rows.split([len(part) for part in self.chosen], dim=1)
        scores = [correlation_scores(batch) for batch in batches]
        return {"accuracy": torch.stack(scores, dim=1).cpu()}

    @cached_property
    def chosen(self) -> tuple[Tensor, ...]:
        """The indices of each batch's images."""
        size = len(self.images) // self.batches
        batches = torch.arange(size * self.batches).split(size)
        if not self.distinct:
            return tuple(batches)
        return tuple(batch[_firsts(self.labels[batch])] for batch in batches)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @cached_property
    def _most(self) -> int:
        return images_at_once(self.model, self.images[:1].to(self._device, self._dtype))


def accuracy_score(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    policy: Policy,
    *,
    batches: int = BATCHES,
    seed: int = 0,
) -> Estimate:
    """Return S_acc of a policy on uint8 images, a value for each batch of them."""
    scorer = AccuracyScorer(model, images, labels, batches=batches, seed=seed)
    return scorer.estimates([policy])[0]["accuracy"]


def jacobians(model: nn.Module, images: Tensor) -> Tensor:
    """Return d(sum of logits)/dx for each image x in the model's normalized space.

    Images (N, C, H, W) give rows (N, C x H x W).
    """
    x = images.detach().requires_grad_()
    with torch.enable_grad(), in_mode(model, False):
        frozen = {name: parameter.detach() for name, parameter in model.named_parameters()}
        (found,) = torch.autograd.grad(torch.func.functional_call(model, frozen, (x,)).sum(), x)
    _, std = pixel_frame(model, (images.shape[1], images.shape[2], images.shape[3]))
    slopes: Tensor = (found * std.to(found)).flatten(1)
    return slopes


def correlation_scores(rows: Tensor) -> Tensor:
    """Return the score of each batch of rows (batches, images, values), in float64.

    A correlation matrix has no negative eigenvalue: one that rounding puts below zero is zero.
    """
    rows = rows.double()
    rows = rows - rows.mean(2, keepdim=True)
    norms = rows.norm(dim=2, keepdim=True)
    rows = torch.where(norms > CONSTANT_ROW, rows / norms.clamp_min(CONSTANT_ROW), 0.0)
    matrix = rows @ rows.transpose(1, 2)
    matrix.diagonal(dim1=1, dim2=2).fill_(1.0)
    values = torch.linalg.eigvalsh(matrix).clamp_min(0) + K
    return torch.neg((values.log() + values.reciprocal()).sum(1))


def _firsts(labels: Tensor) -> Tensor:
    """Return the index of each class's first image, sorted."""
    firsts: dict[int, int] = {}
    for index, label in enumerate(labels.tolist()):
        firsts.setdefault(label, index)
    return torch.tensor(sorted(firsts.values()))
