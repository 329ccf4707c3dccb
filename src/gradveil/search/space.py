"""The search space: three slots, each empty or one of 50 functions; and the trials drawn of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Trial:
    """A policy to be tried, and its number in the study."""

    number: int
    policy: Policy


@dataclass(frozen=True)
class FinishedTrial:
    """A policy that was tried, with every value that was measured before its trial ended.

    `state` is scored, inaccurate (its accuracy score is below the threshold) or dropped (by the
    race). `values` has one number for each image or batch, by the name of the quantity.
    """

    number: int
    policy: Policy
    state: str
    values: Mapping[str, tuple[float, ...]]

    def mean(self, name: str) -> float:
        return Estimate(self.values[name]).mean


def draw(seed: int, number: int) -> dict[str, str]:
    """Draw the slots of trial `number`, all choices equally likely.

    They are a function of the seed and the number alone.
    """
    drawn = torch.randint(len(CHOICES), (len(SLOTS),), generator=generator(seed, "policy", number))
    return {slot: CHOICES[int(index)] for slot, index in zip(SLOTS, drawn, strict=True)}


def policy_of(slots: Mapping[str, str]) -> Policy:
    """The policy of these slots without the empty ones; all empty, it changes nothing."""
    return Policy((tuple(Transform.parse(slots[slot]) for slot in SLOTS if slots[slot] != EMPTY),))


Function = tuple[str, float]
"""An operation and its magnitude in units: the library repeats some under several numbers."""


def functions(policy: Policy, channels: int = 3) -> tuple[tuple[Function, ...], ...]:
    """The functions of each member that change images of so many channels.

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
    """Indices of the policies, in order, without those that do the same as an earlier policy."""
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
