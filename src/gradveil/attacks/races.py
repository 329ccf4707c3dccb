"""Races: many short searches first, of which the most promising go on.

Gradient matching stops in local minima, and most starts lead into bad ones. How well a start does
shows early in its gradient distance, which an attacker can compute without the truth.
"""

from dataclasses import dataclass

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError


@dataclass(frozen=True)
class Race:
    """Heats before the search proper, each (times as many restarts, share of the steps).

    With 2 restarts of 2,400 steps, the heats ((16, 1 / 12), (4, 1 / 3)) are 32 rows of 200 steps
    for each victim, then the best 8 for 800 steps, and the best 2 of those enter the search proper.
    Each goes on from the images of the last, judged by the gradient distance alone. The learning
    rate decays in the search proper only. No heats, no race.

    In the search proper the prior counts `fade` times as much as in the heats: smoothness leads a
    start to the right shapes, and then stands in the way of details.
    """

    heats: tuple[tuple[int, float], ...] = ()
    fade: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.fade < float("inf"):
            raise GradveilError(f"race: fade {self.fade:g}; it must be at least 0")
        if not self.heats and self.fade != 1:
            raise GradveilError(f"race: fade {self.fade:g} without a heat; give it heats")
        left = None
        for times, share in self.heats:
            if times < 1:
                raise GradveilError(
                    f"race {self}: a heat of {times} times the restarts keeps more rows than it "
                    "has; it must be at least 1"
                )
            if left is not None and times > left:
                raise GradveilError(
                    f"race {self}: a heat of {times} times the restarts follows one of {left}; "
                    "rows can only become fewer"
                )
            if not 0 < share < float("inf"):
                raise GradveilError(
                    f"race {self}: {share:g} of the steps; a heat's share must be above 0"
                )
            left = times

    def __str__(self) -> str:
        heats = ", ".join(f"{times} x {share:.4g}" for times, share in self.heats) or "none"
        return heats if self.fade == 1 else f"{heats}, prior x {self.fade:.4g} after it"

    def stages(self, restarts: int, steps: int) -> list[tuple[int, int]]:
        """Return (rows of each victim, steps) of every heat, then of the search proper."""
        heats = [(times * restarts, max(1, round(share * steps))) for times, share in self.heats]
        return [*heats, (restarts, steps)]

    def work(self, restarts: int, steps: int) -> int:
        """Return the steps of all rows of a victim, over all stages."""
        return sum(rows * each for rows, each in self.stages(restarts, steps))
