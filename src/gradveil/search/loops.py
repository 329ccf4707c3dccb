"""The search's loop: claim trials, score them, drop what is inaccurate or already worse, until enough policies qualify."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.scores.estimates import Estimate
from gradveil.scores.scorers import Scorer
from gradveil.search.engines import Engine
from gradveil.search.jobs import SearchJob
from gradveil.search.progress import Bar
from gradveil.search.race import worse
from gradveil.search.rankings import qualified
from gradveil.search.studies import Study
from gradveil.search.trials import Finished, Trial

POLL = 0.5  # seconds between looks at trials in other hands
ROUNDS = 4  # times `trials` that are drawn at most, while too few qualify (line 13 of Algorithm 1)
Values = dict[str, list[float]]


class Loop:
    """One process's part in a search. Several may work at one study."""

    def __init__(self, job: SearchJob, study: Study, engine: Engine, scorers: Mapping[str, Scorer], bar: Bar) -> None:
        self.job, self.study, self.engine, self.scorers, self.bar = job, study, engine, scorers, bar
        self.size = job.group or engine.workers * max(scorer.unit for scorer in scorers.values())

    def go(self) -> list[Finished]:
        """All finished trials, as soon as enough policies qualify."""
        for rounds in range(1, ROUNDS + 1):
            target = rounds * self.job.trials
            self.work(target)
            done = self.study.finished(target)
            found = len(qualified(self.job, done))
            if found >= (1 if self.job.sampler == "nsga2" else self.job.keep):
                return done
        raise _too_few(self.job, done, found)

    def work(self, target: int) -> None:
        """Until every trial below the target is finished, by whomever."""
        while True:
            trials = self.study.claim(self.size, target)
            done = self.study.finished(target)
            self.show(done, target)
            if trials:
                self.group(trials, done, target)
            elif self.study.busy(target):
                time.sleep(POLL)
            else:
                return

    def group(self, trials: Sequence[Trial], done: Sequence[Finished], target: int) -> None:
        """Score these trials side by side."""
        values: dict[int, Values] = {trial.number: {} for trial in trials}
        bar = self.to_beat(done, self.first_of_group(trials[0].number, target)) if self.job.race else None
        blocks = range(len(self.scorers["leak"].blocks))
        alive = list(trials)
        if bar is not None and self.job.score == "privacy":  # the accuracy score is the dearer one: first see who is worse anyway
            alive = self.leak(alive, values, 0, bar)
            blocks = blocks[1:]
        alive = self.accurate(alive, values)
        for block in blocks:
            alive = self.leak(alive, values, block, None if block == blocks[-1] else bar)
        for trial in alive:
            self.finish(trial, "scored", values)

    def accurate(self, alive: Sequence[Trial], values: dict[int, Values]) -> list[Trial]:
        """Those whose accuracy score reaches the threshold. A front has its own say in that."""
        for block in range(len(self.scorers["accuracy"].blocks)):
            self.measure("accuracy", alive, values, block)
        if self.job.sampler == "nsga2":
            return list(alive)
        low = [trial for trial in alive if Estimate(tuple(values[trial.number]["accuracy"])).mean < self.job.threshold]
        for trial in low:
            self.finish(trial, "inaccurate", values)
        return [trial for trial in alive if trial not in low]

    def leak(self, alive: Sequence[Trial], values: dict[int, Values], block: int, bar: Tensor | None) -> list[Trial]:
        """Those that are not yet worse than the policy to beat, after one more block of images."""
        self.measure("leak", alive, values, block)
        if bar is None or not alive:
            return list(alive)
        table = torch.tensor([values[trial.number][self.job.objective] for trial in alive], dtype=torch.float64)
        lost = worse(table, bar[: table.shape[1]], self.job.race_confidence).tolist()
        for trial, out in zip(alive, lost, strict=True):
            if out:
                self.finish(trial, "dropped", values)
        return [trial for trial, out in zip(alive, lost, strict=True) if not out]

    def measure(self, which: str, alive: Sequence[Trial], values: dict[int, Values], block: int) -> None:
        if not alive:
            return
        for name, table in self.engine.score(which, [trial.policy for trial in alive], block).items():
            for trial, row in zip(alive, table, strict=True):
                if not bool(row.isfinite().all()):
                    raise GradveilError(f"the {name} score of policy {trial.policy} is not finite: look at the model and its checkpoint")
                values[trial.number].setdefault(name, []).extend(row.tolist())

    def first_of_group(self, number: int, target: int) -> int:
        """The first trial of the group this one belongs to, though that may be finished: a resumed search races as an unbroken one."""
        return max(number - number % self.size, target - self.job.trials)

    def to_beat(self, done: Sequence[Finished], below: int) -> Tensor | None:
        """The values of the policy that would be the last to be kept, among trials numbered below; None while there are too few."""
        ranked = qualified(self.job, [one for one in done if one.number < below])
        if len(ranked) < self.job.keep:
            return None
        return torch.tensor(ranked[self.job.keep - 1].values[self.job.objective], dtype=torch.float64)

    def finish(self, trial: Trial, state: str, values: Mapping[int, Values]) -> None:
        self.study.finish(trial, state, values[trial.number])

    def show(self, done: Sequence[Finished], target: int) -> None:
        means = [one.mean(self.job.objective) for one in done if one.state == "scored"]
        self.bar.update(Counter(one.state for one in done), min(means, default=None), target)


def _too_few(job: SearchJob, done: Sequence[Finished], found: int) -> GradveilError:
    best = max(one.mean("accuracy") for one in done if "accuracy" in one.values)
    return GradveilError(
        f"{found} of {len(done)} policies qualify, {job.keep} are wanted: the threshold is {job.threshold:g}, the best accuracy score "
        f"{best:.4g}; lower --threshold or --keep and search into another --out"
    )
