"""The loop of a tuning: attacks are tried on public images, and dropped where clearly worse."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradveil.core.progress import Bar
from gradveil.search.engine import Engine
from gradveil.search.space import Drawn, FinishedTrial, Trial
from gradveil.search.trials import TrialLoop, Values
from gradveil.tuning.job import TuningJob
from gradveil.tuning.space import AttackSpace

if TYPE_CHECKING:  # it imports Optuna
    from gradveil.search.study import Study

OBJECTIVE = "missed"


class Loop(TrialLoop[Drawn]):
    """The part of one process in a tuning."""

    def __init__(
        self, job: TuningJob, space: AttackSpace, study: "Study[Drawn]", engine: Engine, bar: Bar
    ) -> None:
        super().__init__(study, engine, bar, job.at_once, OBJECTIVE)
        self.job, self.space = job, space

    def run(self) -> list[FinishedTrial[Drawn]]:
        """Try all attacks; return the finished trials."""
        self.work("tune", self.job.trials)
        return self.study.finished(self.job.trials)

    def scored(self, value: Drawn) -> object:
        return self.space.attack(value, self.job.work)

    def score(
        self,
        trials: Sequence[Trial[Drawn]],
        done: Sequence[FinishedTrial[Drawn]],
        target: int,
    ) -> None:
        values: dict[int, Values] = {trial.number: {} for trial in trials}
        # Trials of the same group are no rivals, so that a tuning that was stopped in a group goes
        # on as an unbroken one.
        first = trials[0].number - trials[0].number % self.size
        before = [trial for trial in done if trial.number < first]
        alive, blocks = list(trials), range(len(self.engine.scorers["trial"].blocks))
        for block in blocks:
            self.measure("trial", alive, values, block)
            if before and block != blocks[-1]:
                rival = torch.tensor(best_of(before).values[OBJECTIVE], dtype=torch.float64)
                alive = self.race(alive, values, rival, self.job.confidence)
        for trial in alive:
            self.finish(trial, "scored", values)

    def news(self, done: Sequence[FinishedTrial[Drawn]]) -> str:
        if not done:
            return ""
        best, dropped = best_of(done), sum(trial.state == "dropped" for trial in done)
        said = f"best: line-up {best.mean('lineup'):.0%}, SSIM {best.mean('ssim'):.2f}"
        return f"{said}, {dropped} dropped" if dropped else said


def best_of(done: Sequence[FinishedTrial[Drawn]]) -> FinishedTrial[Drawn]:
    """Return the trial that missed least of those that were scored on all images."""
    scored = [trial for trial in done if trial.state == "scored"]
    return min(scored, key=lambda trial: (trial.mean(OBJECTIVE), trial.number))
