"""The loop of a search: claim trials, score them, drop the inaccurate and the clearly worse.

A race saves work: a policy that is already clearly worse than the last that would be kept, the
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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.progress import LONG, Bar, foretold
from gradveil.scores.scorer import Estimate, Scorer
from gradveil.search.engine import Engine
from gradveil.search.job import SearchJob
from gradveil.search.space import FinishedTrial, Trial, distinct

if TYPE_CHECKING:  # it imports Optuna
    from gradveil.search.study import Study

FEWEST = 5  # images below which a spread says too little
POLL = 0.5  # seconds between looks at trials that other processes hold
ROUNDS = 4  # times `trials` are drawn at most, while too few qualify (line 13 of Algorithm 1)
Values = dict[str, list[float]]


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


def qualified(job: SearchJob, done: Sequence[FinishedTrial]) -> list[FinishedTrial]:
    """The trials whose policies may be kept, lowest leakage first, without policies that repeat.

    With nsga2 these are the policies of the front whose accuracy score reaches the threshold.
    """
    scored = [trial for trial in done if trial.state == "scored"]
    if job.sampler == "nsga2":
        scored = [t for t in on_front(job, scored) if t.mean("accuracy") >= job.threshold]
    return sorted(_different(scored), key=lambda trial: _rank(job, trial))


def on_front(job: SearchJob, scored: Sequence[FinishedTrial]) -> list[FinishedTrial]:
    """The trials that no other beats in both leakage and accuracy, lowest leakage first."""
    ends = front(_different(scored), (job.objective, "accuracy"))
    return sorted(ends, key=lambda trial: _rank(job, trial))


def front(
    trials: Sequence[FinishedTrial], objectives: tuple[str, str] = ("privacy", "accuracy")
) -> list[FinishedTrial]:
    """The trials that no other beats, by rising mean of the first objective.

    One trial beats another when its mean of the first objective is as low, its mean of the second
    as high, and one of them better. Trials without both means, or with one that is not finite, take
    no part.
    """
    low, high = objectives
    known = [trial for trial in trials if trial.values.get(low) and trial.values.get(high)]
    points = [((trial.mean(low), -trial.mean(high)), trial) for trial in known]
    points = sorted(
        (point for point in points if all(map(math.isfinite, point[0]))),
        key=lambda point: point[0],
    )
    best: list[tuple[tuple[float, float], FinishedTrial]] = []
    for point, trial in points:
        if not best or point[1] < best[-1][0][1] or point == best[-1][0]:
            best.append((point, trial))
    return [trial for _, trial in best]


def _rank(job: SearchJob, trial: FinishedTrial) -> tuple[float, ...]:
    """Shares of images with rank 1 are often equal: then the gain over blind decides."""
    return (
        trial.mean(job.objective),
        trial.mean("over_blind") if "over_blind" in trial.values else 0.0,
        trial.number,
    )


def _different(scored: Sequence[FinishedTrial]) -> list[FinishedTrial]:
    """Return the first of trials with the same functions or the same leakage on every image."""
    first: dict[object, FinishedTrial] = {}
    for index in distinct(trial.policy for trial in scored):
        trial = scored[index]
        leak = {name: values for name, values in trial.values.items() if name != "accuracy"}
        first.setdefault(tuple(sorted(leak.items())), trial)
    return list(first.values())


@dataclass(frozen=True)
class RaceSavings:
    """The work that a race left undone.

    Leakage was measured on `scored` of `all` images, and the accuracy of `unjudged` policies never.
    """

    dropped: int
    scored: int
    all: int
    unjudged: int

    @property
    def share(self) -> float:
        return 1 - self.scored / self.all if self.all else 0.0


def saving(job: SearchJob, done: Sequence[FinishedTrial], images: int) -> RaceSavings:
    """Compare with a search that scores every accurate policy on all images.

    Policies that were dropped before their accuracy was known count as accurate.
    """
    raced = [trial for trial in done if trial.state in ("scored", "dropped")]
    dropped = [trial for trial in done if trial.state == "dropped"]
    measured = sum(len(trial.values.get(job.objective, ())) for trial in done)
    return RaceSavings(
        len(dropped),
        measured,
        images * len(raced),
        sum("accuracy" not in trial.values for trial in dropped),
    )


class Loop:
    """The part of one process in a search; several may work at one study."""

    def __init__(
        self,
        job: SearchJob,
        study: "Study",
        engine: Engine,
        scorers: Mapping[str, Scorer],
        bar: Bar,
    ) -> None:
        self.job, self.study, self.engine, self.scorers, self.bar = job, study, engine, scorers, bar
        self.foretold = False
        self.size = job.group or engine.workers * max(scorer.unit for scorer in scorers.values())

    def run(self) -> list[FinishedTrial]:
        """Try policies until enough qualify; return all finished trials."""
        for rounds in range(1, ROUNDS + 1):
            target = rounds * self.job.trials
            self._work(target)
            done = self.study.finished(target)
            count = len(qualified(self.job, done))
            if count >= (1 if self.job.sampler == "nsga2" else self.job.keep):
                return done
        raise _too_few(self.job, done, count)

    def _work(self, target: int) -> None:
        """Work until every trial below the target is finished, by this process or another."""
        self.bar.start("search", target, len(self.study.finished(target)))
        while True:
            trials = self.study.claim(self.size, target)
            done = self.study.finished(target)
            self._show(done)
            if trials:
                began = time.perf_counter()
                self._score(trials, done, target)
                self._foretell((time.perf_counter() - began) / len(trials), target)
            elif self.study.busy(target):
                time.sleep(POLL)
            else:
                return

    def _foretell(self, each: float, target: int) -> None:
        """Say once, after the first group, how long the trials that are left take."""
        left = target - len(self.study.finished(target))
        if self.foretold or self.job.race:  # a race drops ever more of them
            return
        self.foretold = True
        if each * left > LONG:
            fewer = target // 10
            shorter = {f"--trials {fewer}": each * fewer} if fewer >= self.job.keep else {}
            self.bar.say(f"the trials: {foretold(each * left, shorter)}")

    def _score(self, trials: Sequence[Trial], done: Sequence[FinishedTrial], target: int) -> None:
        """Score the trials of a group side by side."""
        values: dict[int, Values] = {trial.number: {} for trial in trials}
        rival = None
        if self.job.race:
            rival = self._rival(done, self._first_of_group(trials[0].number, target))
        blocks = range(len(self.scorers["leak"].blocks))
        alive = list(trials)
        if rival is not None and self.job.score == "privacy":
            # the accuracy score costs more than a block of S_pri: first see who is worse anyway
            alive = self._leak(alive, values, 0, rival)
            blocks = blocks[1:]
        alive = self._accurate(alive, values)
        for block in blocks:
            alive = self._leak(alive, values, block, None if block == blocks[-1] else rival)
        for trial in alive:
            self._finish(trial, "scored", values)

    def _accurate(self, alive: Sequence[Trial], values: dict[int, Values]) -> list[Trial]:
        """The trials whose accuracy score reaches the threshold; for a front, all of them."""
        for block in range(len(self.scorers["accuracy"].blocks)):
            self._measure("accuracy", alive, values, block)
        if self.job.sampler == "nsga2":
            return list(alive)
        low = [
            trial
            for trial in alive
            if Estimate(tuple(values[trial.number]["accuracy"])).mean < self.job.threshold
        ]
        for trial in low:
            self._finish(trial, "inaccurate", values)
        return [trial for trial in alive if trial not in low]

    def _leak(
        self, alive: Sequence[Trial], values: dict[int, Values], block: int, rival: Tensor | None
    ) -> list[Trial]:
        """The trials that are not worse than the rival after one more block of images."""
        self._measure("leak", alive, values, block)
        if rival is None or not alive:
            return list(alive)
        table = torch.tensor(
            [values[trial.number][self.job.objective] for trial in alive], dtype=torch.float64
        )
        lost = worse(table, rival[: table.shape[1]], self.job.race_confidence).tolist()
        for trial, drop in zip(alive, lost, strict=True):
            if drop:
                self._finish(trial, "dropped", values)
        return [trial for trial, drop in zip(alive, lost, strict=True) if not drop]

    def _measure(
        self, which: str, alive: Sequence[Trial], values: dict[int, Values], block: int
    ) -> None:
        if not alive:
            return
        tables = self.engine.score(which, [trial.policy for trial in alive], block)
        for name, table in tables.items():
            for trial, row in zip(alive, table, strict=True):
                if not bool(row.isfinite().all()):
                    raise GradveilError(
                        f"the {name} score of policy {trial.policy} is not finite: look at the "
                        "model and its checkpoint"
                    )
                values[trial.number].setdefault(name, []).extend(row.tolist())

    def _first_of_group(self, number: int, target: int) -> int:
        """The first trial of this trial's group, finished or not.

        So a search that was stopped in a group races against the same rival as an unbroken one.
        """
        return max(number - number % self.size, target - self.job.trials)

    def _rival(self, done: Sequence[FinishedTrial], below: int) -> Tensor | None:
        """The values (images) of the last policy that would be kept, among trials numbered below.

        None while there are too few.
        """
        ranked = qualified(self.job, [trial for trial in done if trial.number < below])
        if len(ranked) < self.job.keep:
            return None
        last = ranked[self.job.keep - 1]
        return torch.tensor(last.values[self.job.objective], dtype=torch.float64)

    def _finish(self, trial: Trial, state: str, values: Mapping[int, Values]) -> None:
        self.study.finish(trial, state, values[trial.number])

    def _show(self, done: Sequence[FinishedTrial]) -> None:
        means = [trial.mean(self.job.objective) for trial in done if trial.state == "scored"]
        states = Counter(trial.state for trial in done)
        news = [f"best {self.job.objective} {min(means):.4g}"] if means else []
        news += [f"{states[name]} {name}" for name in ("inaccurate", "dropped") if states[name]]
        self.bar.update(len(done), news=", ".join(news))


def _too_few(job: SearchJob, done: Sequence[FinishedTrial], count: int) -> GradveilError:
    best = max(trial.mean("accuracy") for trial in done if "accuracy" in trial.values)
    return GradveilError(
        f"{count} of {len(done)} policies qualify, {job.keep} are wanted: the threshold is "
        f"{job.threshold:g}, the best accuracy score {best:.4g}; lower --threshold or --keep and "
        "search into another --out"
    )
