"""The settings of a training run, its result and its folder. Nothing here needs Lightning."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil.core.boundary import check_fields, check_shown
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.files import digest
from gradveil.core.job_folder import SETTINGS, Kind, remove_empty
from gradveil.core.schedule import count_decays
from gradveil.data import load
from gradveil.data.images import Images, as_images, balanced, divided
from gradveil.defenses import DPSGD, Defense, chain
from gradveil.defenses.applied import check_defense
from gradveil.models import NormalizedName
from gradveil.models.factories import check_weights_exist
from gradveil.models.normalized import constants_setting, plain_name
from gradveil.transforms import Preparation

RUN = Kind("a training", "training run")
FINAL = "model.safetensors"
RESUME = "resume.ckpt"
METRICS = "metrics.csv"
STEPS = "steps"
TENSORBOARD = "tensorboard"
DIGITS = 16  # of a digest that stands for a user's own model or images


def step_path(out: Path, step: int) -> Path:
    """Return where the weights after this step are saved."""
    return out / STEPS / f"step-{step:06d}.safetensors"


def refuse_other(out: Path, wanted: Mapping[str, Any]) -> None:
    """Refuse a folder that holds anything but this job's run. Nothing is written.

    Earlier versions wrote a policy beside the defense: settings that mean the same are equal.
    """
    there = RUN.read(out) if (out / SETTINGS).is_file() else {}
    if "policy" in there:
        policy, defense = there["policy"], there.get("defense", "none")
        same = (policy if defense == "none" else defense) == wanted["defense"]
        old = {"policy": policy, "defense": defense} if same else {"policy": "none"}
        wanted = {**wanted, **old}
    RUN.refuse_other(out, wanted)


def release(out: Path) -> None:
    """Give the folder back after a failure, unless it holds weights or a point to go on from."""
    if (out / RESUME).exists() or any(out.glob(f"{STEPS}/*.safetensors")):
        return
    shutil.rmtree(out / TENSORBOARD, ignore_errors=True)
    facts = Path(FINAL).with_suffix(".json")  # written before the weights that they are of
    for path in (
        *out.glob(f"{STEPS}/*.json"),
        *(out / name for name in (facts, METRICS, SETTINGS)),
    ):
        path.unlink(missing_ok=True)
    remove_empty(out / STEPS, out)


LARGEST = torch.finfo(torch.float32).max  # the optimizer's step cannot use a larger number
FINITE = "finite as a float32"


@dataclass(frozen=True)
class Recipe:
    """SGD with Nesterov momentum, as Gao et al. 2021 train.

    The learning rate is divided by ten at 3/8, 5/8 and 7/8 of the epochs. `loss_scale` multiplies
    the training loss. The published code trains with 0.5 while its attacker uses 1: an option
    here, never the default.
    """

    epochs: int = 60
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 128
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name, right, rule in (
            ("epochs", self.epochs >= 0, "at least 0"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1"),
            ("weight_decay", 0 <= self.weight_decay <= LARGEST, f"at least 0 and {FINITE}"),
            ("lr", 0 < self.lr <= LARGEST, f"above 0 and {FINITE}"),
            ("loss_scale", 0 < self.loss_scale <= LARGEST, f"above 0 and {FINITE}"),
        ):
            if not right:
                raise GradveilError(
                    f"{name.replace('_', ' ')} {getattr(self, name)}: it must be {rule}"
                )

    def rate(self, epoch: int) -> float:
        """Return the learning rate of this epoch, counted from 0."""
        return self.lr * 0.1 ** count_decays(epoch, self.epochs)

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """Make the optimizer of this model; plain descent without momentum."""
        nesterov = self.momentum > 0
        return torch.optim.SGD(
            model.parameters(),
            self.lr,
            self.momentum,
            weight_decay=self.weight_decay,
            nesterov=nesterov,
        )

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scaled cross-entropy, as the mean over the batch."""
        return self.loss_scale * cross_entropy(logits, labels)


LATER = ("recipe", "test", "channels", "start")
"""Fields that are written in another way, or only where they are set."""

PRECISIONS = ("auto", "32", "bf16")
LEAST_NOISE = 1e-20  # a multiplier below it tells nothing, and Opacus' accountant may never end
Prepare = Callable[[Tensor, Generator], Tensor]


@dataclass(frozen=True)
class TrainingJob:
    """Everything that decides the result of a training run.

    `data` and `model` are names, or the images and the module themselves; a module is copied, never
    changed. `test` are images to measure the accuracy on: by default the test split of named data,
    or about a fifth of the images given. Where no defense changes images, training crops and flips
    them; `augment` off leaves that out, in a policy too. `delta` is that of DP-SGD's epsilon: by
    default 1 / the number of training images. `channels` 3 makes gray images of a named data set
    color, 1 the reverse. `start` is a file of weights that the training starts from.
    """

    data: Images | str
    model: nn.Module | str | NormalizedName
    recipe: Recipe = field(default_factory=Recipe)
    defense: Defense = field(default_factory=Defense)
    augment: bool = True
    fraction: float = 1.0
    image_size: int | None = None
    save_at: tuple[int, ...] = ()
    precision: str = "auto"
    seed: int = 0
    delta: float | None = None
    test: Images | str | None = None
    channels: int | None = None
    start: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_defense(self.defense)
        check_shown(self.defense, "__str__", "defense")
        if isinstance(self.model, nn.Module):
            check_weights_exist(self.model)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if any(step < 0 for step in self.save_at):
            raise GradveilError(
                f"save-at {min(self.save_at)}: steps are counted from 0, the untrained model"
            )
        if self.delta is not None:
            self._check_delta(self.delta)

    def _check_delta(self, delta: float) -> None:
        if not 0 < delta < 1:
            raise GradveilError(f"delta {delta:g}: it must be between 0 and 1")
        if self.private is None:
            raise GradveilError(
                f"delta {delta:g}: it is for DP-SGD's epsilon, and the defense is {self.defense}; "
                "leave it out"
            )

    @property
    def private(self) -> DPSGD | None:
        """The part of the defense that bounds epsilon.

        There is at most one: it must be the first to change gradients.
        """
        return next((part for part in self.defense.parts() if isinstance(part, DPSGD)), None)

    @property
    def acting(self) -> Defense:
        """The defense as training applies it: without crop and flip where `augment` is off."""
        return self.defense if self.augment else self.defense.without_augmentation()

    def settings(self) -> dict[str, Any]:
        """Return plain values for the JSON files; a user's own model or images by what they are."""
        kept = [each.name for each in fields(self) if each.name not in LATER]
        plain = {name: getattr(self, name) for name in kept} | asdict(self.recipe)
        plain |= {"data": self._data, "model": self.model_name, "defense": str(self.defense)}
        plain |= {} if self.test is None else {"test": _images_text(self.test)}
        plain |= {} if self.channels is None else {"channels": self.channels}
        plain |= {} if self.start is None else {"start": str(self.start)}
        plain |= constants_setting(self.model)
        return plain | {"save_at": sorted(self.save_at)}

    @cached_property
    def _data(self) -> str:
        return _images_text(self.data)

    @cached_property
    def model_name(self) -> str:
        """The model's name; of a module its class, the number of its parameters and a digest."""
        if not isinstance(self.model, nn.Module):
            return plain_name(self.model)
        count = sum(parameter.numel() for parameter in self.model.parameters())
        found = digest(self.model.state_dict())[:DIGITS]
        return f"{type(self.model).__name__}: {count} parameters, sha256 {found}"

    def splits(self, root: Path | None = None) -> tuple[Images, Images]:
        """Return the training images, as many as `fraction` asks for, and the test images."""
        size, planes = self.image_size, self.channels
        if isinstance(self.data, str):
            train = load(
                self.data,
                "train",
                root=root,
                image_size=size,
                channels=planes,
                fraction=self.fraction,
                seed=self.seed,
            )
            test = self.data if self.test is None else self.test
        else:
            whole = as_images(self.data, name=self.data.name)
            train, test = (whole, self.test) if self.test is not None else divided(whole)
            train = self._part(train)
        if isinstance(test, str):
            return train, load(test, "test", root=root, image_size=size, channels=planes)
        return train, _checked_test(test, train)

    def _part(self, train: Images) -> Images:
        if self.image_size not in (None, train.size):
            raise GradveilError(
                f"image size {self.image_size}: the images given are {train.size} x {train.size}; "
                "resize them, or leave it out"
            )
        if not 0 < self.fraction <= 1:
            raise GradveilError(
                f"fraction {self.fraction!r} is out of range: choose above 0 and at most 1"
            )
        if self.channels not in (None, train.channels):
            raise GradveilError(
                f"channels {self.channels}: the images given have {train.channels}; leave it out"
            )
        if self.fraction == 1:
            return train
        return train.select(balanced(train.labels, self.fraction, self.seed))

    def preparation(self) -> Prepare | None:
        """Return what uint8 images go through before they are floats: crop and flip, policies.

        None where a part of the defense has to see each batch itself (see `on_batch`).
        """
        if self.on_batch is not None:
            return None
        steps = [part.preparation for part in self.acting.parts() if part.acts_on == "batch"]
        known = [step for step in steps if step is not None]
        if not known:
            plain = Preparation()
            return plain if self.augment else replace(plain, padding=0, flip=False)
        return known[0] if len(known) == 1 else InTurn(tuple(known))

    @property
    def on_batch(self) -> Defense | None:
        """What of the defense changes each batch, where `preparation` cannot do it."""
        parts = [part for part in self.acting.parts() if part.acts_on == "batch"]
        return None if all(part.preparation for part in parts) else chain(parts)

    def steps(self, images: int) -> int:
        """Count the steps of a training on this many images; refuse a `save_at` beyond them."""
        steps = -(-images // self.recipe.batch_size) * self.recipe.epochs
        if self.save_at and max(self.save_at) > steps:
            raise GradveilError(f"save-at {max(self.save_at)}: this training has {steps} steps")
        return steps

    def spent(self, images: int, steps: int) -> dict[str, float]:
        """Return epsilon and delta of so many steps of DP-SGD on so many images.

        By Opacus' accountant, which counts as for Poisson-sampled batches, as is usual, while
        batches here are slices of a shuffled epoch. Empty without DP-SGD.
        """
        if (private := self.private) is None:
            return {}
        rate = min(1.0, self.recipe.batch_size / images)
        delta = 1 / images if self.delta is None else self.delta
        if private.multiplier < LEAST_NOISE:
            raise GradveilError(
                f"defense {private}: with a multiplier below {LEAST_NOISE:g} there is no epsilon "
                "to speak of; take a larger one"
            )
        if private.sample_rate is not None and abs(private.sample_rate / rate - 1) > 0.01:
            raise GradveilError(
                f"defense {private}: batches of {self.recipe.batch_size} of {images} images have a "
                f"sample_rate of {rate:g}"
            )
        return {"epsilon": private.epsilon(steps, delta, rate) if steps else 0.0, "delta": delta}

    @property
    def folder(self) -> Path:
        """Where the run goes by default: runs/train-DATA-MODEL-SEED."""
        data = self.data if isinstance(self.data, str) else self.data.name
        model = plain_name(self.model)
        return Path("runs") / f"train-{_file_name(data)}-{_file_name(model)}-{self.seed}"


def _images_text(images: Images | str) -> str:
    if isinstance(images, str):
        return images
    return f"{images.name}: {len(images)} images, sha256 {images.digest()[:DIGITS]}"


def _checked_test(test: Images, train: Images) -> Images:
    """Return the test images, which must be like the training images and of their classes."""
    found = as_images(test, name="test", classes=train.classes)
    if found.images.shape[1:] != train.images.shape[1:]:
        raise GradveilError(
            f"test: images of shape {tuple(found.images.shape[1:])}; those to train on have "
            f"{tuple(train.images.shape[1:])}"
        )
    return found


def _file_name(name: str) -> str:
    letters = (letter if letter.isalnum() or letter in "-_" else "-" for letter in name)
    return "".join(letters).strip("-")


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
    """What a run gave, and where it is. Epsilon and delta are those of DP-SGD.

    `model` is the trained model on the CPU, with what the defense put into it.
    """

    out: Path
    checkpoint: Path
    accuracy: float
    epochs: int
    steps: int
    history: tuple[Mapping[str, float], ...]
    model: nn.Module = field(repr=False, compare=False)
    epsilon: float | None = None
    delta: float | None = None
