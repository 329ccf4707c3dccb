"""Spaces that trials are drawn of; that of a search is three slots, each empty or a function."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch

from gradveil.core.seeds import generator
from gradveil.scores.scorer import Estimate
from gradveil.transforms import LIBRARY, Policy, Transform
from gradveil.transforms.policy import POLICY_LENGTH

SAMPLERS = ("random", "tpe", "nsga2")
SLOTS = tuple(f"slot {number + 1}" for number in range(POLICY_LENGTH))
EMPTY = "empty"
CHOICES = (*(str(index) for index in range(len(LIBRARY))), EMPTY)
STATES = ("scored", "inaccurate", "dropped")


T = TypeVar("T")


@dataclass(frozen=True)
class Trial(Generic[T]):
    """A value to be tried, such as a policy, and its number in the study."""

    number: int
    tried: T


@dataclass(frozen=True)
class FinishedTrial(Generic[T]):
    """A value that was tried, with every number that was measured before its trial ended.

    `state` is scored, inaccurate (its accuracy score is below the threshold) or dropped (by the
    race). `values` has one number for each image or batch, by the name of the quantity.
    """

    number: int
    tried: T
    state: str
    values: Mapping[str, tuple[float, ...]]

    def mean(self, name: str) -> float:
        return Estimate(self.values[name]).mean


@dataclass(frozen=True)
class Scale:
    """Numbers from `low` to `high`, both above 0, drawn evenly by their logarithms."""

    low: float
    high: float


Dimension = tuple[str, ...] | Scale
"""The choices of a dimension by their names, or its numbers."""

Drawn = Mapping[str, str | float]
"""A choice or a number for each dimension, by its name."""


class Space(ABC, Generic[T]):
    """The values that a study tries: each is made of what was drawn for every dimension.

    `attribute` is the name under which a trial keeps the text of its value, `job` what messages
    call the job that tries them.
    """

    attribute: ClassVar[str]
    job: ClassVar[str]

    @property
    def first(self) -> tuple[Drawn, ...]:
        """What is drawn for the first trials, whatever the sampler would."""
        return ()

    @property
    @abstractmethod
    def dimensions(self) -> Mapping[str, Dimension]:
        """The dimensions by their names."""

    @abstractmethod
    def draw(self, seed: int, number: int) -> dict[str, str]:
        """Draw trial `number` for the sampler that learns nothing from others."""

    @abstractmethod
    def make(self, drawn: Drawn) -> T:
        """Return the value that was drawn."""

    @abstractmethod
    def text(self, value: T) -> str:
        """Return the text that a trial keeps of its value."""

    @abstractmethod
    def read(self, text: str) -> T:
        """Return the value of such a text."""


def draw(seed: int, number: int) -> dict[str, str]:
    """Draw the slots of trial `number`, all choices equally likely.

    They are a function of the seed and the number alone.
    """
    drawn = torch.randint(len(CHOICES), (len(SLOTS),), generator=generator(seed, "policy", number))
    return {slot: CHOICES[int(index)] for slot, index in zip(SLOTS, drawn, strict=True)}


def policy_of(slots: Mapping[str, str]) -> Policy:
    """Return the policy of these slots without the empty ones; all empty, it changes nothing."""
    return Policy((tuple(Transform.parse(slots[slot]) for slot in SLOTS if slots[slot] != EMPTY),))


class PolicySpace(Space[Policy]):
    """All policies of one member with up to three functions."""

    attribute = "policy"
    job = "search"

    @property
    def dimensions(self) -> Mapping[str, Dimension]:
        return dict.fromkeys(SLOTS, CHOICES)

    def draw(self, seed: int, number: int) -> dict[str, str]:
        return draw(seed, number)

    def make(self, drawn: Drawn) -> Policy:
        return policy_of({slot: str(choice) for slot, choice in drawn.items()})

    def text(self, value: Policy) -> str:
        return str(value)

    def read(self, text: str) -> Policy:
        return Policy.parse(text)


POLICIES = PolicySpace()


Function = tuple[str, float]
"""An operation and its magnitude in units: the library repeats some under several numbers."""


def functions(policy: Policy, channels: int = 3) -> tuple[tuple[Function, ...], ...]:
    """Return the functions of each member that change images of so many channels.

    Numbers of the library do not matter: `24` and `42` are the same shift, and `28` does nothing.
    """
    return tuple(_acting(member, channels) for member in policy.members)


def _acting(member: Sequence[Transform], channels: int) -> tuple[Function, ...]:
    steps: list[Function] = []
    for transform in member:
        if transform.name == "invert" and steps and steps[-1][0] == "invert":
            steps.pop()  # the second undoes the first
        elif not transform.idle(channels):
            steps.append((transform.name, transform.value))
    return tuple(steps)


def distinct(policies: Iterable[Policy]) -> list[int]:
    """Return the indices, in order, of the policies that do otherwise than all before them."""
    first: dict[object, int] = {}
    for index, policy in enumerate(policies):
        first.setdefault(functions(policy), index)
    return sorted(first.values())


def make_hybrid(
    ranked: Sequence[Policy], members: int, channels: int = 3
) -> tuple[Policy | None, str]:
    """Join at most `members` policies, best first, of which no two share a function.

    Policies that change nothing are left out: images that draw such a member would have no
    protection. Where fewer than two remain, return None and the reason.
    """
    chosen: list[Policy] = []
    taken: set[Function] = set()
    for policy in ranked:
        used = {function for member in functions(policy, channels) for function in member}
        if used and not used & taken and len(chosen) < members:
            chosen.append(policy)
            taken |= used
    if len(chosen) > 1:
        return Policy(tuple(member for policy in chosen for member in policy.members)), ""
    if not chosen:
        return None, "the policies that qualify change nothing"
    if len(ranked) == 1:
        return None, "only one policy qualifies"
    return None, f"every other policy that qualifies shares a function with {chosen[0]}"
