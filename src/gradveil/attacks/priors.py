"""Priors: penalties on unlikely images, added to the distance of each row.

A prior is a value, called with pixel images (rows, B, C, H, W) and a `PriorState`. Rows are
independent victims: none changes the penalty of another, and the model stays as it is.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.attacks.labels import predict
from gradveil.core.errors import GradveilError
from gradveil.core.types import Statistics
from gradveil.engine.calls import before_use
from gradveil.engine.norms import share_of_updates
from gradveil.engine.shares import Shares

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


@dataclass(frozen=True, eq=False)
class PriorState:
    """The values besides the images that a prior may use.

    `labels` are (rows, B), or probabilities (rows, B, classes); `mean` and `std` are those of the
    model's normalization. `train_mode` is the client's mode in a pass of the model. The first
    `classes` outputs of the model are logits; all of them where it is None. `statistics` are the
    running statistics that each row's client sent, (rows, channels) by name, and `shares` tells
    those of a guess; both are None where no prior needs them.
    """

    model: nn.Module
    labels: Tensor
    mean: Tensor
    std: Tensor
    train_mode: bool = False
    classes: int | None = None
    statistics: Statistics | None = None
    shares: Shares | None = None


@dataclass(frozen=True)
class Prior(ABC):
    """A penalty on images, differentiable by them.

    It must not wait for values from a GPU, so that a step with it can be captured and replayed.
    """

    @property
    def passes(self) -> bool:
        """Whether it may pass images through the model, which may draw random numbers then."""
        return True

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of `Knowledge` without which it cannot be."""
        return ()

    @abstractmethod
    def __call__(self, images: Tensor, state: PriorState) -> Tensor:
        """Return (rows,) penalties."""


@dataclass(frozen=True)
class Weighted(Prior):
    """A prior multiplied by `weight`."""

    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise GradveilError(f"prior weight {self.weight}: it must be at least 0 and finite")

    def __call__(self, images: Tensor, state: PriorState) -> Tensor:
        return self.weight * self.penalty(images, state)

    @abstractmethod
    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        """Return (rows,) penalties at weight 1."""


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
    """Total variation in nats, for a distance in nats such as a likelihood.

    It is minus the log density of neighbors whose difference is Laplacian of scale 1, summed over
    all values. Unlike a weight tuned for one image size, it holds for images of any size.
    """

    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        return images[0].numel() * super().penalty(images, state)


@dataclass(frozen=True)
class LabelTerm(Weighted):
    """The sum over the batch of |F(x') - onehot(y)|^2 (CPL, Wei et al. 2020).

    The paper calls F(x') the model's prediction; it is taken as the softmax probabilities, which
    can meet a one-hot vector.
    """

    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        outputs = _by_row(images, state, lambda rows: _predict(state, rows))
        probabilities = outputs[..., : state.classes].softmax(-1)
        labels = state.labels
        if labels.dim() == 2:
            labels = labels[..., None] == torch.arange(
                probabilities.shape[-1], device=labels.device
            )
        return (probabilities - labels.to(probabilities)).square().sum((1, 2))


@dataclass(frozen=True)
class NormStatistics(Weighted):
    """The mismatch with the statistics that batch-norm layers keep of the data (Yin et al. 2021).

    Sum over the layers of the mean over channels of (mean - running mean)^2 + (variance - running
    variance)^2, with mean and variance over the images of a row and their positions.
    """

    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        norms = [
            m
            for m in state.model.modules()
            if isinstance(m, BatchNorm) and m.running_mean is not None
        ]
        if not norms:
            raise GradveilError(
                f"{type(state.model).__name__} has no batch norm with running statistics: "
                "leave NormStatistics out"
            )
        return _by_row(images, state, lambda rows: _mismatch(state, norms, rows))


@dataclass(frozen=True)
class SentStatistics(Weighted):
    """The mismatch with the running statistics that the client sent after its local steps.

    Sum over the layers of the mean over channels of (mean' - mean)^2 + (variance' - variance)^2.
    Both are statistics of the client's batches: the share that its steps have in the running ones
    is known, and differences are divided by it.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        return ("statistics",)

    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        assert state.shares is not None and state.statistics is not None
        found = state.shares.statistics(images, state.labels, differentiable=True)
        steps = state.shares.steps(images.shape[1])
        parts = [images.new_zeros(len(images))]
        for name, value in found.items():
            layer = state.model.get_submodule(name.rpartition(".")[0])
            gap = (value - state.statistics[name]) / share_of_updates(layer, steps)
            parts.append(gap.square().mean(1))
        return torch.stack(parts).sum(0)


@dataclass(frozen=True)
class Sum(Prior):
    """The sum of several priors."""

    priors: tuple[Prior, ...]

    @property
    def passes(self) -> bool:
        return any(prior.passes for prior in self.priors)

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(need for prior in self.priors for need in prior.needs))

    def __call__(self, images: Tensor, state: PriorState) -> Tensor:
        return torch.stack(
            [images.new_zeros(len(images)), *(prior(images, state) for prior in self.priors)]
        ).sum(0)


none = Sum(())


def _mean(values: Tensor) -> Tensor:
    """Return the mean of each row; 0 where there are no values, in an image one pixel wide."""
    return values.flatten(1).sum(1) / max(1, values[0].numel())


def _by_row(images: Tensor, state: PriorState, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of (rows, B, C, H, W) that returns a result for each row.

    In training mode each row has a pass of its own, since batch norm mixes the images of a pass.
    """
    return (
        torch.cat([function(row[None]) for row in images]) if state.train_mode else function(images)
    )


def _predict(state: PriorState, images: Tensor) -> Tensor:
    """Return the model's outputs, (rows, B, outputs)."""
    outputs = predict(state.model, images.flatten(0, 1), state.train_mode)
    return torch.stack(list(outputs.chunk(len(images))))


def _mismatch(state: PriorState, norms: list[BatchNorm], images: Tensor) -> Tensor:
    """Return the penalty of `NormStatistics`, recorded by hooks during one pass."""
    parts: list[Tensor] = []
    kept = {norm: (norm.running_mean, norm.running_var) for norm in norms}

    def record(norm: nn.Module, inputs: Tensor) -> None:
        assert isinstance(norm, BatchNorm)
        mean, variance = kept[norm]
        assert mean is not None and variance is not None
        values = inputs.reshape(len(images), -1, inputs.shape[1], math.prod(inputs.shape[2:]))
        found_variance, found_mean = torch.var_mean(values, dim=(1, 3), correction=0)
        parts.append(((found_mean - mean).square() + (found_variance - variance).square()).mean(1))

    with ExitStack() as hooks:
        for norm in norms:
            hooks.callback(before_use(norm, record).remove)
        _predict(state, images)
    return torch.stack(parts).sum(0)
