"""Trials of a study: claimed, scored on block after block of images, dropped where clearly worse.

A race saves work: a value that is already clearly worse than the last that would be kept, the
rival, is not scored on the images that are left. How often does that change the result? Simulated
races of 1,500 policies on 100 images, 25 policies at a time against the tenth best so far, 50 seeds
each, ended with the same ten policies as a search without a race this often, and saved this share
of the work. The columns are the spread of an image about its policy's mean, in units of the spread
of the policies' means:

| confidence | spread 0.5      | spread 2        | spread 6        |
|------------|-----------------|-----------------|-----------------|
| 0.95       | 49 of 50, 84%   | 39 of 50, 76%   | 34 of 50, 52%   |
| 0.99       | 50 of 50, 84%   | 48 of 50, 68%   | 46 of 50, 32%   |
| 0.999      | 50 of 50, 82%   | 50 of 50, 57%   | 50 of 50, 14%   |

A race tests each policy several times, and its rival was chosen for low values, so it errs more
often than a single test does: take a confidence of 0.999 where the ten must be the same.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.progress import Bar
from gradveil.search.engine import Engine
from gradveil.search.space import FinishedTrial, Trial

if TYPE_CHECKING:  # it imports Optuna
    from gradveil.search.study import Study

FEWEST = 5  # images below which a spread says too little
POLL = 0.5  # seconds between looks at trials that other processes hold

T = TypeVar("T")
Values = dict[str, list[float]]
"""What was measured of a trial so far: a number for each image, by the name of the quantity."""


def worse(values: Tensor, rival: Tensor, confidence: float) -> Tensor:
    """Tell of each policy whether its mean is above the rival's, by a one-sided paired t-test.

    `values` are (policies, images), `rival` (images); lower is better. On fewer than five images
    nobody is called worse. Differences that are all equal need no test: above 0 they are worse.
    """
    from scipy.special import stdtrit  # quantiles of Student's t

    if values.ndim != 2 or rival.shape != values.shape[1:]:
        raise GradveilError(
            f"values of shape {tuple(values.shape)} and a rival of {tuple(rival.shape)}: "
            "expected (policies, images), (images)"
        )
    if not 0.5 <= confidence < 1:
        raise GradveilError(f"confidence {confidence}: choose from 0.5 to below 1, such as 0.99")
    differences = values.double() - rival.double()
    n = differences.shape[1]
    if n < FEWEST or not len(differences):
        return differences.new_zeros(len(differences)).bool()
    # mean / (std / sqrt n) > t, without the division: a spread of zero leaves mean > 0
    return differences.mean(1) * math.sqrt(n) > float(stdtrit(n - 1, confidence)) * differences.std(
        1
    )


class TrialLoop(ABC, Generic[T]):
    """The part of one process in the trials of a study; several may work at one study.

    `size` trials are claimed and scored together. The mean of `objective` shall be small.
    """

    def __init__(
        self, study: "Study[T]", engine: Engine, bar: Bar, size: int, objective: str
    ) -> None:
        self.study, self.engine, self.bar, self.size = study, engine, bar, size
        self.objective = objective
        self.timed = False

    def work(self, name: str, target: int) -> None:
        """Work until every trial below the target is finished, by this process or another."""
        self.bar.start(name, target, len(self.study.finished(target)))
        while True:
            trials = self.study.claim(self.size, target)
            done = self.study.finished(target)
            self.bar.update(len(done), news=self.news(done))
            if trials:
                began = time.perf_counter()
                self.score(trials, done, target)
                # Part of a group, as a stopped search left it, takes longer for each trial.
                if not self.timed and len(trials) == min(self.size, target):
                    self.timed = True
                    self.tell_time((time.perf_counter() - began) / len(trials), target)
            elif self.study.busy(target):
                time.sleep(POLL)
            else:
                return

    @abstractmethod
    def score(
        self, trials: Sequence[Trial[T]], done: Sequence[FinishedTrial[T]], target: int
    ) -> None:
        """Score the trials of a group side by side, and finish each."""

    @abstractmethod
    def news(self, done: Sequence[FinishedTrial[T]]) -> str:
        """Say what the finished trials come to, beside the bar."""

    def tell_time(self, each: float, target: int) -> None:
        """Say after the first whole group how long all others take, with `each` trial's seconds."""
        return

    def scored(self, value: T) -> object:
        """Return what a scorer takes of a trial's value: by default the value."""
        return value

    def measure(
        self, which: str, alive: Sequence[Trial[T]], values: Mapping[int, Values], block: int
    ) -> None:
        """Add the figures of one more block to those of the trials."""
        if not alive:
            return
        tables = self.engine.score(which, [self.scored(trial.tried) for trial in alive], block)
        for name, table in tables.items():
            for trial, row in zip(alive, table, strict=True):
                if not bool(row.isfinite().all()):
                    raise GradveilError(
                        f"the {name} score of {self.study.space.attribute} {trial.tried} is not "
                        "finite: look at the model and its checkpoint"
                    )
                values[trial.number].setdefault(name, []).extend(row.tolist())

    def race(
        self,
        alive: Sequence[Trial[T]],
        values: Mapping[int, Values],
        rival: Tensor,
        confidence: float,
    ) -> list[Trial[T]]:
        """Finish the trials that are worse than the rival so far; return the others."""
        if not alive:
            return []
        table = torch.tensor(
            [values[trial.number][self.objective] for trial in alive], dtype=torch.float64
        )
        lost = worse(table, rival[: table.shape[1]], confidence).tolist()
        for trial, drop in zip(alive, lost, strict=True):
            if drop:
                self.finish(trial, "dropped", values)
        return [trial for trial, drop in zip(alive, lost, strict=True) if not drop]

    def finish(self, trial: Trial[T], state: str, values: Mapping[int, Values]) -> None:
        """Keep the figures of a trial that has ended in this state."""
        self.study.finish(trial, state, values[trial.number])
