"""The loop of a search: claim trials, score them, drop the inaccurate and the clearly worse."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.formats import Savings
from gradveil.core.progress import LONG, Bar, foretold, spoken
from gradveil.scores.scorer import Estimate, Scorer
from gradveil.search.engine import Engine
from gradveil.search.job import SearchJob
from gradveil.search.space import FinishedTrial, Trial, distinct
from gradveil.search.trials import TrialLoop, Values
from gradveil.transforms import Policy

if TYPE_CHECKING:  # it imports Optuna
    from gradveil.search.study import Study

ROUNDS = 4  # times `trials` are drawn at most, while too few qualify (line 13 of Algorithm 1)

TriedTrial = FinishedTrial[Policy]


def qualified(job: SearchJob, done: Sequence[TriedTrial]) -> list[TriedTrial]:
    """Return the trials whose policies may be kept, each once, lowest leakage first.

    With nsga2 these are the policies of the front whose accuracy score reaches the threshold.
    """
    scored = [trial for trial in done if trial.state == "scored"]
    if job.sampler == "nsga2":
        scored = [t for t in on_front(job, scored) if t.mean("accuracy") >= job.threshold]
    return sorted(_different(scored), key=lambda trial: _rank(job, trial))


def on_front(job: SearchJob, scored: Sequence[TriedTrial]) -> list[TriedTrial]:
    """Return the trials that no other beats in both leakage and accuracy, lowest leakage first."""
    ends = front(_different(scored), (job.objective, "accuracy"))
    return sorted(ends, key=lambda trial: _rank(job, trial))


def front(
    trials: Sequence[TriedTrial], objectives: tuple[str, str] = ("privacy", "accuracy")
) -> list[TriedTrial]:
    """Return the trials that no other beats, by rising mean of the first objective.

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
    best: list[tuple[tuple[float, float], TriedTrial]] = []
    for point, trial in points:
        if not best or point[1] < best[-1][0][1] or point == best[-1][0]:
            best.append((point, trial))
    return [trial for _, trial in best]


def _rank(job: SearchJob, trial: TriedTrial) -> tuple[float, ...]:
    """Return a key that sorts by leakage; where shares of rank 1 are equal, by dB over blind."""
    return (
        trial.mean(job.objective),
        trial.mean("over_blind") if "over_blind" in trial.values else 0.0,
        trial.number,
    )


def _different(scored: Sequence[TriedTrial]) -> list[TriedTrial]:
    """Return the first of trials with the same functions or the same leakage on every image."""
    first: dict[object, TriedTrial] = {}
    for index in distinct(trial.tried for trial in scored):
        trial = scored[index]
        leak = {name: values for name, values in trial.values.items() if name != "accuracy"}
        first.setdefault(tuple(sorted(leak.items())), trial)
    return list(first.values())


def saving(job: SearchJob, done: Sequence[TriedTrial], images: int) -> Savings:
    """Compare with a search that scores every accurate policy on all images.

    Policies that were dropped before their accuracy was known count as accurate.
    """
    raced = [trial for trial in done if trial.state in ("scored", "dropped")]
    dropped = [trial for trial in done if trial.state == "dropped"]
    measured = sum(len(trial.values.get(job.objective, ())) for trial in done)
    return Savings(
        len(dropped),
        measured,
        images * len(raced),
        sum("accuracy" not in trial.values for trial in dropped),
    )


class Loop(TrialLoop[Policy]):
    """The part of one process in a search.

    `after` returns the seconds of what follows the trials, for the time that is told beforehand.
    """

    def __init__(
        self,
        job: SearchJob,
        study: "Study[Policy]",
        engine: Engine,
        scorers: Mapping[str, Scorer],
        bar: Bar,
        after: Callable[[], float] = lambda: 0.0,
    ) -> None:
        size = job.group or engine.workers * max(scorer.unit for scorer in scorers.values())
        super().__init__(study, engine, bar, size, job.objective)
        self.job, self.scorers, self.after = job, scorers, after

    def run(self) -> list[TriedTrial]:
        """Try policies until enough qualify; return all finished trials."""
        for rounds in range(1, ROUNDS + 1):
            target = rounds * self.job.trials
            self.work("search", target)
            done = self.study.finished(target)
            count = len(qualified(self.job, done))
            if count >= (1 if self.job.sampler == "nsga2" else self.job.keep):
                return done
        raise _too_few(self.job, done, count)

    def tell_time(self, each: float, target: int) -> None:
        if not self.bar.shown:
            return
        trials, after = each * (target - len(self.study.finished(target))), self.after()
        if trials + after <= LONG:
            return
        fewer = target // 10
        shorter = {f"--trials {fewer}": each * fewer + after} if fewer >= self.job.keep else {}
        race = ", less what the race saves" if self.job.race else ""
        self.bar.say(
            f"{foretold(trials + after, shorter)} (trials {spoken(trials)}{race}, "
            f"confirming audits {spoken(after)})"
        )

    def score(
        self, trials: Sequence[Trial[Policy]], done: Sequence[TriedTrial], target: int
    ) -> None:
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
            self.finish(trial, "scored", values)

    def _accurate(
        self, alive: Sequence[Trial[Policy]], values: dict[int, Values]
    ) -> list[Trial[Policy]]:
        """Return the trials whose accuracy score reaches the threshold; for a front, all."""
        for block in range(len(self.scorers["accuracy"].blocks)):
            self.measure("accuracy", alive, values, block)
        if self.job.sampler == "nsga2":
            return list(alive)
        low = [
            trial
            for trial in alive
            if Estimate(tuple(values[trial.number]["accuracy"])).mean < self.job.threshold
        ]
        for trial in low:
            self.finish(trial, "inaccurate", values)
        return [trial for trial in alive if trial not in low]

    def _leak(
        self,
        alive: Sequence[Trial[Policy]],
        values: dict[int, Values],
        block: int,
        rival: Tensor | None,
    ) -> list[Trial[Policy]]:
        """Return the trials that are not worse than the rival after one more block of images."""
        self.measure("leak", alive, values, block)
        if rival is None:
            return list(alive)
        return self.race(alive, values, rival, self.job.race_confidence)

    def _first_of_group(self, number: int, target: int) -> int:
        """Return the first trial of this trial's group, finished or not.

        So a search that was stopped in a group races against the same rival as an unbroken one.
        """
        return max(number - number % self.size, target - self.job.trials)

    def _rival(self, done: Sequence[TriedTrial], below: int) -> Tensor | None:
        """Return the values (images) of the last policy to be kept, among trials numbered below.

        None while there are too few.
        """
        ranked = qualified(self.job, [trial for trial in done if trial.number < below])
        if len(ranked) < self.job.keep:
            return None
        last = ranked[self.job.keep - 1]
        return torch.tensor(last.values[self.job.objective], dtype=torch.float64)

    def news(self, done: Sequence[TriedTrial]) -> str:
        means = [trial.mean(self.job.objective) for trial in done if trial.state == "scored"]
        states = Counter(trial.state for trial in done)
        news = [f"best {self.job.objective} {min(means):.4g}"] if means else []
        news += [f"{states[name]} {name}" for name in ("inaccurate", "dropped") if states[name]]
        return ", ".join(news)


def _too_few(job: SearchJob, done: Sequence[TriedTrial], count: int) -> GradveilError:
    best = max(trial.mean("accuracy") for trial in done if "accuracy" in trial.values)
    return GradveilError(
        f"{count} of {len(done)} policies qualify, {job.keep} are wanted: the threshold is "
        f"{job.threshold:g}, the best accuracy score {best:.4g}; lower --threshold or --keep and "
        "search into another --out"
    )
