"""How long an audit takes, and audits that are fitted to a budget."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.attacks import GradientMatching, find
from gradveil.audits import AuditJob, Case, case_run, run_audit
from gradveil.audits.job import shorter
from gradveil.audits.prepare import fitted_to, foreseen_seconds, prepare
from gradveil.audits.timing import Clock, Costs, Pace, work
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Bar
from gradveil.core.types import Protocol
from gradveil.defenses import as_defense

CPU = torch.device("cpu")


@pytest.fixture
def job() -> AuditJob:
    attacks = {
        "adam-cosine": replace(find("adam-cosine"), steps=40),  # type: ignore[type-var]
        "raced": replace(find("raced"), steps=24),  # type: ignore[type-var]
    }
    return AuditJob("lenet", "fashion-mnist-mini", attacks, images=2, positive=False, sham=False)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration of an image takes a second, whatever the machine."""
    timing = "gradveil.audits.timing"
    monkeypatch.setattr(f"{timing}.time_iteration", lambda *_: 1.0)
    monkeypatch.setattr(f"{timing}._tried", lambda *_: False)


def test_work_counts_every_row_of_a_race() -> None:
    raced = find("raced")
    assert isinstance(raced, GradientMatching)
    rows = sum(rows * steps for rows, steps in raced.race.stages(raced.restarts, raced.steps))
    assert work(raced, 3) == 3 * rows == 3 * 17_600 and work(find("closed-form"), 3) == 3


@pytest.mark.usefixtures("slow")
def test_the_time_is_that_of_all_iterations_of_all_images(job: AuditJob, tmp_path: Path) -> None:
    (case,) = prepare(job, tmp_path / "run", None, CPU).cases
    costs = Costs.of([case.stage], {})
    raced = job.attacks["raced"]
    assert costs.total([case.stage]) == 2 * (40 + work(raced, 1))
    with_sham = replace(case.stage, sham=True)
    assert costs.total([with_sham]) == 2 * (40 + work(raced, 1)) + 2 * work(raced, 1)


@pytest.mark.usefixtures("slow")
def test_after_local_steps_the_time_is_also_that_of_every_candidates_update(
    job: AuditJob, tmp_path: Path
) -> None:
    """Two images in one update, 20 candidates for each, two images in each update made again."""
    job = replace(job, batch_size=2, protocol=Protocol(local_steps=2))
    (case,) = prepare(job, tmp_path / "run", None, CPU).cases
    costs = Costs.of([case.stage], {})
    attacks = 2 * (40 + work(job.attacks["raced"], 1))
    assert case.stage.victims.lineups is not None
    candidates = case.stage.victims.lineups.candidates.shape[1]
    assert costs.total([case.stage]) == attacks + 0.5 * 2 * candidates * 2
    half = costs.fit([case.stage], (attacks / 2 + 2 * candidates) / 60)
    assert half == pytest.approx(0.5)
    once = 2 * (1 + 32 + 8 + 2)  # one step of adam-cosine, and of each stage of the race
    assert once == sum(work(each, 2) for each in shorter(job.attacks, 0.0).values())
    least = min(once + 2 * candidates, 4 * once) / 60
    with pytest.raises(GradveilError, match=r"^budget .*; give at least 2.1, fewer images"):
        costs.fit([case.stage], 0.99 * least)
    assert 2.0 < least <= 2.1 and costs.fit([case.stage], 1.01 * least) > 0


@pytest.mark.usefixtures("slow")
def test_in_a_budget_every_attack_makes_the_same_share_and_it_is_kept(
    job: AuditJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = 2 * (40 + work(job.attacks["raced"], 1))
    budget = whole / 60 / 4
    found = run_audit(replace(job, budget=budget), tmp_path / "run", progress=False)
    (case,) = found.cases
    assert found.settings["share"] == pytest.approx(0.25)
    assert "steps=10," in case.settings["attacks"]["adam-cosine"]
    assert "steps=6," in case.settings["attacks"]["raced"]
    monkeypatch.setattr("gradveil.audits.timing.time_iteration", lambda *_: 5.0)  # a busier machine
    again = run_audit(replace(job, budget=budget), tmp_path / "run", progress=False)
    assert again.settings == found.settings
    with pytest.raises(GradveilError, match=r"with other settings \(budget"):
        run_audit(replace(job, budget=2 * budget), tmp_path / "run", progress=False)


@pytest.mark.usefixtures("slow")
def test_an_attack_of_few_steps_does_not_rule_the_budget(job: AuditJob, tmp_path: Path) -> None:
    few = replace(find("dlg"), steps=2)  # type: ignore[type-var]
    job = replace(job, attacks={"few": few, "many": replace(find("dlg"), steps=998)})  # type: ignore[type-var]
    prepared = prepare(job, tmp_path / "run", None, CPU)
    fitted = fitted_to(prepared, 2 * 101 / 60)  # seconds for 101 iterations of each of two images
    assert [each.steps for each in fitted.cases[0].stage.attacks.values()] == [1, 100]  # type: ignore[attr-defined]
    least = 2 * 2 / 60
    with pytest.raises(
        GradveilError, match=r"for one iteration of every attack; .* at least 0\.067,"
    ):
        fitted_to(prepared, 0.99 * least)
    fitted = fitted_to(prepared, 0.067)
    assert [each.steps for each in fitted.cases[0].stage.attacks.values()] == [1, 1]  # type: ignore[attr-defined]


def test_a_budget_too_small_for_attacks_without_iterations_is_one_line(tmp_path: Path) -> None:
    exact = AuditJob(
        "mlp", "fashion-mnist-mini", {"closed-form": find("closed-form")}, positive=False
    )
    prepared = prepare(exact, tmp_path / "run", None, CPU)
    with pytest.raises(GradveilError, match=r"^budget 1e-09: .* give at least "):
        fitted_to(prepared, 1e-9)


@pytest.mark.usefixtures("slow")
def test_the_positive_control_is_within_the_budget(job: AuditJob, tmp_path: Path) -> None:
    job = replace(job, positive=True)
    each = 40 + work(job.attacks["raced"], 1)  # seconds of an image, of which the control has two
    prepared = fitted_to(prepare(job, tmp_path / "run", None, CPU), 4 * each / 60 / 4)
    assert prepared.job.share == pytest.approx(0.25)


@pytest.mark.usefixtures("slow")
def test_a_large_budget_changes_nothing_and_one_too_small_is_refused(
    job: AuditJob, tmp_path: Path
) -> None:
    found = run_audit(replace(job, budget=1e6), tmp_path / "whole", progress=False)
    assert "steps=40," in found.cases[0].settings["attacks"]["adam-cosine"]
    with pytest.raises(
        GradveilError, match=r"^budget 0\.001: .* too few for one iteration .* give at least 1\.5,"
    ):
        run_audit(replace(job, budget=0.001), tmp_path / "none", progress=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_a_number_of_minutes(job: AuditJob, budget: float) -> None:
    with pytest.raises(GradveilError, match=r"^budget .*: minutes must be above 0 and finite$"):
        replace(job, budget=budget)
    with pytest.raises(
        GradveilError, match=r"^share .*: of the iterations, above 0 and at most 1$"
    ):
        replace(job, share=2 * budget)


def test_a_measured_cost_is_near_the_time_an_attack_takes(job: AuditJob, tmp_path: Path) -> None:
    (case,) = prepare(job, tmp_path / "run", None, CPU).cases
    untried = replace(case.stage, trials={})
    costs = Costs.of([untried], {})
    assert 0 < costs("attack", "adam-cosine", job.attacks["adam-cosine"], 2) < 30


def test_shorter_audits_are_offered_with_the_time_they_take(job: AuditJob) -> None:
    long = replace(job, attacks={"adam-cosine": find("adam-cosine")})
    assert Costs().cheaper(long, 4_800.0) == {"--steps 1000": 1_000.0, "--budget 20": 1_200.0}
    assert Costs().cheaper(replace(long, steps=60), 100.0) == {}
    assert Costs().cheaper(replace(long, budget=9.0), 4_800.0) == {}


@pytest.mark.usefixtures("slow")
def test_cases_that_are_run_apart_are_each_prepared_and_attacked_and_one_has_the_control(
    job: AuditJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0])
    monkeypatch.setattr("gradveil.audits.prepare.time.perf_counter", lambda: next(clock, 100.0))
    cases = tuple(Case(as_defense(text, "defense")) for text in ("none", "prune:0.5", "prune:0.9"))
    several = replace(job, cases=cases, positive=True)
    each = 40 + work(job.attacks["raced"], 1)  # seconds of an image; there are 2, also as a control
    out = tmp_path / "run"
    assert foreseen_seconds(several, out, None, CPU) == 3 * 100 + 3 * 2 * each + 2 * each
    assert not out.exists()


class Followed(Bar):
    """A bar that keeps what it is told of the time left."""

    def __init__(self) -> None:
        super().__init__(shown=False)
        self.shown = True
        self.told: list[tuple[float, float]] = []

    def update(self, done: float | None = None, **more: Any) -> None:
        if done is not None:
            self.told.append((done, more["left"]))

    def start(self, what: str, total: float, done: float = 0) -> None:
        """Show nothing."""


def test_the_time_left_is_that_of_the_iterations_that_were_made_not_of_those_foreseen(
    job: AuditJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of an attack's iterations takes ten times as long, as of L-BFGS it may."""
    now = 0.0
    monkeypatch.setattr("gradveil.audits.timing.time.perf_counter", lambda: now)
    attack, costs, bar = job.attacks["adam-cosine"], Costs({("attack", "a"): 1.0}), Followed()
    after = 400.0  # seconds of what follows
    clock = Clock(bar, lambda: costs("attack", "a", attack, 1) + after)
    clock.start()
    pace = Pace()
    for done in range(1, 41):
        now += 1.0 if done <= 20 else 10.0
        if (whole := pace.whole(done, 40)) is not None:
            costs.learn("attack", "a", attack, 1, whole)
        clock.step(min(pace.over, costs("attack", "a", attack, 1)))
        if done == 20:
            assert bar.told[-1][1] == pytest.approx(20 + after)
    lefts = dict(zip(range(1, 41), (left for _, left in bar.told), strict=True))
    assert lefts[30] == pytest.approx(100 + after) and lefts[40] == pytest.approx(after)
    assert bar.told[-1][0] == pytest.approx(440 * 220 / 620)  # the share of the time that is over
    assert costs("attack", "a", attack, 2) == pytest.approx(2 * 220)  # so others are foreseen


def test_an_audit_that_goes_on_foresees_what_is_left_by_the_time_its_attacks_took(
    job: AuditJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(job, victims_at_once=1)
    plain, chunks = case_run.CaseRun.chunk, 0

    def one_chunk(self: case_run.CaseRun, stage: Any, number: int) -> None:
        nonlocal chunks
        if chunks:
            raise KeyboardInterrupt
        chunks += 1
        plain(self, stage, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(case_run.CaseRun, "chunk", one_chunk)
        run_audit(job, tmp_path / "run", progress=False)
    path = tmp_path / "run" / "none" / "records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    took = {"adam-cosine": 100.0, "raced": 3_000.0}
    for line in lines:
        line["seconds"] = took.get(line["attack"], 0.0)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def timed(*_: Any) -> float:
        raise AssertionError("an attack is timed that was measured")

    said: list[str] = []
    monkeypatch.setattr("gradveil.audits.timing.time_iteration", timed)
    monkeypatch.setattr("gradveil.core.progress.Bar.say", lambda _, text: said.append(text))
    run_audit(job, tmp_path / "run", progress=True)
    assert [each for each in said if "on this machine" in each] == ["about 52 min on this machine"]
