"""Bounds on the norm of the gradient: of the whole, and of each sample's, with noise (DP-SGD)."""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

# The base of all batch norms, SyncBatchNorm and lazy ones too: torch has no public name for it.
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.types import Gradients, ImageShape, Knowledge
from gradveil.defenses.base import Defense, Moment, Seam, State
from gradveil.defenses.noise import BREAKERS, gaussian, tell_noise
from gradveil.engine.shares import Shares

AT_ONCE = 16  # samples whose gradients are held in memory together


@dataclass(frozen=True)
class Clipping(Defense):
    """Share g min(1, norm / |g|), with the norm over all parameters together."""

    name: ClassVar[str] = "clip"
    line: ClassVar[str] = "the gradient is scaled down to at most this norm"
    paper: ClassVar[str] = (
        "Geyer et al. 2017, Differentially Private Federated Learning: A Client Level Perspective"
    )
    example: ClassVar[str] = "clip:1"
    use: ClassVar[str] = "before noise; alone it hides nothing"
    cost: ClassVar[str] = "none at norms above those of usual gradients"
    first: ClassVar[str | None] = "norm"
    acts_on: ClassVar[Seam] = "gradients"
    clips: ClassVar[bool] = True
    breakers: ClassVar[tuple[str, ...]] = ("adam-cosine",)  # a cosine does not see the length

    norm: float

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self.name, "norm", self.norm)

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        factor = factors({name: value[None] for name, value in gradients.items()}, self.norm)[0]
        return {name: value * factor for name, value in gradients.items()}, state


@dataclass(frozen=True)
class DPSGD(Defense):
    """Share the mean of each sample's gradient, clipped to `norm`, with normal noise.

    The noise has the standard deviation multiplier x norm / batch size. `sample_rate`, the share
    of the data in a batch, is needed for epsilon alone.
    """

    name: ClassVar[str] = "dp"
    line: ClassVar[str] = (
        "each sample's gradient is clipped, and normal noise is added to their mean (DP-SGD)"
    )
    paper: ClassVar[str] = "Abadi et al. 2016, Deep Learning with Differential Privacy"
    example: ClassVar[str] = "dp:norm=1,multiplier=1.1"
    use: ClassVar[str] = "a proven bound is needed (epsilon)"
    cost: ClassVar[str] = "most accuracy of all; a gradient for each sample"
    acts_on: ClassVar[Seam] = "gradients"
    clips: ClassVar[bool] = True
    noisy: ClassVar[bool] = True
    one_step: ClassVar[bool] = True
    repasses: ClassVar[bool] = True
    breakers: ClassVar[tuple[str, ...]] = BREAKERS
    strongest: ClassVar[tuple[str, ...]] = ("likelihood",)

    norm: float
    multiplier: float
    sample_rate: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self.name, "norm", self.norm)
        check_positive(self.name, "multiplier", self.multiplier)
        if self.sample_rate is not None:
            _check_rate(self.sample_rate)

    @classmethod
    def mild(cls) -> Defense | None:
        return cls(1.0, 1e-5)

    @property
    def random(self) -> bool:
        return True

    def protect_model(self, model: nn.Module, image_shape: ImageShape | None = None) -> nn.Module:
        """Return the model itself, after a look for layers that mix samples."""
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                raise GradveilError(
                    f"defense {self}: {name or 'the model'} is {kind_of(module)}, which "
                    "mixes samples in training, so none has a gradient of its own; take a model "
                    "with GroupNorm (opacus.validators.ModuleValidator.fix(model) makes one)"
                )
        return model

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        each = Shares(moment.model, moment.loss, told=moment.draws)
        total = {name: torch.zeros_like(value) for name, value in gradients.items()}
        images, labels = moment.batch.images[:, None], moment.batch.labels[:, None]
        for rows in torch.arange(len(images)).split(AT_ONCE):
            samples = each(
                images[rows],
                labels[rows],
                draws={name: value[rows, None] for name, value in moment.draws.items()},
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
        """Add the noise of the mean over as many images as there are labels.

        A client tells the labels first, and takes them back where they are unknown.
        """
        size = 1 if knowledge.labels is None else len(knowledge.labels)
        return tell_noise(knowledge, "gaussian", self.multiplier * self.norm / size)

    def epsilon(self, steps: int, delta: float, sample_rate: float | None = None) -> float:
        """Return epsilon after so many steps of Poisson-sampled batches.

        By Opacus' accountant of Renyi differential privacy.
        """
        rate = self.sample_rate if sample_rate is None else sample_rate
        if rate is None:
            raise GradveilError(
                f"defense {self}: epsilon needs the sample rate, the share of the data in a batch; "
                "give sample_rate"
            )
        _check_rate(rate)
        if steps < 1 or not 0 < delta < 1:
            raise GradveilError(
                f"defense {self}: {steps} steps and delta {delta:g}; expected at least 1 step and "
                "delta between 0 and 1"
            )
        try:
            with warnings.catch_warnings(action="ignore"):  # of parts that are not used here
                from opacus.accountants import RDPAccountant
        except ImportError as error:
            raise GradveilError(
                f"epsilon is worked out by Opacus, which is not installed ({error}): "
                "pip install gradveil[dp]"
            ) from error
        accountant = RDPAccountant()
        accountant.history = [(self.multiplier, rate, steps)]
        # It warns that a wider range of orders might give a smaller epsilon.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            return float(accountant.get_epsilon(delta))


def factors(samples: Gradients, norm: float) -> Tensor:
    """Return the factor that gives each sample's gradient (samples, ...) at most this norm."""
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in samples.values()]).norm(dim=0)
    scale: Tensor = norm / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return scale.clamp(max=1)


def check_positive(defense: str, setting: str, value: float) -> None:
    """Refuse a setting that is not above 0 and finite."""
    if not 0 < value < float("inf"):
        raise GradveilError(
            f"defense {defense}: {setting} {value:g}; it must be above 0 and finite"
        )


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise GradveilError(f"defense dp: sample_rate {rate:g}; it must be above 0 and at most 1")
