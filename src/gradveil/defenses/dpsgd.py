"""Bounds on the norm of what is shared: of the whole gradient, and of each sample's own with noise (DP-SGD)."""

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.errors import GradveilError
from gradveil.core.types import Gradients, Knowledge
from gradveil.defenses.base import Defense, ImageShape, Moment, State
from gradveil.defenses.noise import gaussian, tell_noise
from gradveil.engine.shares import Shares

AT_ONCE = 16  # samples whose gradients are held in memory together


@dataclass(frozen=True)
class Clipping(Defense):
    """g min(1, norm / |g|), over all parameters together."""

    name: ClassVar[str] = "clip"
    line: ClassVar[str] = "the gradient is scaled down to at most this norm"
    paper: ClassVar[str] = (
        "Geyer et al. 2017, Differentially Private Federated Learning: A Client Level Perspective"
    )
    example: ClassVar[str] = "clip:1"
    first: ClassVar[str | None] = "norm"
    acts_on: ClassVar[Literal["nothing", "model", "batch", "gradients"]] = "gradients"
    clips: ClassVar[bool] = True

    norm: float

    def __post_init__(self) -> None:
        check_positive(self.name, "norm", self.norm)

    def protect_gradients(
        self,
        gradients: Gradients,
        moment: Moment,
        state: State,
        rng: Generator,
    ) -> tuple[Gradients, State]:
        factor = factors({name: value[None] for name, value in gradients.items()}, self.norm)[0]
        return {name: value * factor for name, value in gradients.items()}, state


@dataclass(frozen=True)
class DPSGD(Defense):
    """The mean over the batch of each sample's gradient, clipped to `norm`, plus normal noise of std multiplier x norm / batch size.

    `sample_rate`, the share of the data in a batch, is needed for epsilon alone.
    """

    name: ClassVar[str] = "dp"
    line: ClassVar[str] = (
        "each sample's gradient is clipped, and normal noise is added to their mean (DP-SGD)"
    )
    paper: ClassVar[str] = "Abadi et al. 2016, Deep Learning with Differential Privacy"
    example: ClassVar[str] = "dp:norm=1,multiplier=1.1"
    acts_on: ClassVar[Literal["nothing", "model", "batch", "gradients"]] = "gradients"
    clips: ClassVar[bool] = True
    noisy: ClassVar[bool] = True
    one_step: ClassVar[bool] = True

    norm: float
    multiplier: float
    sample_rate: float | None = None

    def __post_init__(self) -> None:
        check_positive(self.name, "norm", self.norm)
        check_positive(self.name, "multiplier", self.multiplier)
        if self.sample_rate is not None:
            _check_rate(self.sample_rate)

    @property
    def random(self) -> bool:
        return True

    def protect_model(self, model: nn.Module, image_shape: ImageShape | None = None) -> nn.Module:
        """The model itself: it is only looked at."""
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                raise GradveilError(
                    f"defense {self}: {name or 'the model'} is a {type(module).__name__}, which mixes samples in training, so none has a "
                    "gradient of its own; take a model with GroupNorm (opacus.validators.ModuleValidator.fix(model) makes one)"
                )
        return model

    def protect_gradients(
        self,
        gradients: Gradients,
        moment: Moment,
        state: State,
        rng: Generator,
    ) -> tuple[Gradients, State]:
        each = Shares(moment.model, moment.loss, told=moment.draws)
        total = {name: torch.zeros_like(value) for name, value in gradients.items()}
        images, labels, draws = (
            moment.batch.images[:, None],
            moment.batch.labels[:, None],
            moment.draws,
        )
        for rows in torch.arange(len(images)).split(AT_ONCE):
            samples = each(
                images[rows],
                labels[rows],
                draws={name: value[rows, None] for name, value in draws.items()},
            )
            scale = factors(samples, self.norm)
            total = {
                name: value + torch.tensordot(scale, samples[name], 1)
                for name, value in total.items()
            }
        deviation, size = self.multiplier * self.norm, len(moment.batch)
        return {
            name: (value + deviation * gaussian(value, rng)) / size for name, value in total.items()
        }, state

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        """The noise of the mean over as many images as there are labels; a client tells them, and takes them back where unknown."""
        size = 1 if knowledge.labels is None else len(knowledge.labels)
        return tell_noise(knowledge, "gaussian", self.multiplier * self.norm / size)

    def epsilon(self, steps: int, delta: float, sample_rate: float | None = None) -> float:
        """After so many steps of Poisson-sampled batches, by Opacus' accountant (Renyi differential privacy)."""
        rate = self.sample_rate if sample_rate is None else sample_rate
        if rate is None:
            raise GradveilError(
                f"defense {self}: epsilon needs the sample rate, the share of the data in a batch; give sample_rate"
            )
        _check_rate(rate)
        if steps < 1 or not 0 < delta < 1:
            raise GradveilError(
                f"defense {self}: {steps} steps and delta {delta:g}; expected at least 1 step and delta between 0 and 1"
            )
        try:
            with warnings.catch_warnings(
                action="ignore"
            ):  # of its other parts, which are not used here
                from opacus.accountants import RDPAccountant
        except ImportError as error:
            raise GradveilError(
                f"epsilon is worked out by Opacus, which is not installed ({error}): pip install gradveil[dp]"
            ) from error
        accountant = RDPAccountant()
        accountant.history = [(self.multiplier, rate, steps)]
        with warnings.catch_warnings(
            action="ignore", category=UserWarning
        ):  # that a wider range of orders might give a smaller epsilon
            return float(accountant.get_epsilon(delta))


def factors(samples: Gradients, norm: float) -> Tensor:
    """What each sample's gradient (samples, ...) is scaled by to have at most this norm."""
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in samples.values()]).norm(dim=0)
    scale: Tensor = norm / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return scale.clamp(max=1)


def check_positive(defense: str, setting: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise GradveilError(
            f"defense {defense}: {setting} {value:g}; it must be above 0 and finite"
        )


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise GradveilError(f"defense dp: sample_rate {rate:g}; it must be above 0 and at most 1")
