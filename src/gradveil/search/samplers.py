"""The search space: three slots, each one of the 50 functions or empty; and the names of the ways to draw from it."""

from collections.abc import Mapping

import torch

from gradveil.core.seeds import generator
from gradveil.transforms import LIBRARY, Policy, Transform
from gradveil.transforms.policy import LONGEST

SAMPLERS = ("random", "tpe", "nsga2")
SLOTS = tuple(f"slot {number + 1}" for number in range(LONGEST))
EMPTY = "empty"
CHOICES = (*(str(index) for index in range(len(LIBRARY))), EMPTY)


def draw(seed: int, number: int) -> dict[str, str]:
    """What the slots of this trial hold, all choices equally likely: a function of the seed and the trial's number alone."""
    drawn = torch.randint(len(CHOICES), (len(SLOTS),), generator=generator(seed, "policy", number))
    return {slot: CHOICES[int(index)] for slot, index in zip(SLOTS, drawn, strict=True)}


def policy_of(slots: Mapping[str, str]) -> Policy:
    """Empty slots are left out; all empty is the policy that changes nothing."""
    return Policy((tuple(Transform.parse(slots[slot]) for slot in SLOTS if slots[slot] != EMPTY),))
