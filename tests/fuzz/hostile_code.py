"""User code that fails in every way we know: models, factories, defenses, attacks and losses.

Each is small and takes 3 x 8 x 8 images of 10 classes. A class whose `may_work` is True may also do
its work; every other has to be refused in one line.
"""

# ruff: noqa: ARG001, ARG005

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack
from gradveil.core.types import Batch, Knowledge, Loss, Reconstruction
from gradveil.defenses import Defense, Moment


class MuteError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class LeavingError(Exception):
    """An error whose text ends the program."""

    def __str__(self) -> str:
        sys.exit(4)


class Plain(nn.Module):
    """A model that works: the others change it."""

    may_work: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 10)
        with torch.no_grad():
            for number, value in enumerate(self.parameters()):
                wave = torch.arange(value.numel()).add(number).mul(0.7).sin()
                value.copy_(wave.view_as(value) / 14)

    def forward(self, images: Any) -> Any:
        return self.layer(images.flatten(1))


class Raises(Plain):
    def forward(self, images: Any) -> Any:
        raise RuntimeError("two\nlines \x1b[31m")


class Exits(Plain):
    def forward(self, images: Any) -> Any:
        sys.exit(3)


class Mute(Plain):
    def forward(self, images: Any) -> Any:
        raise MuteError


class Leaves(Plain):
    def forward(self, images: Any) -> Any:
        raise LeavingError


class Stops(Plain):
    def forward(self, images: Any) -> Any:
        raise StopIteration


class Recurses(Plain):
    def forward(self, images: Any) -> Any:
        return self.forward(images)


class OutOfMemory(Plain):
    def forward(self, images: Any) -> Any:
        raise MemoryError


class Later(Plain):
    """Does its work for some calls, then fails; copies count on."""

    may_work = True
    calls = 4

    def __init__(self) -> None:
        super().__init__()
        self.left = self.calls

    def forward(self, images: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            self.fail()
        return super().forward(images)

    def fail(self) -> NoReturn:
        raise RuntimeError("no more")


class ExitsLater(Later):
    def fail(self) -> NoReturn:
        sys.exit(0)


class ExitsMuchLater(ExitsLater):
    calls = 25


class MuteLater(Later):
    def fail(self) -> NoReturn:
        raise MuteError


class NoGrad(Plain):
    @torch.no_grad()
    def forward(self, images: Any) -> Any:
        return super().forward(images)


class Inference(Plain):
    @torch.inference_mode()
    def forward(self, images: Any) -> Any:
        return super().forward(images)


class Detached(Plain):
    def forward(self, images: Any) -> Any:
        return super().forward(images).detach()


class FromNumpy(Plain):
    """Its gradient does not depend on the images as far as autograd knows."""

    may_work = True

    def forward(self, images: Any) -> Any:
        return super().forward(torch.from_numpy(images.detach().cpu().numpy()))


class Numpy(Plain):
    may_work = True

    def forward(self, images: Any) -> Any:
        return super().forward(torch.from_numpy(images.numpy()))


class ThroughNumpy(Plain):
    def forward(self, images: Any) -> Any:
        return torch.from_numpy(np.asarray(super().forward(images).detach()))


class InPlace(Plain):
    def forward(self, images: Any) -> Any:
        return super().forward(images.mul_(0.5))


class Complex(Plain):
    def forward(self, images: Any) -> Any:
        return torch.complex(super().forward(images), super().forward(images))


class Whole(Plain):
    def forward(self, images: Any) -> Any:
        return super().forward(images).long()


class Flags(Plain):
    def forward(self, images: Any) -> Any:
        return super().forward(images) > 0


class Tuple(Plain):
    def forward(self, images: Any) -> Any:
        return super().forward(images), images


class Dictionary(Plain):
    def forward(self, images: Any) -> Any:
        return {"logits": super().forward(images)}


class Nothing(Plain):
    def forward(self, images: Any) -> Any:
        return None


class Number(Plain):
    def forward(self, images: Any) -> Any:
        return super().forward(images).mean()


class Deep(Plain):
    def forward(self, images: Any) -> Any:
        return super().forward(images)[:, None]


class LosesRows(Plain):
    may_work = True  # with one image in a batch

    def forward(self, images: Any) -> Any:
        return super().forward(images)[:1]


class Sparse(Plain):
    def forward(self, images: Any) -> Any:
        return super().forward(images).to_sparse()


class OtherShape(Plain):
    def forward(self, images: Any) -> Any:
        return super().forward(images[:, :1])


class NotFinite(Plain):
    may_work = True  # a reconstruction says that it diverged

    def forward(self, images: Any) -> Any:
        return (super().forward(images) - 1e9).log()


class Meta(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 10, device="meta")


class Lazy(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(10)


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Empty(nn.Module):
    may_work: ClassVar[bool] = False

    def forward(self, images: Any) -> Any:
        return images.flatten(1)[:, :10]


class NotFiniteWeights(Plain):
    may_work = True  # a training gives them up by itself

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.layer.weight, float("nan"))


class ComplexWeights(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 10, dtype=torch.complex64)


class HalfWeights(Plain):
    may_work = True

    def __init__(self) -> None:
        super().__init__()
        self.half()


class DoubleWeights(Plain):
    may_work = True

    def __init__(self) -> None:
        super().__init__()
        self.double()


class ChangesItself(Plain):
    may_work = True

    def forward(self, images: Any) -> Any:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        return super().forward(images)


class NoModes(Plain):
    def train(self, mode: bool = True) -> "NoModes":
        raise RuntimeError("no modes")


class NoCopies(Plain):
    may_work = True  # a client needs none

    def __deepcopy__(self, memo: Any) -> Any:
        sys.exit(5)


class NoState(Plain):
    may_work = True

    def state_dict(self, *arguments: Any, **more: Any) -> Any:
        sys.exit(6)


class NoName(Plain):
    may_work = True

    def __repr__(self) -> str:
        raise MuteError


MODELS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind is not nn.Module
}
del MODELS["Plain"]


def no_model() -> None:
    return None


def leaves() -> NoReturn:
    sys.exit("gone")


def mute() -> NoReturn:
    raise MuteError


def needs_more(depth: int) -> nn.Module:
    return Plain()


def a_class() -> type[nn.Module]:
    return Plain


FACTORIES = ("no_model", "leaves", "mute", "needs_more", "a_class", *MODELS)


@dataclass(frozen=True)
class Shield(Defense):
    """A defense that works, on gradients; the others change it."""

    may_work: ClassVar[bool] = False
    acts_on = "gradients"

    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        return {name: value * 0.5 for name, value in gradients.items()}, state


@dataclass(frozen=True)
class Screen(Defense):
    """A defense that works, on images; the others change it."""

    may_work: ClassVar[bool] = False
    acts_on = "batch"

    def protect_batch(self, batch: Any, rng: Any) -> Any:
        return Batch(batch.images * 0.5, batch.labels)


@dataclass(frozen=True)
class Guard(Defense):
    """A defense that works, on the model; the others change it."""

    may_work: ClassVar[bool] = False
    acts_on = "model"

    def protect_model(self, model: Any, image_shape: Any = None) -> Any:
        return copy.deepcopy(model)


class ShieldRaises(Shield):
    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        raise KeyError("two\nlines")


class ShieldExits(Shield):
    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        sys.exit(0)


class ShieldMute(Shield):
    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        raise MuteError


class ShieldNothing(Shield):
    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        return None


class ShieldNoState(Shield):
    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        return gradients


class ShieldNames(Shield):
    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        return {f"x.{name}": value for name, value in gradients.items()}, state


class ShieldShapes(Shield):
    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        return {name: value[None] for name, value in gradients.items()}, state


class ShieldTypes(Shield):
    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        return {name: value.to(torch.complex64) for name, value in gradients.items()}, state


class ShieldNumpy(Shield):
    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        return {name: value.numpy() for name, value in gradients.items()}, state


class ShieldNotFinite(Shield):
    def protect_gradients(self, gradients: Any, moment: Moment, state: Any, rng: Any) -> Any:
        return {name: value / 0 for name, value in gradients.items()}, state


class ShieldNoStart(Shield):
    def start(self) -> Any:
        sys.exit(1)


class ScreenExits(Screen):
    def protect_batch(self, batch: Any, rng: Any) -> Any:
        sys.exit(1)


class ScreenNothing(Screen):
    def protect_batch(self, batch: Any, rng: Any) -> Any:
        return None


class ScreenShapes(Screen):
    def protect_batch(self, batch: Any, rng: Any) -> Any:
        return Batch(batch.images[:, :, 1:], batch.labels)


class ScreenTypes(Screen):
    def protect_batch(self, batch: Any, rng: Any) -> Any:
        return Batch((batch.images * 255).to(torch.uint8), batch.labels)


class ScreenRange(Screen):
    def protect_batch(self, batch: Any, rng: Any) -> Any:
        return Batch(batch.images * 9 - 4, batch.labels)


class ScreenLabels(Screen):
    may_work = True  # a training's labels are looked at by torch alone

    def protect_batch(self, batch: Any, rng: Any) -> Any:
        return Batch(batch.images, batch.labels + 1_000)


class ScreenReveal(Screen):
    may_work = True  # a training reveals nothing

    def reveal(self, images: Tensor, rng: Generator) -> Any:
        sys.exit(1)


class GuardExits(Guard):
    def protect_model(self, model: Any, image_shape: Any = None) -> Any:
        sys.exit(1)


class GuardNothing(Guard):
    def protect_model(self, model: Any, image_shape: Any = None) -> Any:
        return None


class GuardClass(Guard):
    def protect_model(self, model: Any, image_shape: Any = None) -> Any:
        return Plain


class GuardFrozen(Guard):
    def protect_model(self, model: Any, image_shape: Any = None) -> Any:
        return Frozen()


class GuardNoGrad(Guard):
    def protect_model(self, model: Any, image_shape: Any = None) -> Any:
        return NoGrad()


class GuardShapes(Guard):
    def protect_model(self, model: Any, image_shape: Any = None) -> Any:
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))


class LossNothing(Shield):
    def protect_loss(self, loss: Loss) -> Any:
        return None


class LossExits(Shield):
    def protect_loss(self, loss: Loss) -> Any:
        sys.exit(1)


class LossWrong(Shield):
    def protect_loss(self, loss: Loss) -> Any:
        return lambda logits, labels: None


class TellNothing(Shield):
    may_work = True  # a training tells nobody

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Any:
        return None


class TellExits(Shield):
    may_work = True

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Any:
        sys.exit(1)


class PartsNothing(Shield):
    def parts(self) -> Any:
        return None


class PartsWrong(Shield):
    def parts(self) -> Any:
        return ("prune:0.5",)


class WithoutNothing(Shield):
    may_work = True

    def without_gradients(self) -> Any:
        return None


class RandomExits(Shield):
    may_work = True

    @property
    def random(self) -> bool:
        sys.exit(1)


class NoText(Shield):
    may_work = True  # a client alone needs none

    def __str__(self) -> str:
        raise MuteError


class TextIsNone(Shield):
    may_work = True

    def __str__(self) -> Any:
        return None


class WrongSeam(Shield):
    may_work = True
    acts_on = "everything"  # type: ignore[assignment]


class WrongBreakers(Shield):
    may_work = True
    breakers = ("nonsense",)


class NoBreakers(Shield):
    may_work = True
    breakers = None  # type: ignore[assignment]


class Undeclared(Shield):
    """Its settings are not in its text, so two of them could share a folder."""

    may_work = True  # by a client alone

    def __init__(self, strength: float = 1.0) -> None:
        object.__setattr__(self, "strength", strength)


@dataclass(frozen=True)
class WithObject(Shield):
    may_work = True
    setting: object = field(default_factory=object)


@dataclass(frozen=True)
class WithLambda(Shield):
    may_work = True
    setting: Callable[[int], int] = field(default=lambda x: x)


@dataclass(frozen=True)
class WithTensor(Shield):
    may_work = True
    setting: Any = field(default_factory=lambda: torch.rand(3000))


DEFENSES: dict[str, type[Defense]] = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Shield | Screen | Guard)
}
for working in ("Shield", "Screen", "Guard"):
    del DEFENSES[working]


@dataclass(frozen=True)
class Guess(Attack):
    """An attack that works; the others change it."""

    may_work: ClassVar[bool] = False
    steps: int = 1

    def reconstruct(self, seen: Sequence[Any], rng: Any, progress: Any) -> Any:
        return [self.one(victim) for victim in seen]

    def one(self, victim: Any) -> Any:
        images = torch.full((victim.size, *victim.image_shape), 0.25)
        return Reconstruction(images, None, 0.5)


class GuessRaises(Guess):
    def one(self, victim: Any) -> Any:
        raise ValueError("two\nlines")


class GuessExits(Guess):
    def one(self, victim: Any) -> Any:
        sys.exit(0)


class GuessMute(Guess):
    def one(self, victim: Any) -> Any:
        raise MuteError


class GuessRecurses(Guess):
    def one(self, victim: Any) -> Any:
        return self.one(victim)


class GuessNothing(Guess):
    def reconstruct(self, seen: Sequence[Any], rng: Any, progress: Any) -> Any:
        return None


class GuessNone(Guess):
    def reconstruct(self, seen: Sequence[Any], rng: Any, progress: Any) -> Any:
        return []


class GuessMore(Guess):
    def reconstruct(self, seen: Sequence[Any], rng: Any, progress: Any) -> Any:
        return [self.one(victim) for victim in (*seen, *seen)]


class GuessLazy(Guess):
    def reconstruct(self, seen: Sequence[Any], rng: Any, progress: Any) -> Any:
        return (self.one(victim) for victim in seen)


class GuessTensors(Guess):
    def one(self, victim: Any) -> Any:
        return torch.zeros(victim.size, *victim.image_shape)


class GuessNulls(Guess):
    def one(self, victim: Any) -> Any:
        return None


class GuessShapes(Guess):
    def one(self, victim: Any) -> Any:
        return Reconstruction(torch.zeros(victim.size, 1, 2, 3), None, 0.5)


class GuessCounts(Guess):
    def one(self, victim: Any) -> Any:
        return Reconstruction(torch.zeros(victim.size + 1, *victim.image_shape), None, 0.5)


class GuessNotFinite(Guess):
    may_work = True  # a record says that it failed

    def one(self, victim: Any) -> Any:
        nothing = torch.full((victim.size, *victim.image_shape), float("nan"))
        return Reconstruction(nothing, None, float("nan"))


class GuessWhole(Guess):
    def one(self, victim: Any) -> Any:
        images = torch.zeros(victim.size, *victim.image_shape, dtype=torch.long)
        return Reconstruction(images, None, 0.5)


class GuessComplex(Guess):
    def one(self, victim: Any) -> Any:
        images = torch.zeros(victim.size, *victim.image_shape, dtype=torch.complex64)
        return Reconstruction(images, None, 0.5)


class GuessNumpy(Guess):
    def one(self, victim: Any) -> Any:
        images: Any = np.zeros((victim.size, *victim.image_shape))
        return Reconstruction(images, None, 0.5)


class GuessLabels(Guess):
    def one(self, victim: Any) -> Any:
        images = torch.zeros(victim.size, *victim.image_shape)
        return Reconstruction(images, torch.zeros(victim.size + 3), 0.5)


class GuessLabelList(Guess):
    def one(self, victim: Any) -> Any:
        labels: Any = [0] * victim.size
        return Reconstruction(torch.zeros(victim.size, *victim.image_shape), labels, 0.5)


class GuessDistance(Guess):
    def one(self, victim: Any) -> Any:
        far: Any = "far"
        return Reconstruction(torch.zeros(victim.size, *victim.image_shape), None, far)


class GuessStatus(Guess):
    def one(self, victim: Any) -> Any:
        status: Any = None
        return Reconstruction(torch.zeros(victim.size, *victim.image_shape), None, 0.5, status)


class GuessFrames(Guess):
    def one(self, victim: Any) -> Any:
        images = torch.zeros(victim.size, *victim.image_shape)
        return Reconstruction(images, None, 0.5, "ok", torch.zeros(2), (0,))


class GuessAims(Guess):
    def one(self, victim: Any) -> Any:
        images = torch.zeros(victim.size, *victim.image_shape)
        aims: Any = "elsewhere"
        return Reconstruction(images, None, 0.5, aims_at=aims)


class GuessSlopes(Guess):
    may_work = True

    def one(self, victim: Any) -> Any:
        images = torch.zeros(victim.size, *victim.image_shape, requires_grad=True)
        return Reconstruction(images, None, 0.5)


class NeedsExits(Guess):
    @property
    def needs(self) -> tuple[str, ...]:
        sys.exit(1)


class NeedsNonsense(Guess):
    @property
    def needs(self) -> tuple[str, ...]:
        return ("nonsense",)


class NeedsText(Guess):
    @property
    def needs(self) -> Any:
        return "labels"


class TitleExits(Guess):
    may_work = True

    @property
    def title(self) -> str:
        sys.exit(1)


class ReprExits(Guess):
    may_work = True

    def __repr__(self) -> str:
        sys.exit(1)


class Settings(Guess):
    """Its settings are not in its text."""

    may_work = True  # where it is called by itself

    def __init__(self, strength: float = 1.0) -> None:
        object.__setattr__(self, "strength", strength)
        object.__setattr__(self, "steps", 1)


class Bare(Attack):
    """No dataclass: its text is an address."""

    may_work: ClassVar[bool] = True

    def __init__(self, strength: float = 1.0) -> None:
        self.strength = strength

    def reconstruct(self, seen: Sequence[Any], rng: Any, progress: Any) -> Any:
        return Guess().reconstruct(seen, rng, progress)


@dataclass(frozen=True)
class GuessWithLambda(Guess):
    may_work = True
    setting: Callable[[int], int] = field(default=lambda x: x)


@dataclass(frozen=True)
class GuessWithTensor(Guess):
    may_work = True
    setting: Any = field(default_factory=lambda: torch.rand(3000))


ATTACKS: dict[str, Attack] = {
    kind.__name__: kind()
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Guess | Bare) and kind is not Guess
}
VALUES = {f"VALUE_{name}": attack for name, attack in ATTACKS.items()}
globals().update(VALUES)  # for a command line, which names values


def loss_raises(logits: Any, labels: Any) -> Any:
    raise RuntimeError("two\nlines")


def loss_exits(logits: Any, labels: Any) -> Any:
    sys.exit(1)


def loss_mute(logits: Any, labels: Any) -> Any:
    raise MuteError


def loss_nothing(logits: Any, labels: Any) -> Any:
    return None


def loss_tuple(logits: Any, labels: Any) -> Any:
    return logits.sum(1), labels


def loss_mean(logits: Any, labels: Any) -> Any:
    return logits.mean()


def loss_flat(logits: Any, labels: Any) -> Any:
    return torch.zeros(len(logits))


def loss_whole(logits: Any, labels: Any) -> Any:
    return labels


def loss_complex(logits: Any, labels: Any) -> Any:
    return torch.complex(logits.sum(1), logits.sum(1))


LOSSES: dict[str, Any] = {
    name: value for name, value in list(globals().items()) if name.startswith("loss_")
} | {"loss_text": "cross-entropy", "loss_module_class": nn.CrossEntropyLoss}
