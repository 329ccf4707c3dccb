"""What a training run is asked for, and what it gives."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil.core.errors import GradveilError, unknown
from gradveil.core.job_folder import SETTINGS, Kind, remove_empty
from gradveil.core.job_folder import claim as claim  # a part of this module too
from gradveil.core.schedule import count_decays
from gradveil.defenses import DPSGD, Defense, parse
from gradveil.defenses.policies import Transforming
from gradveil.transforms import Policy, Preparation

RUN = Kind("a training", "training run")
FINAL = "model.safetensors"
RESUME = "resume.ckpt"
METRICS = "metrics.csv"
STEPS = "steps"
TENSORBOARD = "tensorboard"


def step_path(out: Path, step: int) -> Path:
    return out / STEPS / f"step-{step:06d}.safetensors"


def refuse_other(out: Path, wanted: Mapping[str, Any]) -> None:
    """An error if the folder holds anything but this job's run. Nothing is written."""
    RUN.refuse_other(out, wanted)


def release(out: Path) -> None:
    """After a failure: give the folder back, unless it holds weights or a point to go on from."""
    if (out / RESUME).exists() or any(out.glob(f"{STEPS}/*.safetensors")):
        return
    shutil.rmtree(out / TENSORBOARD, ignore_errors=True)
    for name in (METRICS, SETTINGS):
        (out / name).unlink(missing_ok=True)
    remove_empty(out / STEPS, out)


LARGEST = torch.finfo(torch.float32).max  # the optimizer's step cannot use a larger number


@dataclass(frozen=True)
class Recipe:
    """SGD with Nesterov momentum; the learning rate is divided by ten at 3/8, 5/8 and 7/8 of the epochs (Gao et al. 2021).

    `loss_scale` multiplies the training loss. The published code trains with 0.5 while its attacker uses 1: an option here,
    never the default.
    """

    epochs: int = 60
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 128
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, right, rule in (
            ("epochs", self.epochs >= 0, "at least 0"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1"),
            (
                "weight_decay",
                0 <= self.weight_decay <= LARGEST,
                "at least 0 and finite as a float32",
            ),
            ("lr", 0 < self.lr <= LARGEST, "above 0 and finite as a float32"),
            ("loss_scale", 0 < self.loss_scale <= LARGEST, "above 0 and finite as a float32"),
        ):
            if not right:
                raise GradveilError(
                    f"{name.replace('_', ' ')} {getattr(self, name)}: it must be {rule}"
                )

    def rate(self, epoch: int) -> float:
        """The learning rate of this epoch, counted from 0."""
        return self.lr * 0.1 ** count_decays(epoch, self.epochs)

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        nesterov = self.momentum > 0
        return torch.optim.SGD(
            model.parameters(),
            self.lr,
            self.momentum,
            weight_decay=self.weight_decay,
            nesterov=nesterov,
        )

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss_scale * cross_entropy(logits, labels)


PRECISIONS = ("auto", "32", "bf16")
LEAST_NOISE = 1e-20  # a multiplier below it tells nothing, and Opacus' accountant may never end
Prepare = Callable[[Tensor, Generator], Tensor]


@dataclass(frozen=True)
class TrainingJob:
    """Everything that decides the result of a training run.

    `defense` is a text of `defenses.parse`; a policy may be given as one, or as `policy`. `augment` off leaves out the crop and flip
    of a policy in `defense` too. `delta` is that of DP-SGD's epsilon: by default 1 / the number of training images.
    """

    data: str
    model: str
    recipe: Recipe = field(default_factory=Recipe)
    policy: Policy = field(default_factory=Policy)
    augment: bool = True
    fraction: float = 1.0
    image_size: int | None = None
    save_at: tuple[int, ...] = ()
    precision: str = "auto"
    seed: int = 0
    defense: str = "none"
    delta: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if any(step < 0 for step in self.save_at):
            raise GradveilError(
                f"save-at {min(self.save_at)}: steps are counted from 0, the untrained model"
            )
        if self.protection.parts() and self.policy != Policy():
            both = f"{self.policy},then,{self.protection}"
            raise GradveilError(
                f"policy {self.policy} and defense {self.protection}: give one; for a chain, --defense {both}"
            )
        if self.delta is not None:
            self._check_delta(self.delta)

    def _check_delta(self, delta: float) -> None:
        if not 0 < delta < 1:
            raise GradveilError(f"delta {delta:g}: it must be between 0 and 1")
        if self.private is None:
            raise GradveilError(
                f"delta {delta:g}: it is for DP-SGD's epsilon, and the defense is {self.protection}; leave it out"
            )

    @cached_property
    def protection(self) -> Defense:
        """The defense, read once: its text may name a file."""
        return parse(self.defense)

    @property
    def private(self) -> DPSGD | None:
        """The part of the defense that bounds epsilon. There is at most one: it must be the first to change gradients."""
        return next((part for part in self.protection.parts() if isinstance(part, DPSGD)), None)

    def settings(self) -> dict[str, Any]:
        """As plain values, for the JSON files."""
        plain = asdict(self)
        recipe: dict[str, Any] = plain.pop("recipe")
        texts = {"policy": str(self.policy), "defense": str(self.protection)}
        return plain | recipe | texts | {"save_at": sorted(self.save_at)}

    def preparation(self) -> Prepare:
        """What each training image goes through: crop and flip, and the policy, or those of the defense."""
        policies = [part.used for part in self.protection.parts() if isinstance(part, Transforming)]
        steps = policies or [Preparation(policy=self.policy)]
        if not self.augment:
            steps = [replace(step, padding=0, flip=False) for step in steps]
        return steps[0] if len(steps) == 1 else InTurn(tuple(steps))

    def steps(self, images: int) -> int:
        """Of the whole training on this many images; a `save_at` beyond them is an error."""
        steps = -(-images // self.recipe.batch_size) * self.recipe.epochs
        if self.save_at and max(self.save_at) > steps:
            raise GradveilError(f"save-at {max(self.save_at)}: this training has {steps} steps")
        return steps

    def spent(self, images: int, steps: int) -> dict[str, float]:
        """Epsilon and delta of so many steps of DP-SGD on so many images, by Opacus' accountant; empty without DP-SGD.

        It counts as for Poisson-sampled batches, as is usual, while batches here are slices of a shuffled epoch.
        """
        if (private := self.private) is None:
            return {}
        rate, delta = (
            min(1.0, self.recipe.batch_size / images),
            1 / images if self.delta is None else self.delta,
        )
        if private.multiplier < LEAST_NOISE:
            raise GradveilError(
                f"defense {private}: with a multiplier below {LEAST_NOISE:g} there is no epsilon to speak of; take a larger one"
            )
        if private.sample_rate is not None and abs(private.sample_rate / rate - 1) > 0.01:
            raise GradveilError(
                f"defense {private}: batches of {self.recipe.batch_size} of {images} images have a sample_rate of {rate:g}"
            )
        return {"epsilon": private.epsilon(steps, delta, rate) if steps else 0.0, "delta": delta}


@dataclass(frozen=True)
class InTurn:
    """Several preparations, one after the other."""

    steps: tuple[Preparation, ...]

    def __call__(self, images: Tensor, rng: Generator) -> Tensor:
        for step in self.steps:
            images = step(images, rng)
        return images


@dataclass(frozen=True)
class TrainingResult:
    """What a run gave, and where it is. Epsilon and delta are those of DP-SGD."""

    out: Path
    checkpoint: Path
    accuracy: float
    epochs: int
    steps: int
    history: tuple[Mapping[str, float], ...]
    epsilon: float | None = None
    delta: float | None = None
