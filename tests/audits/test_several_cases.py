"""Several cases: what each attacker is told, prepared and tried out once, gone on with."""

import json
import shutil
import sys
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
    CaseResult,
    case_run,
    make_cases,
    name_attacks,
    run_audit,
    stage,
)
from gradveil.audits import prepare as preparing
from gradveil.audits.job import with_controls
from gradveil.audits.prepare import prepare
from gradveil.audits.records import images_path, load_images
from gradveil.audits.run import _missing_control
from gradveil.audits.timing import Costs
from gradveil.core.errors import GradveilError
from gradveil.core.locks import alone
from gradveil.core.progress import Bar
from gradveil.defenses import parse
from gradveil.report.audit import several_in_words

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
        steps=2,
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
    standard = {"adam-cosine", "raced", "closed-form"}
    assert attacks == {
        "none": standard,
        "prune-0.95-clean": standard,
        "prune-0.95": standard | {"masked", "raced+masked"},
        "precode-k-16": standard | {"joint-noise", "raced+joint-noise"},
        "3-1-7": standard | policy | {"raced+transform-known"},
    }
    assert {folder.name for folder in whole.out.iterdir()} == {*attacks, "settings.json"}


def test_restarts_and_steps_of_each_attack_stand_in_the_records_and_below_the_table(
    whole: AuditResult,
) -> None:
    policy = whole.cases[-1]
    searches = policy.settings["searches"]
    assert {*searches} == policy.settings["attacks"].keys() - {"closed-form"}
    assert searches["adam-cosine"] == searches["transform-known"] == "2 x 2"
    assert searches["raced"] == "32 x 1, 8 x 1, 2 x 2"
    said = [line for line in several_in_words(whole) if "restarts x steps of an image: " in line]
    assert len(said) == len({repr(case.settings["searches"]) for case in whole.cases}) == 4
    (ours,) = (line for line in said if line.startswith("3-1-7: "))
    assert "adam-cosine" in ours and "transform-known" in ours and ": 2 x 2;" in ours


def test_attacks_that_do_not_suit_are_left_out_with_the_reason(whole: AuditResult) -> None:
    left = whole.case("precode:k=16").settings["left_out"]
    without = "without-random-layers", "raced+without-random-layers"
    assert set(left) == set(without)  # the bottleneck comes first in this model
    assert all("leave no parameter to match" in left[name] for name in without)
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
    for one in whole.cases:  # a policy adds two guesses that know it
        assert len({record.attack for record in one.of("blind")}) == 2 + 2 * len(one.truths)


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


def positives(case: CaseResult) -> set[str]:
    return {record.attack for record in case.of("positive")}


def test_the_first_case_has_a_positive_control_of_every_attack(whole: AuditResult) -> None:
    """`early-step` and `class-mean` are attacks on the policy alone, the last case."""
    named = {name for case in whole.cases for name in case.settings["attacks"]}
    first, *others = whole.cases
    assert {"early-step", "class-mean"} <= named - first.settings["attacks"].keys()
    assert positives(first) == named and not any(map(positives, others))
    keys = [(record.key, record.image) for record in first.of("positive")]
    assert len(keys) == len({*keys})
    said = "\n".join(several_in_words(whole))
    for name, place in {
        "adam-cosine": "lenet, one image",
        "raced+masked": "lenet, what it undoes at a mild setting, one image",
        "joint-noise": "mlp, what it undoes at a mild setting, one image",
    }.items():
        assert f"Positive control: {name} on an untrained {place}" in said


def test_a_folder_without_the_later_attacks_controls_is_completed(
    job: AuditJob,
    whole: AuditResult,
    tmp_path: Path,
    without_times: Callable[[Any], list[Any]],
) -> None:
    """Older versions made the controls of the first case's attacks only."""
    out = Path(shutil.copytree(whole.out, tmp_path / "run"))
    path, first = out / whole.cases[0].out.name / "records.jsonl", whole.cases[0]
    later = positives(first) - first.settings["attacks"].keys()
    lines = path.read_text().splitlines(keepends=True)
    kept = [
        line
        for line in lines
        if (json.loads(line)["kind"], json.loads(line)["attack"])
        not in {("positive", name) for name in later}
    ]
    assert len(kept) < len(lines)
    path.write_text("".join(kept))
    assert positives(AuditResult.read(out).cases[0]) == {*positives(first)} - later
    again = run_audit(job, out, progress=False).cases[0]
    assert again.settings == first.settings

    def in_order(case: CaseResult) -> list[str]:
        return sorted(map(repr, without_times(case.records)))

    assert in_order(again) == in_order(first)


def test_a_machine_that_has_the_first_case_alone_makes_the_same_controls(
    job: AuditJob, whole: AuditResult, tmp_path: Path
) -> None:
    """And those of breakers that suit no model here, which it cannot know without their case."""
    device = torch.device("cpu")
    names = [
        {name for stage in made.positives for name in stage.attacks}
        for made in (
            prepare(job, tmp_path / "run", None, device, only=0),
            prepare(job, whole.out, None, device),
        )
    ]
    unsuited = {name for case in whole.cases for name in case.settings["left_out"]}
    assert names[1] == positives(whole.cases[0])
    assert names[0] - names[1] == {"without-random-layers", "raced+without-random-layers"}
    assert names[1] <= names[0] <= names[1] | unsuited


def test_controls_that_another_process_made_of_other_attacks_are_left_as_they_are(
    job: AuditJob, whole: AuditResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(whole.out, tmp_path / "run"))
    own = preparing.Prepared._attacks_of_all
    monkeypatch.setattr(
        preparing.Prepared,
        "_attacks_of_all",
        lambda self: {name: each for name, each in own(self).items() if name != "early-step"},
    )
    assert run_audit(job, out, progress=False).cases[0].records == whole.cases[0].records


@pytest.fixture(scope="module")
def quick(job: AuditJob, guess: Any) -> AuditJob:
    """Three cases whose attack costs nothing."""
    return replace(
        job,
        attacks={"guess": guess()},
        auto=False,
        cases=cases("none", "prune:0.5", clean="both"),
        images=1,
        steps=None,
        restarts=None,
    )


@pytest.fixture(scope="module")
def quick_whole(quick: AuditJob, tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    return run_audit(quick, tmp_path_factory.mktemp("quick") / "run", progress=False)


@pytest.fixture
def quick_done(quick_whole: AuditResult, tmp_path: Path) -> AuditResult:
    """The same in a folder that the test may change."""
    shutil.copytree(quick_whole.out, tmp_path / "run")
    return AuditResult.read(tmp_path / "run")


def test_an_audit_killed_between_its_cases_goes_on_to_the_same_records(
    quick: AuditJob,
    quick_whole: AuditResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_times: Callable[[Any], list[Any]],
) -> None:
    go, calls = case_run.CaseRun.go, []

    def killed(self: Any) -> None:
        calls.append(self)
        if len(calls) > 2:
            raise KeyboardInterrupt
        go(self)

    with monkeypatch.context() as patch:
        patch.setattr(case_run.CaseRun, "go", killed)
        with pytest.raises(KeyboardInterrupt):
            run_audit(quick, tmp_path / "again", progress=False)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "again").glob("*/records.jsonl")}
    assert len(times) == 2
    again = run_audit(quick, tmp_path / "again", progress=False)
    assert [without_times(case.records) for case in again.cases] == [
        without_times(case.records) for case in quick_whole.cases
    ]
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())


@pytest.mark.parametrize(
    ("defense", "changes", "says"),
    [
        ("precode:k=4,position=nowhere", {}, "unknown position of defense precode"),
        ("dp:norm=1,multiplier=1", {"model": "own_audit_nets:norm"}, "GroupNorm"),
        (
            "prune:0.5",
            {"attacks": {"masked-rounds": find("masked-rounds")}, "auto": False},
            "no attack suits it: masked-rounds: it needs to know the earlier",
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
    only_there = r"only there: prune-0.95-clean, prune-0.95, precode-k-16, 3-1-7"
    with pytest.raises(
        GradveilError, match=rf"other cases \({only_there}\): choose another --out$"
    ):
        run_audit(replace(job, cases=cases("none")), whole.out, progress=False)
    control = replace(job, cases=with_controls(job.cases))
    with pytest.raises(GradveilError, match=r"\(only here: policy-none\): go on with --no-control"):
        run_audit(control, whole.out, progress=False)
    assert [case.comes_with for case in whole.cases] == ["", "", "", "", "policy:none"]
    with pytest.raises(GradveilError, match="none holds a case of an audit, no audit"):
        AuditResult.read(whole.cases[0].out)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was prepared and tried out, in order."""
    seen: list[str] = []
    plain, tried = preparing._prepare_case, stage.Stage.try_out

    def prepare(job: AuditJob, case: Case, *rest: Any) -> Any:
        seen.append(f"prepare {case.folder}")
        return plain(job, case, *rest)

    def try_out(self: stage.Stage, name: str) -> None:
        acts = "-clean" if self.client.clean else ""
        seen.append(f"try {name} on {self.client.defense}{acts}")
        tried(self, name)

    monkeypatch.setattr(preparing, "_prepare_case", prepare)
    monkeypatch.setattr(stage.Stage, "try_out", try_out)
    return seen


PREPARED = ["prepare none", "prepare prune-0.5-clean", "prepare prune-0.5"]


def test_each_case_is_prepared_once_and_each_attack_tried_once(
    quick: AuditJob, counted: list[str], tmp_path: Path
) -> None:
    both = replace(quick, attacks={**quick.attacks, "closed-form": find("closed-form")})
    run_audit(both, tmp_path / "run", progress=False)
    texts = ("none", "prune:0.5-clean", "prune:0.5")
    assert counted == [
        line
        for prepared, text in zip(PREPARED, texts, strict=True)
        for line in (prepared, f"try guess on {text}", f"try closed-form on {text}")
    ]
    counted.clear()
    run_audit(both, tmp_path / "run", progress=False)
    assert counted == PREPARED  # nothing is tried where all is read back


def test_an_audit_that_goes_on_tries_only_the_cases_it_had_not_begun(
    quick: AuditJob, counted: list[str], quick_done: AuditResult
) -> None:
    done = quick_done
    records = done.cases[0].out / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-40])
    shutil.rmtree(done.cases[2].out)
    again = run_audit(quick, done.out, progress=False)
    assert counted == [*PREPARED, "try guess on prune:0.5"] and len(again.cases) == 3


def test_no_text_of_a_defense_is_parsed_below_the_command_line(
    quick: AuditJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [*sys.modules.values()]:
        if module.__name__.startswith("gradveil") and getattr(module, "parse", None) is parse:
            monkeypatch.setattr(module, "parse", lambda text: pytest.fail(f"parsed {text}"))
    first = run_audit(quick, tmp_path / "run", progress=False)
    assert run_audit(quick, tmp_path / "run", progress=False) == AuditResult.read(first.out)


def test_machines_that_share_the_cases_make_the_audit_of_one(
    quick: AuditJob,
    quick_whole: AuditResult,
    counted: list[str],
    tmp_path: Path,
    without_times: Callable[[Any], list[Any]],
) -> None:
    names = []
    for number in (1, 0, 2):
        part = run_audit(quick, tmp_path / "parts", progress=False, only=number)
        names.append([case.out.name for case in part.cases])
    assert names[0] == ["prune-0.5-clean"] and names[1] == ["none", "prune-0.5-clean"]
    assert [line for line in counted if line.startswith("prepare")] == [
        PREPARED[number] for number in (1, 0, 2)
    ]
    assert [without_times(case.records) for case in part.cases] == [
        without_times(case.records) for case in quick_whole.cases
    ]
    assert [bool(case.of("positive")) for case in part.cases] == [True, False, False]


def test_what_another_process_did_meanwhile_is_not_done_again(
    quick: AuditJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, go, begun = tmp_path / "run", case_run.CaseRun.go, []

    def meanwhile(self: Any) -> None:
        """When the first case is begun another process does the last."""
        begun.append(self)
        if len(begun) == 1:
            run_audit(quick, out, progress=False, only=2)
        go(self)

    monkeypatch.setattr(case_run.CaseRun, "go", meanwhile)
    result = run_audit(quick, out, progress=False)
    for case in result.cases:
        keys = [(record.key, record.image) for record in case.records]
        assert len(keys) == len(set(keys))


def test_a_process_that_comes_too_late_leaves_the_records_of_the_first_alone(
    quick: AuditJob, quick_done: AuditResult
) -> None:
    done = quick_done
    records = done.cases[0].out / "records.jsonl"
    torn = records.read_bytes()[:-40]  # as they are while the first process writes
    records.write_bytes(torn)
    part = done.cases[0].out / "images" / ".guess-0000.safetensors.x.part"
    part.write_bytes(b"half")
    with (
        alone(done.cases[0].out, "auditing into"),
        pytest.raises(GradveilError, match="is auditing into"),
    ):
        run_audit(quick, done.out, progress=False)
    assert records.read_bytes() == torn and part.read_bytes() == b"half"


@pytest.mark.parametrize(("fails", "kept"), [(0, []), (1, ["none", "settings.json"])])
def test_a_failure_leaves_no_folder_without_records(
    quick: AuditJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int, kept: list[str]
) -> None:
    plain = case_run.CaseRun.chunk

    def broken(self: Any, *rest: Any) -> None:
        if self.case.case is quick.cases[fails]:
            raise GradveilError("the disk is full")
        plain(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(case_run.CaseRun, "chunk", broken)
        says = f"defense {quick.cases[fails].defense}: the disk is full"
        with pytest.raises(GradveilError, match=says):
            run_audit(quick, tmp_path / "run", progress=False)
    assert sorted(path.name for path in (tmp_path / "run").glob("*")) == kept
    assert (tmp_path / "run").exists() is bool(kept)
    assert len(run_audit(quick, tmp_path / "run", progress=False).cases) == 3


def test_an_error_names_the_case_once(quick: AuditJob, tmp_path: Path) -> None:
    missing = tuple(replace(case, weights=Path("none.safetensors")) for case in quick.cases)
    with pytest.raises(GradveilError, match=r"^defense none: no checkpoint at none\.safetensors"):
        run_audit(replace(quick, cases=missing), tmp_path / "run", progress=False)
    wrong = replace(quick, cases=cases("none", "precode:k=4,position=nowhere"))
    with pytest.raises(GradveilError) as caught:
        run_audit(wrong, tmp_path / "run", progress=False)
    assert str(caught.value).count("precode:k=4,position=nowhere") == 1
    assert not (tmp_path / "run").exists()


def test_the_bar_counts_what_is_left_of_all_cases(
    quick: AuditJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[float] = []
    lefts: list[list[float]] = []
    costs = Costs({("attack", "guess"): 1.0})  # measured ones are never the same twice
    monkeypatch.setattr(Costs, "of", lambda *_: costs)

    def start(_: Bar, __: str, total: float) -> None:
        totals.append(total)
        lefts.append([])

    def update(_: Bar, *__: Any, left: float | None = None, **___: Any) -> None:
        lefts[-1] += [] if left is None else [left]

    monkeypatch.setattr(Bar, "start", start)
    monkeypatch.setattr(Bar, "update", update)
    done = run_audit(quick, tmp_path / "run", progress=True)
    run_audit(quick, tmp_path / "run", progress=True)
    shutil.rmtree(done.cases[1].out)
    run_audit(quick, tmp_path / "run", progress=True)
    assert totals[0] > totals[2] > 0 == totals[1]
    assert all(
        left[0] == total and left[-1] == 0 for left, total in zip(lefts, totals, strict=True)
    )


@pytest.mark.parametrize(
    ("defenses", "asked"),
    [
        (("none", "3-1-7"), True),
        (("none", "random"), True),
        (("none", "policy:none", "3-1-7"), False),
        (("policy:none", "3-1-7"), False),
        (("none", "policy:3-1-7,augment=no"), False),
        (("none", "prune:0.9"), False),
    ],
)
def test_crop_and_flip_alone_are_asked_for_beside_a_policy_that_comes_with_them(
    defenses: tuple[str, ...], asked: bool
) -> None:
    said = _missing_control([parse(each) for each in defenses])
    assert (said is not None) == asked
    assert said is None or "--defense policy:none" in said
