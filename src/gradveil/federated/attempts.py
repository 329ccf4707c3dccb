"""The attacks that a client makes on its update: the exact one, and a search that has time."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Generator

from gradveil.attacks import Attack, GradientMatching
from gradveil.attacks.presets import find, find_attack
from gradveil.audits.attackers import (
    AUTO,
    DENSE,
    FEATURES,
    MATCHED,
    RACED,
    STANDARD,
    automatic,
    granted,
)
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation

TIMED = 20  # iterations that tell how long one takes
LEAST = 50  # iterations: with 15 and fewer it missed images that 150 identify


class Attempt(NamedTuple):
    """An attack, and what it is called in reasons."""

    name: str
    attack: Attack


def named(attack: Attack | str) -> Attempt:
    """Return the attack of this name, or an attack by the name of its class."""
    if isinstance(attack, str):
        return Attempt(attack, find(attack, (AUTO,)))
    return Attempt(type(attack).__name__, find_attack(attack))


def choose_attempts(
    client: Client, seen: Sequence[Observation], count: int, seconds: float, rng: Generator
) -> tuple[list[Attempt], list[str]]:
    """Return the attacks of `auto` that suit these updates, and why others could not run.

    Searches come last, with the iterations that `count` updates have time for in these seconds. Of
    several images there are two, with half of the seconds each. Without the last there is none.
    """
    train_mode, size = client.protocol.train_mode, seen[0].size
    *names, exact = automatic(client.defense, seen[0].model, train_mode, size)
    strongest = {name for part in client.defense.parts() for name in part.strongest}
    # Many starts, or equations that take seconds before the first step.
    slow = {RACED, *FEATURES, DENSE}
    searches = [name for name in names if slow.isdisjoint(name.split("+")) and name != MATCHED]
    searches.sort(key=lambda name: (name == STANDARD, "+" not in name, name not in strongest))
    first = [name for name in names if name == MATCHED]
    found: list[Attempt] = []
    left_out: list[str] = []
    left = seconds
    for name in (exact, *first, *searches):
        attack = find(name)
        told = [granted(each, attack, None) for each in seen]
        try:
            if isinstance(attack, GradientMatching):
                given = left / 2 if name in first else left
                steps = count_steps(attack, told, count, given, rng)
                called = f"{name} ({steps} iterations, for {given:g} s)"
                found.append(Attempt(called, replace(attack, steps=steps)))
                if name in searches:
                    return found, left_out
                left -= given
                continue
            attack(told[:1], rng)
        except GradveilError as error:
            left_out.append(f"{name} could not run: {error}")
        else:
            found.append(Attempt(name, attack))
    if not found:
        raise GradveilError("; ".join(left_out))
    return [each for each in found if not isinstance(each.attack, GradientMatching)], left_out


def count_steps(
    attack: GradientMatching,
    seen: Sequence[Observation],
    count: int,
    seconds: float,
    rng: Generator,
) -> int:
    """Return how many iterations a search has time for on `count` updates, from timed ones."""
    on_cpu = next(seen[0].model.parameters()).device.type == "cpu"
    now = time.process_time if on_cpu else time.perf_counter
    each = math.inf  # seconds; the first iteration warms up
    for steps in (1, TIMED):
        if steps * each * len(seen) > seconds and steps > 1:
            break
        began = now()
        replace(attack, steps=steps)(seen, rng)
        each = (now() - began) / steps / len(seen)
    steps = min(attack.steps, int(seconds / each / count))
    if steps < LEAST:
        raise GradveilError(
            f"{seconds:g} s are time for {steps} of its iterations on {count} canaries, and fewer "
            f"than {LEAST} find too little; give more seconds"
        )
    return steps
