"""A policy that is to be tried, and one that was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradveil.scores.estimates import Estimate
from gradveil.transforms import Policy

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


def front(finished: Sequence[Finished], objectives: tuple[str, str] = ("privacy", "accuracy")) -> list[Finished]:
    """Those that no other beats: none has as low a mean of the first and as high a one of the second, and one of them better.

    By rising mean of the first. Trials without both values, or whose means are not finite, take no part.
    """
    low, high = objectives
    known = [trial for trial in finished if trial.values.get(low) and trial.values.get(high)]
    points = [((trial.mean(low), -trial.mean(high)), trial) for trial in known]
    points = sorted((point for point in points if all(abs(mean) < float("inf") for mean in point[0])), key=lambda point: point[0])
    best: list[tuple[tuple[float, float], Finished]] = []
    for place, trial in points:
        if not best or place[1] < best[-1][0][1] or place == best[-1][0]:
            best.append((place, trial))
    return [trial for _, trial in best]
