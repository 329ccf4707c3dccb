"""The search space: three slots, each one of the 50 functions or empty; and the names of the ways to draw from it."""

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


def draw(seed: int, number: int) -> dict[str, str]:
    """What the slots of this trial hold, all choices equally likely: a function of the seed and the trial's number alone."""
    drawn = torch.randint(len(CHOICES), (len(SLOTS),), generator=generator(seed, "policy", number))
    return {slot: CHOICES[int(index)] for slot, index in zip(SLOTS, drawn, strict=True)}


def policy_of(slots: Mapping[str, str]) -> Policy:
    """Empty slots are left out; all empty is the policy that changes nothing."""
    return Policy((tuple(Transform.parse(slots[slot]) for slot in SLOTS if slots[slot] != EMPTY),))


Function = tuple[str, float]
"""An operation and what its magnitude stands for: the library repeats some under several numbers."""


def functions(policy: Policy, channels: int = 3) -> tuple[tuple[Function, ...], ...]:
    """What a policy does, whatever the numbers it was named by: `24` and `42` are the same shift, and `28` does nothing."""
    return tuple(_acting(member, channels) for member in policy.members)


def _acting(member: Sequence[Transform], channels: int) -> tuple[Function, ...]:
    """Without what leaves images of so many channels as they are; two inversions in a row undo each other."""
    steps: list[Function] = []
    for transform in member:
        if transform.name == "invert" and steps and steps[-1][0] == "invert":
            steps.pop()
        elif not transform.idle(channels):
            steps.append((transform.name, transform.value))
    return tuple(steps)


def distinct(policies: Iterable[Policy]) -> list[int]:
    """The places of the policies that do something new, in order: of equal ones the first."""
    first: dict[object, int] = {}
    for place, policy in enumerate(policies):
        first.setdefault(functions(policy), place)
    return sorted(first.values())


def make_hybrid(
    ranked: Sequence[Policy], members: int, channels: int = 3
) -> tuple[Policy | None, str]:
    """Best first of all that qualify, each that shares no function with those before it; None where there are not two, and why.

    A policy that changes nothing is left out: images that draw it would have no protection.
    """
    chosen: list[Policy] = []
    taken: set[Function] = set()
    for policy in ranked:
        own = {function for member in functions(policy, channels) for function in member}
        if own and not own & taken and len(chosen) < members:
            chosen.append(policy)
            taken |= own
    if len(chosen) > 1:
        return Policy(tuple(member for policy in chosen for member in policy.members)), ""
    if not chosen:
        return None, "the policies that qualify change nothing"
    if len(ranked) == 1:
        return None, "only one policy qualifies"
    return None, f"every other policy that qualifies shares a function with {chosen[0]}"


STATES = ("scored", "inaccurate", "dropped")


@dataclass(frozen=True)
class Trial:
    """The policy to be tried under this number."""

    number: int
    policy: Policy


@dataclass(frozen=True)
class Finished:
    """`state` is scored, inaccurate (below the accuracy threshold) or dropped (by the race); `values` are those measured so far."""

    number: int
    policy: Policy
    state: str
    values: Mapping[str, tuple[float, ...]]

    def mean(self, name: str) -> float:
        return Estimate(self.values[name]).mean


def front(
    finished: Sequence[Finished], objectives: tuple[str, str] = ("privacy", "accuracy")
) -> list[Finished]:
    """Those that no other beats: none has as low a mean of the first and as high a one of the second, and one of them better.

    By rising mean of the first. Trials without both values, or whose means are not finite, take no part.
    """
    low, high = objectives
    known = [trial for trial in finished if trial.values.get(low) and trial.values.get(high)]
    points = [((trial.mean(low), -trial.mean(high)), trial) for trial in known]
    points = sorted(
        (point for point in points if all(abs(mean) < float("inf") for mean in point[0])),
        key=lambda point: point[0],
    )
    best: list[tuple[tuple[float, float], Finished]] = []
    for place, trial in points:
        if not best or place[1] < best[-1][0][1] or place == best[-1][0]:
            best.append((place, trial))
    return [trial for _, trial in best]
