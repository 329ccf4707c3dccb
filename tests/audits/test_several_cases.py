"""Several cases: each attacker told what it may know, prepared and tried out once, gone on with anywhere."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.attacks import find
from gradveil.audits import (
    AuditJob,
    AuditResult,
    Case,
    make_cases,
    name_attacks,
    run,
    run_audit,
)
from gradveil.audits.records import images_path, load_images
from gradveil.core import GradveilError
from gradveil.defenses import parse

DEFENSES = ("none", "prune:0.95", "precode:k=16", "3-1-7")


def cases(*defenses: str, clean: str = "both") -> tuple[Case, ...]:
    return make_cases([parse(text) for text in defenses], clean=clean)


@pytest.fixture(scope="module")
def job(nets: str) -> AuditJob:
    return AuditJob(
        f"{nets}:linear",
        "fashion-mnist-mini",
        auto=True,
        cases=cases(*DEFENSES),
        images=3,
        steps=4,
        restarts=2,
        victims_at_once=2,
        seed=3,
    )


@pytest.fixture(scope="module")
def whole(job: AuditJob, tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    return run_audit(job, tmp_path_factory.mktemp("several") / "run", progress=False)


def test_each_defense_meets_the_standard_attack_and_its_own_breakers(whole: AuditResult) -> None:
    attacks = {one.out.name: set(one.settings["attacks"]) for one in whole.cases}
    policy = {"early-step", "transform-known", "transform-drawn", "transform-guessed", "class-mean"}
    standard = {"adam-cosine", "closed-form"}
    assert attacks == {
        "none": standard,
        "prune-0.95-clean": standard,
        "prune-0.95": standard | {"masked"},
        "precode-k-16": standard | {"joint-noise"},
        "3-1-7": standard | policy,
    }
    assert {folder.name for folder in whole.out.iterdir()} == {*attacks, "settings.json"}


def test_attacks_that_do_not_suit_are_left_out_with_the_reason(whole: AuditResult) -> None:
    left = whole.case("precode:k=16").settings["left_out"]
    assert set(left) == {"without-random-layers"}  # the bottleneck comes first in this model
    assert "leave no parameter to match" in left["without-random-layers"]
    assert whole.case("none").settings["left_out"] == {}


def test_the_strongest_attack_is_the_one_that_identifies_most_then_that_with_most_decibels(
    whole: AuditResult,
) -> None:
    strongest = {one.defense: one.strongest for one in whole.cases if not one.clean}
    assert strongest["none"].attack == "closed-form" and strongest["none"].identified == 3
    assert (strongest["3-1-7"].attack, strongest["3-1-7"].truth) == ("closed-form", "used")
    rows = [
        row for row in whole.case("prune:0.95").rows if row.kind == "attack" and row.truth == "used"
    ]
    assert strongest["prune:0.95"].identified == max(row.identified for row in rows)


def test_the_clean_gradient_is_that_of_no_defense(whole: AuditResult) -> None:
    clean, none, pruned = (
        whole.case("prune:0.95", clean=True),
        whole.case("none"),
        whole.case("prune:0.95"),
    )
    scores = [
        [record.scores for record in one.of("attack", "closed-form")]
        for one in (clean, none, pruned)
    ]
    assert scores[0] == scores[1] != scores[2]


def test_one_part_alone_has_positive_controls_and_all_have_blind_ones(whole: AuditResult) -> None:
    assert [bool(one.of("positive")) for one in whole.cases] == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert all(len({record.attack for record in one.of("blind")}) == 4 for one in whole.cases)


def test_a_case_is_the_same_alone_and_beside_others(
    job: AuditJob, whole: AuditResult, tmp_path: Path, without_times: Callable[[Any], list[Any]]
) -> None:
    (alone,) = run_audit(replace(job, cases=cases("3-1-7")), tmp_path / "run", progress=False).cases
    beside = whole.case("3-1-7")
    for kind in ("attack", "blind"):
        assert without_times(alone.of(kind)) == without_times(beside.of(kind))
    ours, theirs = (
        load_images(images_path(c.out, "attack", "closed-form", 0))[0] for c in (alone, beside)
    )
    assert torch.equal(ours["used"], theirs["used"]) and torch.equal(ours["found"], theirs["found"])


def test_auto_changes_which_attacks_run_and_nothing_else(
    job: AuditJob, whole: AuditResult, tmp_path: Path
) -> None:
    auto, named = name_attacks(["adam-cosine", "closed-form"])
    plain = run_audit(
        replace(job, attacks=named, auto=auto, cases=cases("prune:0.95", clean="no")),
        tmp_path / "run",
        progress=False,
    )
    assert list(plain.cases[0].settings["attacks"]) == ["adam-cosine", "closed-form"]
    for name in named:
        ours, theirs = (
            case.of("attack", name) for case in (plain.cases[0], whole.case("prune:0.95"))
        )
        assert [r.scores for r in ours] == [r.scores for r in theirs] and len(ours) == 3


def test_an_audit_that_is_done_is_read_back(job: AuditJob, whole: AuditResult) -> None:
    assert run_audit(job, whole.out, progress=False) == whole == AuditResult.read(whole.out)


@pytest.fixture
def quick(job: AuditJob, guess: Any) -> AuditJob:
    """Three cases whose attack costs nothing."""
    return replace(
        job,
        attacks={"guess": guess()},
        auto=False,
        cases=cases("none", "prune:0.5", clean="both"),
        images=2,
        steps=None,
        restarts=None,
    )


def test_an_audit_killed_between_its_cases_goes_on_to_the_same_records(
    quick: AuditJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_times: Callable[[Any], list[Any]],
) -> None:
    expected = run_audit(quick, tmp_path / "whole", progress=False)
    go, calls = run._CaseRun.go, []

    def killed(self: Any) -> None:
        calls.append(self)
        if len(calls) > 2:
            raise KeyboardInterrupt
        go(self)

    with monkeypatch.context() as patch:
        patch.setattr(run._CaseRun, "go", killed)
        with pytest.raises(KeyboardInterrupt):
            run_audit(quick, tmp_path / "again", progress=False)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "again").glob("*/records.jsonl")}
    assert len(times) == 2
    again = run_audit(quick, tmp_path / "again", progress=False)
    assert [without_times(case.records) for case in again.cases] == [
        without_times(case.records) for case in expected.cases
    ]
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())


@pytest.mark.parametrize(
    ("defense", "changes", "says"),
    [
        ("precode:k=4,position=nowhere", {}, "unknown position of defense precode"),
        ("dp:norm=1,multiplier=1", {"model": "resnet20-4"}, "GroupNorm"),
        (
            "prune:0.5",
            {"attacks": {"masked-rounds": find("masked-rounds")}, "auto": False},
            "no attack suits it",
        ),
        ("prune:0.5", {"images": 501}, "has 500"),
    ],
)
def test_what_cannot_be_audited_is_said_before_anything_is_written(
    job: AuditJob, tmp_path: Path, defense: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(GradveilError) as caught:
        run_audit(
            replace(job, cases=cases("none", defense), **changes),
            tmp_path / "run",
            progress=False,
        )
    assert says in str(caught.value) and not (tmp_path / "run").exists()


def test_another_audit_in_the_folder_is_refused(job: AuditJob, whole: AuditResult) -> None:
    with pytest.raises(GradveilError, match="holds an audit with other settings"):
        run_audit(replace(job, cases=cases("none")), whole.out, progress=False)
    with pytest.raises(
        GradveilError, match="none holds one case of an audit: read the folder above"
    ):
        AuditResult.read(whole.cases[0].out)
