"""What an attacker believes of images before it looks at the gradient: one penalty for each row, to be added to the distance.

A prior is a value, called with pixel images (rows, B, C, H, W) and a `PriorState`. Rows are independent victims: none changes the
penalty of another, and the model stays as it is.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.attacks.labels import outputs
from gradveil.core.errors import GradveilError


@dataclass(frozen=True, eq=False)
class PriorState:
    """What a prior may look at besides the images. Labels are (rows, B), or (rows, B, classes) where soft; (mean, std) is the frame.

    `train_mode` is the protocol's: a pass of the model is made as the client made it. Of its answers the first `classes` are logits.
    """

    model: nn.Module
    labels: Tensor
    mean: Tensor
    std: Tensor
    train_mode: bool = False
    classes: int | None = None


@dataclass(frozen=True)
class Prior(ABC):
    """Differentiable by the images."""

    @property
    def waits(self) -> bool:
        """Whether it needs values back from a GPU while it runs, so that a step with it cannot be captured and replayed."""
        return False

    @property
    def passes(self) -> bool:
        """Whether it may pass images through the model, which may draw then."""
        return True

    @abstractmethod
    def __call__(self, images: Tensor, state: PriorState) -> Tensor:
        """One penalty for each row."""


@dataclass(frozen=True)
class Weighted(Prior):
    """A prior with a factor in front."""

    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise GradveilError(f"prior weight {self.weight}: it must be at least 0 and finite")

    def __call__(self, images: Tensor, state: PriorState) -> Tensor:
        return self.weight * self.penalty(images, state)

    @abstractmethod
    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        """For each row, at weight 1."""


@dataclass(frozen=True)
class TotalVariation(Weighted):
    """mean |dx| + mean |dy| between neighboring pixels, in the model's normalized space."""

    @property
    def passes(self) -> bool:
        return False

    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        z = (images - state.mean) / state.std
        return _mean(z.diff(dim=-1).abs()) + _mean(z.diff(dim=-2).abs())


@dataclass(frozen=True)
class Smoothness(TotalVariation):
    """Total variation in nats: minus the log density of neighbors whose difference is Laplacian of scale 1, summed over all values.

    It goes with a distance in nats, such as a likelihood: unlike a weight tuned for one size, it holds for images of any size.
    """

    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        return images[0].numel() * super().penalty(images, state)


@dataclass(frozen=True)
class LabelTerm(Weighted):
    """sum over the batch of |F(x') - onehot(y)|^2 (CPL, Wei et al. 2020).

    The paper calls F(x') the model's prediction: it is taken as the softmax probabilities, which can meet a one-hot vector.
    """

    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        probabilities = _by_row(images, state, lambda rows: _logits(state, rows))[
            ..., : state.classes
        ].softmax(-1)
        labels = state.labels
        if labels.dim() == 2:
            labels = labels[..., None] == torch.arange(
                probabilities.shape[-1], device=labels.device
            )
        return (probabilities - labels.to(probabilities)).square().sum((1, 2))


@dataclass(frozen=True)
class NormStatistics(Weighted):
    """How far the reconstruction's statistics are from those that batch-norm layers keep of the training data (Yin et al. 2021).

    Over the layers: sum of mean over the channels of (mean - running mean)^2 + (variance - running variance)^2, with mean and
    variance over the row's own images and positions.
    """

    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        norms = [
            m
            for m in state.model.modules()
            if isinstance(m, _BatchNorm) and m.running_mean is not None
        ]
        if not norms:
            raise GradveilError(
                f"{type(state.model).__name__} has no batch norm with running statistics: leave NormStatistics out"
            )
        return _by_row(images, state, lambda rows: _mismatch(state, norms, rows))


@dataclass(frozen=True)
class Sum(Prior):
    """All of them together."""

    priors: tuple[Prior, ...]

    @property
    def waits(self) -> bool:
        return any(prior.waits for prior in self.priors)

    @property
    def passes(self) -> bool:
        return any(prior.passes for prior in self.priors)

    def __call__(self, images: Tensor, state: PriorState) -> Tensor:
        return torch.stack(
            [images.new_zeros(len(images)), *(prior(images, state) for prior in self.priors)]
        ).sum(0)


none = Sum(())


def _mean(values: Tensor) -> Tensor:
    """For each row; 0 where there are no values, in an image one pixel wide."""
    return values.flatten(1).sum(1) / max(1, values[0].numel())


def _by_row(images: Tensor, state: PriorState, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of (rows, B, C, H, W) with a result for each row. Layers in training mode mix all that shares a pass: rows go alone."""
    return (
        torch.cat([function(row[None]) for row in images]) if state.train_mode else function(images)
    )


def _logits(state: PriorState, images: Tensor) -> Tensor:
    """(rows, B, classes and what else the model answers)."""
    return torch.stack(
        list(outputs(state.model, images.flatten(0, 1), state.train_mode).chunk(len(images)))
    )


def _mismatch(state: PriorState, norms: list[_BatchNorm], images: Tensor) -> Tensor:
    """The penalty of `NormStatistics` in one pass, after which the hooks are gone."""
    parts: list[Tensor] = []
    kept = {norm: (norm.running_mean, norm.running_var) for norm in norms}

    def record(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        mean, variance = kept[norm]
        assert mean is not None and variance is not None
        values = inputs[0].reshape(
            len(images), -1, inputs[0].shape[1], math.prod(inputs[0].shape[2:])
        )
        found_variance, found_mean = torch.var_mean(values, dim=(1, 3), correction=0)
        parts.append(((found_mean - mean).square() + (found_variance - variance).square()).mean(1))

    with ExitStack() as hooks:
        for norm in norms:
            hooks.callback(norm.register_forward_pre_hook(record).remove)
        _logits(state, images)
    return torch.stack(parts).sum(0)
