"""The interface of an attack: observations of some victims in, a reconstruction of each out."""

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import ClassVar, NamedTuple, final, overload

import torch
from torch import Generator, Tensor

from gradveil.core.boundary import check_value
from gradveil.core.errors import GradveilError, kind_of, text_of
from gradveil.core.importing import contained, user_code
from gradveil.core.seeds import as_generator
from gradveil.core.types import Knowledge, Observation, Reconstruction
from gradveil.engine.gradients import plain_attention

Progress = Callable[[int, int], None]
"""Called with (iterations done, iterations in all), for a progress bar."""


class About(NamedTuple):
    """What people are told of a named attack, each in a few words."""

    line: str
    use: str
    cost: str
    paper: str


class Attack(ABC):
    """Reconstruct images from what clients share.

    A subclass is a frozen dataclass whose fields are its settings, and implements `reconstruct`;
    callers call the attack itself. Its number of iterations, if it iterates, is a field `steps`,
    and its number of attempts a field `restarts`, so that checks can run a short version of it.
    `easy_model` names the model on which it is known to work untrained, for its positive control.
    """

    easy_model: ClassVar[str] = "lenet"

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the `Knowledge` fields without which the attack cannot run."""
        return ()

    @property
    def title(self) -> str:
        """The name of the attack in messages."""
        return str(self)

    @overload
    def __call__(
        self, seen: Observation, seed: int | Generator, progress: Progress | None = None
    ) -> Reconstruction: ...

    @overload
    def __call__(
        self, seen: Sequence[Observation], seed: int | Generator, progress: Progress | None = None
    ) -> list[Reconstruction]: ...

    @final
    def __call__(
        self,
        seen: Observation | Sequence[Observation],
        seed: int | Generator,
        progress: Progress | None = None,
    ) -> Reconstruction | list[Reconstruction]:
        """Return one reconstruction for one observation, or a list of them in the order of many.

        All victims must share one model, one batch size and one protocol. A generator given as
        `seed` is used as it is, and moves on.
        """
        check_value(seed, int | Generator, "seed")
        check_value(progress, Progress | None, "progress")
        victims = _victims(seen)
        with contained(), _second_slopes(), plain_attention():
            check_attack(self)
            for victim in victims:
                victim.knowledge.need(*self.needs, by=self.title)
            rng = as_generator(seed, "attack")
            found: object = self.reconstruct(victims, rng, progress or _ignore) if victims else []
        checked = _reconstructions(found, victims, type(self).__name__)
        return checked[0] if isinstance(seen, Observation) else checked

    @abstractmethod
    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        """Return one reconstruction for each victim, in their order; there is at least one."""


def check_attack(attack: Attack) -> None:
    """Refuse a class whose members are not what `Attack` says of them, before it is called."""
    name = type(attack).__name__
    with user_code(f"attack {name}: its needs and title cannot be read"):
        needs: object = attack.needs
        title: object = attack.title
    if not isinstance(needs, tuple) or not all(each in KNOWN for each in needs):
        raise GradveilError(
            f"attack {name}: its needs are {_short(needs)}; expected a tuple of any of "
            f"{', '.join(KNOWN)}"
        )
    if not isinstance(title, str):
        raise GradveilError(f"attack {name}: its title is {kind_of(title)}; expected a text")
    try:
        inspect.signature(attack.reconstruct).bind((), None, None)
    except TypeError as error:
        raise GradveilError(
            f"attack {name}: reconstruct cannot be called with seen, rng and progress: {error}"
        ) from None


def not_an_attack(value: object, name: str, more: str = "") -> GradveilError:
    """Return the error for an argument that is no attack; `more` says what else it may be."""
    example = "gradveil.attacks.dlg"
    if isinstance(value, type) and issubclass(value, Attack):
        example = f"{value.__name__}(...)"
    return GradveilError(
        f"{name}: {kind_of(value)}; expected an Attack, such as {example}, or its name{more}"
    )


@contextmanager
def _second_slopes() -> Iterator[None]:
    """Turn torch's error that it has no slope of a slope into one line that says what to do."""
    try:
        yield
    except RuntimeError as error:
        missing = re.search(
            r"derivative for aten::(\w+?)(_backward)? is not implemented", str(error)
        )
        if missing is None:
            raise
        raise GradveilError(
            f"torch has no second derivative of {missing[1]}, in the client's loss or model, and "
            "the attack needs it; write that in other functions, or choose an attack that matches "
            "no gradients, such as peeling or closed-form"
        ) from error


def _victims(seen: object) -> list[Observation]:
    """Return the observations as a list; refuse anything else, and victims that do not fit."""
    if isinstance(seen, Observation):
        return [seen]
    if not isinstance(seen, Sequence) or isinstance(seen, str):
        raise _not_seen(seen)
    victims = []
    for victim in seen:
        if not isinstance(victim, Observation):
            raise _not_seen(victim)
        victims.append(victim)
    for victim in victims:
        if (
            victim.model is not victims[0].model
            or victim.size != victims[0].size
            or victim.protocol != victims[0].protocol
        ):
            raise GradveilError(
                "victims attacked together must share one model, one batch size and one protocol"
            )
    return victims


KNOWN = tuple(field.name for field in fields(Knowledge))


def _reconstructions(
    found: object, victims: Sequence[Observation], name: str
) -> list[Reconstruction]:
    """Return what an attack found of each victim; refuse what is none: the attack may be anyone's.

    Values that are not finite are no fault: who scores them says that the attack failed.
    """
    wanted = f"a list with one for each of {len(victims)} victim(s)"
    if not isinstance(found, list | tuple):
        raise _wrong(name, kind_of(found), wanted)
    if len(found) != len(victims):
        raise _wrong(name, f"{len(found)} reconstruction(s)", wanted)
    for each, victim in zip(found, victims, strict=True):
        if not isinstance(each, Reconstruction):
            raise _wrong(name, f"{kind_of(each)} for a victim", "a Reconstruction")
        shape = (victim.size, *victim.image_shape)
        _check_tensor(name, "images", each.images, shape, whole=False)
        if each.labels is not None:
            _check_tensor(name, "labels", each.labels, (victim.size,), whole=True)
        if each.frames is not None:
            steps = (len(each.frame_steps), *shape)
            _check_tensor(name, "frames", each.frames, steps, whole=False)
        if each.certain is not None:
            _check_flags(name, each.certain, victim.size)
        for part, kind in (("distance", float | int), ("status", str)):
            if not isinstance(getattr(each, part), kind):
                got = f"a {part} that is {kind_of(getattr(each, part))}"
                raise _wrong(name, got, "a number" if part == "distance" else "a text")
        if each.aims_at not in AIMS:
            raise _wrong(name, f"aims_at {each.aims_at!r}", " or ".join(AIMS))
    return list(found)


AIMS = ("used", "original")


def _check_tensor(
    attack: str, name: str, value: object, shape: tuple[int, ...], *, whole: bool
) -> None:
    wanted = f"{'class indices' if whole else 'floats in [0, 1]'} of shape {shape}"
    if not isinstance(value, Tensor):
        raise _wrong(attack, f"{name} that are {kind_of(value)}", wanted)
    right = value.dtype in INDICES if whole else value.is_floating_point()
    if not right or tuple(value.shape) != shape:
        raise _wrong(attack, f"{name} of type {value.dtype}, shape {tuple(value.shape)}", wanted)


def _check_flags(attack: str, value: object, size: int) -> None:
    if (
        not isinstance(value, Tensor)
        or value.dtype is not torch.bool
        or tuple(value.shape) != (size,)
    ):
        raise _wrong(attack, f"certain that is {kind_of(value)}", f"booleans of shape ({size},)")


INDICES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def _wrong(attack: str, found: str, expected: str) -> GradveilError:
    return GradveilError(f"attack {attack}: reconstruct gave {found}; expected {expected}")


def _short(value: object) -> str:
    return text_of(value, kind_of(value))[:200]


def _not_seen(value: object) -> GradveilError:
    return GradveilError(
        f"an attack got a value of type {type(value).__name__}: expected an Observation or a "
        "sequence of them, such as the `.seen` of what a client shares"
    )


def _ignore(done: int, total: int) -> None:
    """Show no progress."""
