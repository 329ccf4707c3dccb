"""The loop keeps the policies of Algorithm 1, with a race or without, stopped anywhere or not."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import toys
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Bar
from gradveil.core.seeds import generator
from gradveil.scores.scorer import Scorer
from gradveil.search.engine import LocalEngine
from gradveil.search.job import SearchJob
from gradveil.search.loop import Loop, on_front, qualified, saving
from gradveil.search.space import POLICIES, FinishedTrial, Trial, draw, policy_of
from gradveil.search.study import Study
from gradveil.transforms import Policy

JOB = SearchJob(data="toy", model="toy", trials=60, keep=4, threshold=-1.0, seed=5)


@dataclass(frozen=True)
class Toy(Scorer):
    """A level for each policy, noise that all policies share, and a little of the policy's own."""

    names: ClassVar[tuple[str, ...]] = ("over_blind", "ssim")
    spread: float = 0.3

    @property
    def blocks(self) -> tuple[int, ...]:
        return (10, 10, 20)

    def score(self, policies: Sequence[Policy], block: int) -> dict[str, Tensor]:
        shared = torch.randn(
            self.blocks[block], generator=generator(1, "image", block), dtype=torch.float64
        )
        rows = [
            level(policy, "leak") + shared + self.spread * noise(policy, block, self.blocks[block])
            for policy in policies
        ]
        return {"over_blind": torch.stack(rows), "ssim": torch.stack(rows) / 10}


@dataclass(frozen=True)
class ToyAccuracy(Scorer):
    names: ClassVar[tuple[str, ...]] = ("accuracy",)
    scale: float = 1.5

    @property
    def blocks(self) -> tuple[int, ...]:
        return (1, 1)

    def score(self, policies: Sequence[Policy], block: int) -> dict[str, Tensor]:
        return {
            "accuracy": torch.stack(
                [self.scale * level(policy, "accuracy")[None] for policy in policies]
            )
        }


def level(policy: Policy, kind: str) -> Tensor:
    return torch.randn((), generator=generator(2, kind, str(policy)), dtype=torch.float64)


def noise(policy: Policy, block: int, size: int) -> Tensor:
    return torch.randn(size, generator=generator(3, str(policy), block), dtype=torch.float64)


class StoppedError(Exception):
    """As a kill would be."""


class Counting(LocalEngine):
    """Counts policies by what was scored of them, and stops after so many calls."""

    def __init__(self, scorers: Mapping[str, Scorer], calls: int | None = None) -> None:
        super().__init__(scorers)
        self.calls, self.policies = calls, {"accuracy": 0, "leak": 0}

    def score(self, which: str, policies: Sequence[Policy], block: int) -> dict[str, Tensor]:
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                raise StoppedError
        self.policies[which] += len(policies)
        return super().score(which, policies, block)


SCORERS: dict[str, Scorer] = {"accuracy": ToyAccuracy(), "leak": Toy()}


@contextmanager
def opened(job: SearchJob, path: Path) -> Iterator[Study[Policy]]:
    study = Study.open(path, "toy", job.settings(), job.sampler, job.seed, job.objectives, POLICIES)
    try:
        yield study
    finally:
        study.close()


def run(
    job: SearchJob, path: Path, calls: int | None = None
) -> tuple[list[FinishedTrial[Policy]], Counting]:
    engine = Counting(SCORERS, calls)
    with opened(job, path) as study, engine:
        return Loop(job, study, engine, SCORERS, Bar(False)).run(), engine


def names(done: Sequence[FinishedTrial[Policy]]) -> list[str]:
    return [str(one.tried) for one in done]


def test_the_policies_kept_are_those_of_algorithm_1(tmp_path: Path) -> None:
    done, engine = run(JOB, tmp_path / "journal")
    drawn = [policy_of(draw(5, number)) for number in range(60)]
    accurate = [policy for policy in drawn if 1.5 * float(level(policy, "accuracy")) >= -1]
    doing = {
        tuple((t.name, t.value) for t in policy.members[0]): str(policy)
        for policy in reversed(accurate)
    }  # the first of equal ones
    scored = {
        str(policy): sum(
            float(SCORERS["leak"].score([policy], b)["over_blind"].sum()) for b in range(3)
        )
        for policy in accurate
    }
    assert names(done) == [str(policy) for policy in drawn]
    assert names(qualified(JOB, done)) == sorted(doing.values(), key=lambda name: scored[name])
    assert engine.policies == {"accuracy": 120, "leak": 3 * len(accurate)}
    assert {one.state for one in done} == {"scored", "inaccurate"} and all(
        len(one.values["accuracy"]) == 2 for one in done
    )


@pytest.mark.parametrize("at_once", [1, 16, 25])
def test_a_race_keeps_the_same_policies_and_scores_less(tmp_path: Path, at_once: int) -> None:
    raced = replace(JOB, race=True, at_once=at_once)
    whole, plain = run(JOB, tmp_path / "plain")
    done, engine = run(raced, tmp_path / "raced")
    kept = qualified(raced, done)[:4]
    assert names(kept) == names(qualified(JOB, whole)[:4]) and all(
        one.state == "scored" for one in kept
    )
    assert (
        engine.policies["leak"] < plain.policies["leak"]
        and engine.policies["accuracy"] == plain.policies["accuracy"]
    )
    saved = saving(raced, done, 40)
    assert saved.dropped == sum(one.state == "dropped" for one in done) > 10
    assert (
        saved.scored == sum(len(one.values.get("over_blind", ())) for one in done) < saved.all
        and 0 < saved.share < 1
    )
    assert saved.unjudged == 60 - engine.policies["accuracy"] / 2


def test_a_race_looks_only_at_policies_of_earlier_groups(tmp_path: Path) -> None:
    """So what it drops does not depend on which of its own group happens to be ready."""
    raced = replace(JOB, race=True, at_once=60)
    done, _ = run(raced, tmp_path / "journal")
    assert not any(one.state == "dropped" for one in done)


@pytest.mark.parametrize("calls", [0, 7, 19])
@pytest.mark.parametrize(
    "changes",
    [
        {"race": True, "at_once": 7},
        {"sampler": "tpe", "at_once": 5},
        {"sampler": "nsga2", "at_once": 6},
        {},
    ],
)
def test_a_stopped_search_ends_like_an_unbroken_one(
    tmp_path: Path, changes: dict[str, Any], calls: int
) -> None:
    job = replace(JOB, trials=30, threshold=-5.0, **changes)
    unbroken, _ = run(job, tmp_path / "unbroken")
    with pytest.raises(StoppedError):
        run(job, tmp_path / "stopped", calls)
    again, _ = run(job, tmp_path / "stopped")
    assert again == unbroken


def test_while_too_few_qualify_as_many_again_are_drawn(tmp_path: Path) -> None:
    job = replace(JOB, trials=10, keep=4, threshold=1.2)
    done, _ = run(job, tmp_path / "journal")
    assert len(done) in (20, 30, 40) and len(qualified(job, done)) >= 4 > len(
        qualified(job, done[: len(done) - 10])
    )


def test_a_threshold_that_nothing_passes_ends_after_four_times_the_trials(tmp_path: Path) -> None:
    job = replace(JOB, trials=10, threshold=100.0)
    with pytest.raises(
        GradveilError,
        match=r"^0 of 40 policies qualify, 4 are wanted: the threshold is 100, the best accuracy "
        r"score 2\.634; lower",
    ):
        run(job, tmp_path / "journal")
    with opened(job, tmp_path / "journal") as study:
        assert len(study.finished(1000)) == 40


def test_nsga2_gives_a_front_and_keeps_what_is_accurate_of_it(tmp_path: Path) -> None:
    job = replace(JOB, sampler="nsga2", threshold=0.0)
    done, _ = run(job, tmp_path / "journal")
    ends = on_front(job, done)
    points = [(one.mean("over_blind"), one.mean("accuracy")) for one in done]
    assert len(done) == 60 and all(one.state == "scored" for one in done) and len(ends) > 1
    for one in ends:
        here = (one.mean("over_blind"), one.mean("accuracy"))
        assert not any(
            leak <= here[0] and accuracy >= here[1] and (leak, accuracy) != here
            for leak, accuracy in points
        )
    kept = qualified(job, done)
    assert kept and set(names(kept)) == {
        str(one.tried) for one in ends if one.mean("accuracy") >= 0
    }
    assert [one.mean("over_blind") for one in kept] == sorted(
        one.mean("over_blind") for one in kept
    )


def test_a_policy_drawn_twice_counts_once() -> None:
    done = [
        FinishedTrial(n, Policy.parse(text), "scored", {"ssim": (float(n),)})
        for n, text in enumerate(("24", "3", "42", "3", "none"))
    ]
    assert [one.number for one in qualified(JOB, done)] == [0, 1, 4]


def test_a_score_that_is_not_finite_is_an_error_and_not_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Toy,
        "score",
        lambda *_: dict.fromkeys(Toy.names, torch.full((1, 10), float("nan"), dtype=torch.float64)),
    )
    with pytest.raises(GradveilError, match=r"the over_blind score of policy .* is not finite"):
        run(JOB, tmp_path / "journal")


def test_trials_in_other_hands_are_waited_for(tmp_path: Path) -> None:
    job = replace(JOB, trials=6, keep=1, threshold=-9.0, at_once=1)
    with (
        opened(job, tmp_path / "journal") as other,
        opened(job, tmp_path / "journal") as study,
        Counting(SCORERS) as engine,
    ):
        (held,) = other.claim(1, 6)
        loop = Loop(job, study, engine, SCORERS, Bar(False))

        def hurry(_: float) -> None:
            assert len(study.finished(6)) == 5
            other.finish(
                Trial(held.number, held.tried),
                "scored",
                {"accuracy": [0.0], "over_blind": [-99.0] * 40, "ssim": [-9.0] * 40},
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gradveil.search.trials.time.sleep", hurry)
            done = loop.run()
    assert (
        len(done) == 6
        and qualified(job, done)[0].tried == held.tried
        and engine.policies["accuracy"] == 10
    )


@pytest.mark.parametrize(("finished", "events"), [(0, [50, "told", 50]), (47, [3, 50, "told"])])
def test_the_time_is_told_after_a_whole_group_though_a_stopped_search_left_part_of_one(
    finished: int, events: list[object], tmp_path: Path
) -> None:
    job = replace(JOB, race=True, trials=120)
    with opened(job, tmp_path / "journal") as study:
        for trial in study.claim(50, 120)[:finished]:
            study.finish(trial, "dropped", {"over_blind": [0.0] * 10, "ssim": [0.0] * 10})
    seen: list[object] = []

    class Watched(Loop):
        def score(self, trials: Sequence[Trial[Policy]], *rest: Any) -> None:
            seen.append(len(trials))
            super().score(trials, *rest)

        def tell_time(self, each: float, target: int) -> None:
            seen.append("told")

    with opened(job, tmp_path / "journal") as study, Counting(SCORERS) as engine:
        Watched(job, study, engine, SCORERS, Bar(False)).run()
    assert seen[:3] == events


@pytest.mark.parametrize(
    ("each", "race", "trials"),
    [(0.1, False, None), (5.0, False, "5 min"), (5.0, True, "5 min, less what the race saves")],
)
def test_the_time_told_is_that_of_the_trials_and_of_the_audits(
    each: float, race: bool, trials: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = replace(JOB, race=race)
    parts = f"(trials {trials}, confirming audits 50 s)"
    said = f"about 6 min on this machine; --trials 6: 80 s {parts}\n"
    for shown in (False, True):
        with opened(job, tmp_path / "journal") as study, Counting(SCORERS) as engine:
            loop = Loop(job, study, engine, SCORERS, Bar(shown), lambda: 50.0)
            loop.tell_time(each, 60)
        assert capsys.readouterr().err == (said if shown and trials else "")


def test_what_is_scored_here_has_as_many_threads_as_cores_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Watched(ToyAccuracy):
        def score(self, policies: Sequence[Policy], block: int) -> dict[str, Tensor]:
            seen.append(torch.get_num_threads())
            return super().score(policies, block)

    seen: list[int] = []
    with toys.two_cores(monkeypatch, [1.0, 0.0]):
        with LocalEngine({"accuracy": Watched()}) as engine:
            engine.score("accuracy", [Policy.parse("3"), Policy.parse("7")], 0)
        assert seen == [1, 2] and torch.get_num_threads() == 2
