"""The search's loop: claim trials, score them, drop what is inaccurate or already worse, until enough policies qualify."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.scores.scorer import Estimate, Scorer
from gradveil.search.engine import Engine
from gradveil.search.job import SearchJob
from gradveil.search.progress import Bar
from gradveil.search.space import Finished, Trial, distinct, front
from gradveil.search.study import Study

FEWEST = 5  # images below which a spread says too little


def worse(values: Tensor, bar: Tensor, confidence: float) -> Tensor:
    """True where a policy's mean is above the bar's, by a one-sided t-test on the differences image by image.

    `values` are (policies, images), `bar` (images) those of the policy to beat; lower is better. With fewer than five images none
    is called worse. Differences that are all alike need no test: above 0 they are worse.
    """
    from scipy.stats import t

    if values.ndim != 2 or bar.shape != values.shape[1:]:
        raise GradveilError(
            f"values of shape {tuple(values.shape)} and a bar of {tuple(bar.shape)}: expected (policies, images), (images)"
        )
    if not 0.5 <= confidence < 1:
        raise GradveilError(f"confidence {confidence}: choose from 0.5 to below 1, such as 0.99")
    differences = values.double() - bar.double()
    n = differences.shape[1]
    if n < FEWEST or not len(differences):
        return differences.new_zeros(len(differences)).bool()
    # mean / (std / sqrt n) > t, without the division: a spread of zero leaves mean > 0
    return differences.mean(1) * math.sqrt(n) > float(t.ppf(confidence, n - 1)) * differences.std(1)


def qualified(job: SearchJob, done: Sequence[Finished]) -> list[Finished]:
    """Those that may be kept, lowest leakage first; of trials whose policies do the same the first alone.

    With nsga2 these are the policies of the front whose accuracy score reaches the threshold.
    """
    scored = [one for one in done if one.state == "scored"]
    if job.sampler == "nsga2":
        scored = [one for one in on_front(job, scored) if one.mean("accuracy") >= job.threshold]
    return sorted(_different(scored), key=lambda one: _place(job, one))


def on_front(job: SearchJob, scored: Sequence[Finished]) -> list[Finished]:
    """The policies that no other beats in both leakage and accuracy, lowest leakage first."""
    return sorted(
        front(_different(scored), (job.objective, "accuracy")), key=lambda one: _place(job, one)
    )


def _place(job: SearchJob, one: Finished) -> tuple[float, ...]:
    """Shares of identified images are often equal: then the gain over blind decides."""
    return (
        one.mean(job.objective),
        one.mean("over_blind") if "over_blind" in one.values else 0.0,
        one.number,
    )


def _different(scored: Sequence[Finished]) -> list[Finished]:
    """The first of those with the same functions, and of those with the same leakage on every image: they gave the same images."""
    first: dict[object, Finished] = {}
    for place in distinct(one.policy for one in scored):
        leak = {name: values for name, values in scored[place].values.items() if name != "accuracy"}
        first.setdefault(tuple(sorted(leak.items())), scored[place])
    return list(first.values())


@dataclass(frozen=True)
class RaceSavings:
    """What a race left undone: leakage measured on `scored` of `all` images, and accuracy never scored for `unjudged` policies."""

    dropped: int
    scored: int
    all: int
    unjudged: int

    @property
    def share(self) -> float:
        return 1 - self.scored / self.all if self.all else 0.0


def saving(job: SearchJob, done: Sequence[Finished], images: int) -> RaceSavings:
    """Compared with a search that scores every accurate policy on all images. Policies that were dropped before their accuracy
    was known count as accurate."""
    raced = [one for one in done if one.state in ("scored", "dropped")]
    dropped = [one for one in done if one.state == "dropped"]
    measured = sum(len(one.values.get(job.objective, ())) for one in done)
    return RaceSavings(
        len(dropped),
        measured,
        images * len(raced),
        sum("accuracy" not in one.values for one in dropped),
    )


POLL = 0.5  # seconds between looks at trials in other hands
ROUNDS = 4  # times `trials` that are drawn at most, while too few qualify (line 13 of Algorithm 1)
Values = dict[str, list[float]]


class Loop:
    """One process's part in a search. Several may work at one study."""

    def __init__(
        self, job: SearchJob, study: Study, engine: Engine, scorers: Mapping[str, Scorer], bar: Bar
    ) -> None:
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
        bar = (
            self.to_beat(done, self.first_of_group(trials[0].number, target))
            if self.job.race
            else None
        )
        blocks = range(len(self.scorers["leak"].blocks))
        alive = list(trials)
        if (
            bar is not None and self.job.score == "privacy"
        ):  # the accuracy score is the dearer one: first see who is worse anyway
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
        low = [
            trial
            for trial in alive
            if Estimate(tuple(values[trial.number]["accuracy"])).mean < self.job.threshold
        ]
        for trial in low:
            self.finish(trial, "inaccurate", values)
        return [trial for trial in alive if trial not in low]

    def leak(
        self, alive: Sequence[Trial], values: dict[int, Values], block: int, bar: Tensor | None
    ) -> list[Trial]:
        """Those that are not yet worse than the policy to beat, after one more block of images."""
        self.measure("leak", alive, values, block)
        if bar is None or not alive:
            return list(alive)
        table = torch.tensor(
            [values[trial.number][self.job.objective] for trial in alive], dtype=torch.float64
        )
        lost = worse(table, bar[: table.shape[1]], self.job.race_confidence).tolist()
        for trial, out in zip(alive, lost, strict=True):
            if out:
                self.finish(trial, "dropped", values)
        return [trial for trial, out in zip(alive, lost, strict=True) if not out]

    def measure(
        self, which: str, alive: Sequence[Trial], values: dict[int, Values], block: int
    ) -> None:
        if not alive:
            return
        for name, table in self.engine.score(
            which, [trial.policy for trial in alive], block
        ).items():
            for trial, row in zip(alive, table, strict=True):
                if not bool(row.isfinite().all()):
                    raise GradveilError(
                        f"the {name} score of policy {trial.policy} is not finite: look at the model and its checkpoint"
                    )
                values[trial.number].setdefault(name, []).extend(row.tolist())

    def first_of_group(self, number: int, target: int) -> int:
        """The first trial of the group this one belongs to, though that may be finished: a resumed search races as an unbroken one."""
        return max(number - number % self.size, target - self.job.trials)

    def to_beat(self, done: Sequence[Finished], below: int) -> Tensor | None:
        """The values of the policy that would be the last to be kept, among trials numbered below; None while there are too few."""
        ranked = qualified(self.job, [one for one in done if one.number < below])
        if len(ranked) < self.job.keep:
            return None
        return torch.tensor(
            ranked[self.job.keep - 1].values[self.job.objective], dtype=torch.float64
        )

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
