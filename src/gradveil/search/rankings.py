"""Finished trials in order: which qualify, which are kept, and what a race has saved."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.search.hybrids import distinct
from gradveil.search.jobs import SearchJob
from gradveil.search.trials import Finished, front


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
    return sorted(front(_different(scored), (job.objective, "accuracy")), key=lambda one: _place(job, one))


def _place(job: SearchJob, one: Finished) -> tuple[float, ...]:
    """Shares of identified images are often equal: then the gain over blind decides."""
    return one.mean(job.objective), one.mean("over_blind") if "over_blind" in one.values else 0.0, one.number


def _different(scored: Sequence[Finished]) -> list[Finished]:
    """The first of those with the same functions, and of those with the same leakage on every image: they gave the same images."""
    first: dict[object, Finished] = {}
    for place in distinct(one.policy for one in scored):
        leak = {name: values for name, values in scored[place].values.items() if name != "accuracy"}
        first.setdefault(tuple(sorted(leak.items())), scored[place])
    return list(first.values())


@dataclass(frozen=True)
class Saving:
    """What a race left undone: leakage measured on `scored` of `all` images, and accuracy never scored for `unjudged` policies."""

    dropped: int
    scored: int
    all: int
    unjudged: int

    @property
    def share(self) -> float:
        return 1 - self.scored / self.all if self.all else 0.0


def saving(job: SearchJob, done: Sequence[Finished], images: int) -> Saving:
    """Compared with a search that scores every accurate policy on all images. Policies that were dropped before their accuracy
    was known count as accurate."""
    raced = [one for one in done if one.state in ("scored", "dropped")]
    dropped = [one for one in done if one.state == "dropped"]
    measured = sum(len(one.values.get(job.objective, ())) for one in done)
    return Saving(len(dropped), measured, images * len(raced), sum("accuracy" not in one.values for one in dropped))
