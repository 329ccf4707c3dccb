"""A whole search on the embedded images: its files, its audits, its joint runs, its refusals."""

import html
import io
import json
import os
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import gradveil as gv
import toys
from gradveil.attacks import GradientMatching, find
from gradveil.attacks.attack_files import short_digest
from gradveil.audits import AuditJob, AuditResult, Case
from gradveil.audits.victims import find_victims
from gradveil.core.errors import GradveilError
from gradveil.core.locks import LOCK, alone
from gradveil.data import load
from gradveil.models import build
from gradveil.models.accuracy import measure_accuracy
from gradveil.models.checkpoints import load_checkpoint, save_checkpoint
from gradveil.papers.records import read_case
from gradveil.report.markup import prose
from gradveil.report.search import confirmation_table, search_in_words, search_tables
from gradveil.report.write import write_report
from gradveil.search import SearchJob, SearchResult, run_search, search_policies, setup
from gradveil.search.comparisons import (
    FEWEST,
    MODELS,
    TESTS,
    Comparison,
    Confirmation,
    compare,
    in_words,
    verdict,
    verdicts,
)
from gradveil.search.comparisons import confirmation as confirmed
from gradveil.search.confirm import (
    audit_seconds,
    audit_tasks,
    policies_to_audit,
    read_audits,
    read_confirmed,
)
from gradveil.search.engine import LocalEngine
from gradveil.search.loop import qualified
from gradveil.search.run import accuracy_note, job_notes, knowledge_note, threshold_note
from gradveil.search.space import FinishedTrial
from gradveil.stats import holm_cutoff
from gradveil.transforms import Policy

SOURCE = """
from torch import nn


def linear(classes, size, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))
"""
Start = Callable[..., BaseProcess]
ROWS = ("none", "random", "single", "hybrid")
RECORDS = Path(__file__).parents[2] / "benchmarks/results/reproduce"


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_search_nets.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


def measured(job: SearchJob) -> str:
    """The accuracy of the semi-trained weights, whatever their file says."""
    assert isinstance(job.model, str) and job.checkpoint is not None
    model = load_checkpoint(job.checkpoint, build(job.model, channels=1, size=28, classes=10))
    return f"accuracy of {measure_accuracy(model, load('fashion-mnist-mini', 'test'))[0]:.1%}"


@pytest.fixture(scope="module")
def job(nets: Path) -> SearchJob:
    """Quick: a linear model gives its images away in closed form."""
    model = "own_search_nets:linear"
    weights = nets / "weights.safetensors"
    save_checkpoint(
        weights, build(model, channels=1, size=28, classes=10, seed=9), {"test_accuracy": 0.125}
    )
    return SearchJob(
        data="fashion-mnist-mini",
        model=model,
        checkpoint=weights,
        trials=8,
        keep=4,
        threshold=-1e7,
        images=8,
        attack=find("closed-form"),
        audit_images=3,
        seed=4,
    )


@pytest.fixture(scope="module")
def whole(job: SearchJob, tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return run_search(job, tmp_path_factory.mktemp("whole") / "run", progress=False)


def test_the_audits_are_foreseen_as_eight_cases_on_images_that_no_score_has_seen(
    job: SearchJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def seconds(audit: AuditJob, out: Path, *_: object) -> float:
        asked.append((len(audit.cases), audit.images, audit.apart, out))
        return 80.0

    monkeypatch.setattr("gradveil.search.confirm.foreseen_seconds", seconds)

    def foreseen(workers: int) -> float:
        assert job.checkpoint is not None
        return audit_seconds(
            job,
            job.checkpoint,
            tmp_path,
            apart=(1, 2),
            root=None,
            device=torch.device("cpu"),
            workers=workers,
        )

    assert (foreseen(1), foreseen(4), foreseen(100)) == (80.0, 20.0, 10.0)
    assert {*asked} == {(8, 3, (1, 2), tmp_path.resolve() / "confirm")}


@pytest.fixture
def copied_audits(whole: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the whole search in place of new ones, where they are not the point."""

    def copy(job: object, out: Path, **_: object) -> None:  # noqa: ARG001
        if not out.exists():  # else it came with the first case
            shutil.copytree(whole.out / "confirm", out)

    monkeypatch.setattr("gradveil.search.confirm.run_audit", copy)


def test_notes_say_that_the_model_learned_nothing_and_the_threshold_filtered_nothing(
    job: SearchJob, whole: SearchResult
) -> None:
    found = [one.quantities["accuracy"].mean for one in whole.trials]
    assert any(
        note.startswith(f"the semi-trained model has a test {measured(job)}, chance is 10.0%")
        and "its scores say little" in note
        for note in whole.notes
    )
    filtered = (
        "the accuracy threshold -1e+07 dropped no policy: their scores were "
        f"{min(found):.1f} to {max(found):.1f}"
    )
    assert filtered in whole.notes


@pytest.mark.parametrize(("accuracy", "doubtful"), [(0.19, True), (0.2, False), (0.8, False)])
def test_a_model_at_twice_chance_is_not_doubted(accuracy: float, doubtful: bool) -> None:
    assert ("chance" in accuracy_note(accuracy, 10)) == doubtful


def test_notes_say_what_the_settings_leave_open(job: SearchJob, whole: SearchResult) -> None:
    assert "3 audit images: no test can tell two policies apart on fewer than 9" in whole.notes
    enough = replace(job, audit_images=9)
    assert job_notes(enough, job.keep) == job_notes(replace(enough, race=True), job.keep) == ()
    assert job_notes(enough, 3) == ("the front holds 3 policies that qualify, 4 were wanted",)
    (raced,) = job_notes(replace(enough, race=True, race_confidence=0.95), job.keep)
    assert raced.startswith("raced at a confidence of 0.95")


def test_no_test_can_reject_on_fewer_images_than_the_note_says() -> None:
    """All comparisons are as clear as they can be, and all tests of the audits clearer."""
    for n, can in ((FEWEST - 1, False), (FEWEST, True)):
        clear = Comparison("lineup", n, 0.0, 1.0, 0.5**n, 1.0)
        family = [*([clear.less, clear.more] * (TESTS // 2)), *[0.05**n] * 68]
        assert (verdict([clear], holm_cutoff(family)) == "less") == can


def scored(number: int, policy: str, *values: float) -> FinishedTrial[Policy]:
    return FinishedTrial(
        number, Policy.parse(policy), "scored", {"accuracy": (-1.0,), "ssim": values}
    )


def test_more_audited_images_than_no_score_has_seen_are_refused(
    job: SearchJob, tmp_path: Path
) -> None:
    with pytest.raises(
        GradveilError,
        match="audit images 201: fashion-mnist-mini test has 200 that no score has seen",
    ):
        run_search(replace(job, audit_images=201), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_of_policies_that_do_the_same_the_first_is_kept(job: SearchJob) -> None:
    """The same functions with other draws, idle functions, and the same value on every image."""
    trials = [
        scored(0, "24", 3, 4),
        scored(1, "42-28", 2, 2),
        scored(2, "9", 1, 2),
        scored(3, "9-22", 1, 2),
        scored(4, "3", 1.5, 1.5),
    ]
    assert [str(one.tried) for one in qualified(job, trials)] == ["9", "3", "24"]


def test_what_of_the_probe_is_ranked_by_can_be_chosen_and_the_gain_over_blind_breaks_ties(
    job: SearchJob,
) -> None:
    measured = {"9": (5, 0.1, 1), "3": (4, 0.2, 0), "15": (3, 0.3, 0), "1": (2, 0.4, 1)}
    trials = [
        FinishedTrial(
            number,
            Policy.parse(policy),
            "scored",
            {"accuracy": (0.0,), "over_blind": (gain,), "ssim": (ssim,), "lineup": (hit,)},
        )
        for number, (policy, (gain, ssim, hit)) in enumerate(measured.items())
    ]
    for rank_by, order in (
        ("over_blind", "1 15 3 9"),
        ("ssim", "9 3 15 1"),
        ("lineup", "15 3 1 9"),
    ):
        assert (
            " ".join(str(one.tried) for one in qualified(replace(job, rank_by=rank_by), trials))
            == order
        )


def test_a_threshold_that_filters_is_not_noted(job: SearchJob) -> None:
    trials = [
        FinishedTrial(
            n, Policy.parse("1-2-3"), "scored", {"accuracy": (mean,), "over_blind": (0.0,)}
        )
        for n, mean in enumerate((-80.0, -90.0))
    ]
    assert threshold_note(replace(job, threshold=-85), trials) == ()
    assert threshold_note(replace(job, threshold=-95), trials) == (
        "the accuracy threshold -95 dropped no policy: their scores were -90.0 to -80.0",
    )


def test_the_kept_policies_leak_least_and_the_files_agree(whole: SearchResult) -> None:
    means = [one.quantities["ssim"].mean for one in whole.kept]
    everything = sorted(
        {one.quantities["ssim"].mean for one in whole.trials}
    )  # some policies give the same images
    assert len(whole.kept) == 4 and len(whole.trials) == 8 and means == everything[:4]
    assert whole.hybrid is not None and len(whole.hybrid.members) == 2
    toml = whole.out / "policies.toml"
    assert (
        Policy.load(toml) == whole.hybrid
        and Policy.load(toml, "best") == whole.best == whole.kept[0].policy
    )
    assert [str(Policy.load(toml, str(rank))) for rank in range(1, 5)] == [
        str(one.policy) for one in whole.kept
    ]
    assert (whole.out / "trials.csv").read_text().count("\n") == 9
    assert json.loads((whole.out / "search.json").read_text())["hybrid"] == str(whole.hybrid)
    assert (
        whole.kept[0].quantities["over_blind"].n == 8
        and whole.kept[0].quantities["accuracy"].n == 10
    )


def test_the_policies_found_tell_every_image_that_a_score_used_and_no_other(
    job: SearchJob, whole: SearchResult
) -> None:
    test = load("fashion-mnist-mini", "test")
    chosen = setup.Setup.of(job, None).chosen
    used = {short_digest(test.images[number]) for number in (*chosen.leak, *chosen.accuracy)}
    toml = whole.out / "policies.toml"
    assert whole.hybrid is not None and len(used) == 300 and len(whole.scored) == 300
    for policy in (Policy.load(toml), Policy.load(toml, "2"), whole.best, whole.hybrid):
        assert set(policy.scored_on) == used


def test_an_audit_of_its_file_attacks_no_image_that_a_score_used(
    job: SearchJob, whole: SearchResult
) -> None:
    found = gv.audit(
        job.model,
        "fashion-mnist-mini",
        defenses=["none", str(whole.out / "policies.toml"), whole.best],
        attacks=["closed-form"],
        victims=8,
        sham=False,
        progress=False,
    )
    attacked = [{record.image for record in case.of("attack")} for case in found.cases]
    assert attacked[0] == attacked[1] == attacked[2] and max(attacked[0]) < 200
    usual = find_victims(load("fashion-mnist-mini", "test"), 8, 1, None, 0).numbers
    assert int(usual.max()) >= 200  # with no such file some are


def test_every_row_is_audited_on_both_models(whole: SearchResult) -> None:
    cases = {case.out.name: case for case in AuditResult.read(whole.out / "confirm").cases}
    folders = {(model, row): cases[f"{model}-{row}"] for model in MODELS for row in ROWS}
    assert {model: tuple(rows) for model, rows in whole.confirmed.items()} == dict.fromkeys(
        MODELS, ROWS
    )
    weights = {
        model: {folders[model, row].settings["weights_sha256"] for row in ROWS} for model in MODELS
    }
    assert weights["semi-trained"] == {whole.settings["weights_sha256"]}
    assert weights["untrained"].isdisjoint(weights["semi-trained"])
    attacked = {record.image for record in cases["untrained-none"].of("attack")}
    assert len(attacked) == 3 and max(attacked) < 200  # scores start there, on this split
    for (_, row), audit in folders.items():
        policy = audit.defense
        wanted = {"none": "policy:none", "single": str(whole.best), "hybrid": str(whole.hybrid)}
        assert policy.count("+") == 9 if row == "random" else policy == wanted[row]
        assert {record.image for record in audit.of("attack")} == attacked and audit.of("blind")
    positive = [case for case, audit in folders.items() if audit.of("positive")]
    assert positive == [("semi-trained", "none")]  # it depends on neither
    assert len(whole.words) == 5  # two for each model, and one on the tests


def test_audits_are_read_back_by_model_and_row(whole: SearchResult) -> None:
    audits = read_audits(whole.out, whole.confirmed)
    assert tuple(audits) == MODELS and all(tuple(rows) == ROWS for rows in audits.values())
    for rows in audits.values():
        assert rows["single"].defense == str(whole.best)
        assert rows["none"].defense == "policy:none"
        for audit in rows.values():
            assert audit.attack == "closed-form" and len(audit.scores) == 3
            assert {row.kind for row in audit.rows} >= {"attack", "blind"}


def test_comparisons_and_flags_of_a_search_are_one_family_of_tests(whole: SearchResult) -> None:
    plain = AuditResult.read(whole.out / "confirm")
    tests = TESTS + sum(len(case.p_values) for case in plain.cases)
    joined = read_confirmed(whole.out, whole.confirmed)
    audits = read_audits(whole.out, whole.confirmed)
    rows = [row for models in audits.values() for made in models.values() for row in made.rows]
    rows += [row for case in joined.cases for row in case.rows]
    assert {row.verdict.tests for row in rows} == {tests}
    assert f"at 5% over all {tests} tests together (Holm)" in whole.words[-1]


def test_tests_of_the_audits_count_in_the_verdict_on_a_policy(whole: SearchResult) -> None:
    """The same difference is told among the comparisons alone, and not beside many open tests."""
    audited = read_audits(whole.out, whole.confirmed)["untrained"]["none"]

    def said(p_values: tuple[float, ...]) -> list[str]:
        none = replace(confirmation(1.0, 1.0, 10), rows=audited.rows, p_values=p_values)
        rows = {"none": none, "random": none, "single": confirmation(0.0, 0.0, 10)}
        return verdicts(dict.fromkeys(MODELS, rows))

    for p_values, says in (
        ((), "leaks less than none"),
        ((0.9,) * 40, "was not shown to leak less"),
        ((1e-9,) * 40, "leaks less than none"),
    ):
        lines = [line for line in said(p_values) if "against the images used" in line]
        assert len(lines) == 2 and all(says in line for line in lines)


def test_a_search_that_is_done_is_read_back(
    job: SearchJob, whole: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "score_units", lambda *_: pytest.fail("scored again"))
    monkeypatch.setattr(LocalEngine, "run", lambda *_: pytest.fail("audited again"))
    assert run_search(job, whole.out, progress=False) == whole == SearchResult.read(whole.out)


@pytest.mark.usefixtures("copied_audits")
def test_every_step_that_is_done_is_skipped(
    job: SearchJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: SearchResult
) -> None:
    """Stopped in the audits: the second run scores nothing, and ends like an unbroken one."""

    def stop(*_: object, **more: object) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "run", stop)
        with pytest.raises(KeyboardInterrupt):
            run_search(job, tmp_path / "run", progress=False)
    with pytest.raises(GradveilError, match="has not ended"):
        SearchResult.read(tmp_path / "run")
    monkeypatch.setattr(LocalEngine, "score_units", lambda *_: pytest.fail("scored again"))
    again = run_search(job, tmp_path / "run", progress=False)
    assert (again.trials, again.kept, again.words) == (whole.trials, whole.kept, whole.words)
    assert (tmp_path / "run/policies.toml").read_text() == (whole.out / "policies.toml").read_text()


def test_people_are_told_what_was_found_and_what_was_less_than_usual(
    job: SearchJob, whole: SearchResult
) -> None:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    for table in search_tables(whole):
        console.print(table)
    console.file.close()
    shown, words = console.export_text(), "\n".join(search_in_words(whole))
    (head,) = {line.strip() for line in shown.splitlines() if "95%" in line}
    controls = ["sham", "draws", "truth", "dients"]
    assert head.split() == ["n", "up", "95%", *controls, "PSNR", "dB", "dB", "blind", "SSIM"]
    for part in (
        "Policies kept",
        str(whole.best),
        "semi-trained",
        "untrained",
        "against originals",
        "blind: class mean",
        "n 8",
        "n 10",
    ):
        assert part in shown
    for part in (
        "8 policies drawn: 8 scored",
        f"Hybrid: {whole.hybrid}",
        "8 images instead of 64",
        "10 batches of 30",
        measured(job),
        "scored on the images they were chosen by",
    ):
        assert part in words


@pytest.mark.usefixtures("copied_audits")
def test_the_privacy_score_and_a_race_search_too(job: SearchJob, tmp_path: Path) -> None:
    settings = replace(
        job,
        score="privacy",
        race=True,
        race_confidence=0.6,
        at_once=4,
        trials=16,
        keep=2,
        images=20,
    )
    found = run_search(settings, tmp_path / "run", progress=False)
    assert (
        found.saving is not None
        and found.saving.dropped == found.states("dropped") > 0
        and set(found.kept[0].quantities) == {"privacy", "accuracy"}
    )
    assert f"The race dropped {found.saving.dropped} policies" in "\n".join(search_in_words(found))
    assert SearchResult.read(found.out) == found


@pytest.mark.usefixtures("copied_audits")
@pytest.mark.parametrize("rank_by", ["over_blind", "lineup"])
def test_a_search_ranks_by_another_measure_of_the_probe(
    job: SearchJob, tmp_path: Path, rank_by: str
) -> None:
    found = run_search(
        replace(job, rank_by=rank_by, trials=4, keep=3, images=5), tmp_path / "run", progress=False
    )
    means = [one.quantities[rank_by].mean for one in found.kept]
    assert means == sorted(means) and means[0] == min(
        one.quantities[rank_by].mean for one in found.trials
    )


@pytest.mark.usefixtures("copied_audits")
def test_nsga2_reports_its_front(job: SearchJob, tmp_path: Path) -> None:
    found = run_search(
        replace(job, sampler="nsga2", score="privacy"), tmp_path / "run", progress=False
    )
    assert {one.number for one in found.kept} <= {
        one.number for one in found.front
    } and found.states("scored") == 8
    assert len(search_tables(found)) == 4


@pytest.mark.usefixtures("copied_audits")
def test_a_model_is_trained_where_none_is_given(
    job: SearchJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert setup.EPOCHS == 50  # here as many as take no time
    monkeypatch.setattr(setup, "EPOCHS", 3)
    settings = replace(job, checkpoint=None, trials=1, keep=1, images=2, audit_images=1)
    found = run_search(settings, tmp_path / "run", progress=False)
    facts = json.loads((found.out / "semi-trained/model.json").read_text())
    assert (facts["epochs"], facts["fraction"], facts["images"], facts["seed"]) == (3, 0.1, 200, 4)
    assert (
        found.hybrid is None
        and found.no_hybrid == "only one policy qualifies"
        and "No hybrid: only one" in "\n".join(search_in_words(found))
    )


SEARCHING = """
import shutil
from pathlib import Path
from gradveil.search import confirm, run_search, setup

job, out, whole, log, seconds = arguments

def copy(audit, out, **_):
    import time
    with log.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(seconds)
    shutil.copytree(whole / "confirm", out, dirs_exist_ok=True)

confirm.run_audit, setup.EPOCHS = copy, 2
run_search(job, out, progress=False)
"""


def test_two_processes_in_one_folder_end_with_the_same_result(
    job: SearchJob, nets: Path, tmp_path: Path, whole: SearchResult, start_process: Start
) -> None:
    """They train once, share the trials, and only one of them makes the audits."""
    out, log = tmp_path / "run", tmp_path / "audits"
    few = replace(job, checkpoint=None, trials=6, keep=2, images=2)
    both = [
        start_process(f"sys.path.insert(0, {str(nets)!r})" + SEARCHING, few, out, whole.out, log, 0)
        for _ in range(2)
    ]
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    result = SearchResult.read(out)
    drawn = [(trial.number, trial.policy) for trial in whole.trials[:6]]
    assert [(trial.number, trial.policy) for trial in result.trials] == drawn
    assert json.loads((out / "semi-trained/model.json").read_text())["epochs"] == 2
    audits = log.read_text().split()
    assert len(audits) == (8 if result.hybrid else 6) and len(set(audits)) == 1


def test_killed_twice_it_ends_with_the_policies_of_an_unbroken_search(
    job: SearchJob, nets: Path, tmp_path: Path, whole: SearchResult, start_process: Start
) -> None:
    """Once among the trials, once among the audits."""
    out, log = tmp_path / "run", tmp_path / "audits"
    code = f"sys.path.insert(0, {str(nets)!r})" + SEARCHING
    journal = whole.out / "study.journal"
    moments = ((out / "study.journal", journal.stat().st_size // 3), (log, 0))
    for path, size in moments:
        process = start_process(code, job, out, whole.out, log, 0.5)
        until = time.monotonic() + 60
        while not (path.is_file() and path.stat().st_size > size):
            assert process.is_alive() and time.monotonic() < until
            time.sleep(0.005)
        process.kill()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL and not (out / "search.json").exists()
    last = start_process(code, job, out, whole.out, log, 0)
    last.join(60)
    assert last.exitcode == 0
    assert (out / "policies.toml").read_bytes() == (whole.out / "policies.toml").read_bytes()
    result = SearchResult.read(out)
    assert result.trials == whole.trials and result.words == whole.words


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({"checkpoint": Path("none.safetensors")}, {}, "no checkpoint at none.safetensors"),
        ({"images": 301}, {}, "images 301: fashion-mnist-mini test has 300 from image 200 on"),
        ({"model": "nope"}, {}, "unknown model 'nope'"),
        ({"data": "nope"}, {}, "unknown dataset 'nope'"),
        ({"model": "lenet", "checkpoint": None}, {}, "linear inversion needs"),
        ({}, {"engine": "slurm"}, "unknown engine 'slurm': choose from local, ray"),
        ({}, {"ray_address": "auto"}, "ray address auto: engine local has no use for it"),
        ({}, {"device": "tpu"}, "unknown device 'tpu'"),
        ({}, {"storage": "postgresql://user:secret@127.0.0.1:1/none"}, "cannot be used"),
        ({}, {"storage": "nonsense"}, "storage 'nonsense'"),
        ({}, {"storage": ""}, "storage ''"),
        ({}, {"storage": "sqlite://"}, "ends with the process"),
        (
            {"checkpoint": None},
            {"engine": "ray", "ray_address": "127.0.0.1:1"},
            "no cluster answers",
        ),
    ],
)
def test_what_cannot_work_is_one_line_and_leaves_no_folder(
    job: SearchJob, tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    changed = replace(job, **changes)
    said = toys.refused(run_search, changed, tmp_path / "run", progress=False, **options)
    assert says in said and "secret" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("copied_audits")
def test_a_study_of_other_settings_is_refused_and_the_folder_given_back(
    job: SearchJob, tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    settings = replace(job, trials=2, keep=1, images=2, audit_images=1)
    run_search(settings, tmp_path / "one", storage=storage, progress=False)
    with pytest.raises(
        GradveilError, match=r"is a search with other settings \(keep 1 there, 2 here\)"
    ):
        run_search(replace(settings, keep=2), tmp_path / "two", storage=storage, progress=False)
    assert not (tmp_path / "two").exists()
    joined = run_search(settings, tmp_path / "three", storage=storage, progress=False)
    assert joined.trials == SearchResult.read(tmp_path / "one").trials and joined.storage == storage


@pytest.mark.usefixtures("copied_audits")
def test_a_search_that_is_done_is_not_that_of_another_storage(
    job: SearchJob, tmp_path: Path, whole: SearchResult
) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    with pytest.raises(
        GradveilError,
        match=r"has ended, with its study in .*study\.journal: choose another --out for sqlite",
    ):
        run_search(job, whole.out, storage=storage, progress=False)
    settings = replace(job, trials=2, keep=1, images=2, audit_images=1)
    first = run_search(settings, tmp_path / "run", storage=storage, progress=False)
    assert run_search(settings, tmp_path / "run", storage=storage, progress=False) == first


def test_missing_audits_are_one_line_that_says_how_to_make_them_anew(
    whole: SearchResult, tmp_path: Path
) -> None:
    shutil.copytree(whole.out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/confirm/untrained-none")
    with pytest.raises(
        GradveilError,
        match=r"untrained-none is missing.*; delete .*search\.json and run the search again",
    ):
        search_tables(SearchResult.read(tmp_path / "run"))


@pytest.mark.parametrize(
    ("augment", "defenses"),
    [(True, ["policy:none", "3-1"]), (False, ["none", "policy:3-1,augment=no"])],
)
def test_policies_and_none_are_audited_with_crop_and_flip_where_the_search_had_them(
    job: SearchJob, tmp_path: Path, augment: bool, defenses: list[str]
) -> None:
    policies = {"none": Policy(), "single": Policy.parse("3-1")}
    tasks = made_audits(replace(job, augment=augment), tmp_path, policies)
    assert [str(case.defense) for case, _ in tasks] == defenses * 2


def made_audits(job: SearchJob, out: Path, policies: dict[str, Policy]) -> list[tuple[Case, Path]]:
    """The case and the folder of each confirming audit, after the way to another process."""
    tasks = audit_tasks(job, out / "weights", out, policies, apart=(), root=None, device="cpu")
    found = []
    for task in tasks:
        audit, folder, _, _, number = pickle.loads(pickle.dumps(task)).args
        found.append((audit.cases[number], folder / audit.cases[number].folder))
    return found


def test_a_folder_of_something_else_is_refused(
    job: SearchJob, whole: SearchResult, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for out, says in (
        (tmp_path, "is not empty and holds no search"),
        (tmp_path / "notes.txt", "is a file: choose another --out, a folder"),
        (whole.out / "confirm/untrained-none", "holds a case of an audit, not a search"),
    ):
        with pytest.raises(GradveilError, match=says):
            run_search(job, out, progress=False)
    with pytest.raises(
        GradveilError, match=r"holds a search with other settings \(keep 4 there, 3 here\)"
    ):
        run_search(replace(job, keep=3), whole.out, progress=False)
    assert SearchResult.read(whole.out) == whole


def test_a_damaged_result_is_one_line(whole: SearchResult, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_bytes((whole.out / "settings.json").read_bytes())
    plain = json.loads((whole.out / "search.json").read_text())
    first = plain["trials"][0]
    for text, says in (
        ("{}", "format: missing"),
        ("[1]", "expected object, got array"),
        ('{"trials": [', "truncated"),
        ("[" * 100_000, "brackets nested"),
        (json.dumps(plain | {"format": "gradveil search 9"}), "its format is 'gradveil search 9'"),
        (json.dumps(plain | {"kept": []}), "kept: expected array of length >= 1"),
        (json.dumps(plain | {"kept": [999]}), "kept: expected numbers of trials, each once"),
        (json.dumps(plain | {"trials": [first, first]}), "trials: a number is there twice"),
        (json.dumps(plain | {"trials": [first | {"state": "x"}]}), r"trials\[0\].state"),
        (json.dumps(plain | {"confirmed": {"a": {}}}), r"confirmed\.a\.none: missing"),
        (json.dumps(plain | {"settings": {}}), "settings: data: missing"),
        (json.dumps(plain | {"hybrid": "99"}), "policy '99'"),
    ):
        (tmp_path / "search.json").write_text(text)
        with pytest.raises(GradveilError, match=rf"search\.json is damaged \(.*{says}") as caught:
            SearchResult.read(tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(GradveilError, match="no search"):
        SearchResult.read(whole.out / "confirm")


def test_the_random_row_is_ten_policies_of_another_stream(
    job: SearchJob, whole: SearchResult, tmp_path: Path
) -> None:
    drawn = policies_to_audit(job, whole.best, None)["random"]
    assert drawn == policies_to_audit(job, Policy(), None)["random"]
    assert drawn != policies_to_audit(replace(job, seed=5), Policy(), None)["random"]
    assert len(drawn.members) == 10 and not {Policy((member,)) for member in drawn.members} & {
        one.policy for one in whole.trials
    }
    audits = made_audits(job, tmp_path, {"none": Policy()})
    assert [path.name for _, path in audits] == ["semi-trained-none", "untrained-none"]


def confirmation(
    by: float, hit: float, count: int = 16, like: float = 0.5, lineups: bool = True
) -> Confirmation:
    """An audit of so many images, whose scores are `by` and a tenth of the image's number."""
    rank = {"lineup": hit} if lineups else {}
    scores = {
        image: {"used": {"over_blind": by + image / 10, "ssim": like + image / 1000} | rank}
        for image in range(count)
    }
    return Confirmation("toy", "none", (), scores)


def test_a_difference_is_claimed_only_where_a_test_finds_it() -> None:
    low, high = confirmation(0.0, 0.0), confirmation(1.0, 1.0)
    less, more, nothing = compare(low, high), compare(high, low), compare(low, low)
    assert [verdict(found, 0.001) for found in (less, more, nothing)] == ["less", "more", "open"]
    assert less[0] == Comparison("lineup", 16, 0.0, 1.0, 0.5**16, 1.0)
    assert nothing[0].less == nothing[0].more == 1.0
    assert in_words(less, "none", 0.001).startswith(
        "leaks less than none (n = 16: rank 1 0.0% against 100.0%, p = "
    )
    assert in_words(nothing, "none", 0.001).startswith(
        "was not shown to leak less than none (n = 16: "
    )


def test_rank_1_alone_decides_what_leaks_less() -> None:
    """Its direction counts, whatever dB over blind and SSIM say; they are told beside it."""
    against = compare(confirmation(0.0, 1.0, like=0.1), confirmation(1.0, 0.0))
    assert [test.less <= 0.001 for test in against] == [False, True, True]
    assert verdict(against, 0.001) == "more"
    assert in_words(against, "random", 0.001).startswith("leaks more than random (n = 16: rank 1 ")
    alone = compare(confirmation(0.0, 0.5, like=0.1), confirmation(0.0, 0.5))
    assert verdict(alone, 0.001) == "open"
    assert in_words(alone, "random", 0.001).startswith(
        "was not shown to leak less than random: it resembles less (SSIM), but is picked out as "
        "often (n = 16: rank 1 50.0% against 50.0%, p = 1 for less; beside it dB over blind "
    )
    more = in_words(compare(confirmation(2.0, 0.5), confirmation(0.0, 0.5)), "none", 0.001)
    assert "it resembles more (dB over blind), but is picked out as often" in more
    assert "leaks" not in more


def test_where_nearly_all_images_have_rank_1_it_is_said_to_separate_nothing() -> None:

    def said(missed: int) -> str:
        few, all_ = confirmation(0.0, 0.0, missed), confirmation(0.0, 1.0, 40)
        found = replace(all_, scores={**all_.scores, **few.scores})
        return in_words(compare(found, all_), "none", 0.001)

    says = "less than none: rank 1 is saturated and separates nothing at this setting (n = 40: "
    assert says in said(0) and says in said(2)
    assert said(3).startswith("was not shown to leak less than none (n = 40: rank 1 92.5%")
    assert said(40).startswith("leaks less than none")


def test_without_line_ups_nothing_is_decided() -> None:
    low, high = (confirmation(by, 0, like=by / 9, lineups=False) for by in (0.0, 5.0))
    found = compare(low, high)
    assert [test.n for test in found] == [0, 16, 16] and found[1].less < 0.001
    says = in_words(found, "none", 0.001)
    assert "since there are no line-ups" in says and "(n = 16: no line-up; beside it" in says
    assert "leaks" not in says and "rank 1" not in says


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, Confirmation]]:
    """The audits of the recorded search on Fashion-MNIST, as its command reads them."""
    (folder,) = RECORDS.glob("search-fashion-mnist-lenet-probe-*")
    cells = json.loads((folder / "cell.json").read_text())["result"]["cases"]
    return {
        model: {row: confirmed(read_case(folder / "confirm" / f"{model}-{row}")) for row in rows}
        for model, rows in cells.items()
    }


def test_a_recorded_policy_that_is_picked_out_as_often_is_not_said_to_leak_less(
    recorded: dict[str, dict[str, Confirmation]],
) -> None:
    """All images of the untrained model have rank 1, under random policies too."""
    semi, semi_controls, untrained, untrained_controls, family = verdicts(recorded)
    assert "rank 1 100.0% against 100.0%, p = 1 for less" in untrained
    assert untrained.count("rank 1 is saturated and separates nothing") == 2
    assert "it resembles less (dB over blind), but is picked out as often" in untrained
    assert semi.count("rank 1 is saturated") == 1  # against random, not against none
    for line in (semi, untrained):
        assert " leaks " not in line
    assert "sham 0/32, 0/32, 0/32, 0/32; guess that knows the draws 1/64, 0/64" in semi_controls
    assert "gradient line-up 32/32, 32/32, 32/32, 32/32" in untrained_controls
    assert family.startswith("Rank 1 alone decides") and "all 92 tests together (Holm)" in family


def test_a_table_has_the_controls_of_its_line_ups_where_it_is_wide_enough(
    recorded: dict[str, dict[str, Confirmation]],
) -> None:
    def shown(width: int) -> list[str]:
        console = Console(width=width, file=io.StringIO())
        with console.capture() as printed:
            console.print(confirmation_table("untrained lenet", recorded["untrained"]))
        return [line for line in printed.get().splitlines() if line.startswith("hybrid")]

    used, original = (line.split() for line in shown(100))
    assert used[1:8] == ["64", "64/64", "94-100%", "1/32", "0/64", "32/32", "32/32"]
    assert original[4:8] == ["1/32", "0/64", "3/32", "32/32"]
    narrow = shown(75)[0].split()
    assert narrow[1:4] == used[1:4] and "1/32" not in narrow


def test_a_search_whose_attack_does_not_know_the_policy_says_so_with_the_command(
    job: SearchJob, whole: SearchResult, tmp_path: Path
) -> None:
    """Its page says so too, and has the controls of the line-ups."""
    (note,) = knowledge_note(job)
    assert note.startswith("the attack that confirms, closed-form, was not told the policy")
    assert "`gradveil audit ... --defense OUT/policies.toml --attack auto`" in note
    assert note in whole.notes and f"Note: {note}." in search_in_words(whole)
    assert note in json.loads((whole.out / "search.json").read_text())["notes"]
    page = html.unescape(write_report(whole.out, out=tmp_path / "page").page.read_text())
    controls = [line for line in whole.words if "controls with rank 1 (none, random, " in line]
    assert (
        html.unescape(prose(note)) in page
        and len(controls) == 2
        and all(line in page for line in controls)
    )
    assert knowledge_note(replace(job, attack=find("transform-known"))) == ()
    assert knowledge_note(replace(job, attack=find("transform-guessed"))) == ()


def test_only_images_that_both_audits_reconstructed_are_compared(whole: SearchResult) -> None:
    assert [found.n for found in compare(confirmation(0, 0, 15), confirmation(1, 1))] == [15] * 3
    assert verdict(compare(confirmation(0, 0, 0), confirmation(1, 1)), 0.001) == "open"
    folder = whole.out / "confirm/untrained-none"
    lines = (folder / "records.jsonl").read_text().splitlines()
    failed = [json.loads(line) for line in lines]
    first = next(record for record in failed if record["kind"] == "attack")
    first |= {"status": "failed: x", "scores": {}}
    copy = shutil.copytree(whole.out, whole.out.parent / "torn") / "confirm/untrained-none"
    (copy / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in failed))
    audits = read_audits(whole.out.parent / "torn", whole.confirmed)
    images = {record["image"] for record in failed if record["kind"] == "attack"}
    assert set(audits["untrained"]["none"].scores) == images - {first["image"]}


@pytest.mark.usefixtures("copied_audits")
def test_own_models_images_and_attacks_are_searched_with(
    job: SearchJob, tmp_path: Path, whole: SearchResult
) -> None:
    train, test = load("fashion-mnist-mini", "train"), load("fashion-mnist-mini", "test")
    model = build("own_search_nets:linear", channels=1, size=28, classes=10, seed=4)
    settings: dict[str, Any] = {
        "checkpoint": str(job.checkpoint),
        "trials": 8,
        "keep": 4,
        "threshold": -1e7,
        "images": 8,
        "audit_images": 3,
        "seed": 4,
        "progress": False,
    }
    own = search_policies(
        model, (train, test), attack=find("closed-form"), out=str(tmp_path / "own"), **settings
    )
    assert own.trials == whole.trials and own.kept == whole.kept
    assert own.settings["model"] == "Sequential" and own.settings["attack"] == "closed-form"
    assert own.settings["data"] == "fashion-mnist-mini" and own.settings["data_sha256"]
    with pytest.raises(GradveilError, match="holds a search with other settings"):
        other = build("own_search_nets:linear", channels=1, size=28, classes=10, seed=5)
        search_policies(
            other, (train, test), attack="closed-form", out=tmp_path / "own", **settings
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": nn.Linear(3, 10)}, "model Linear fails on images of shape"),
        ({"image_size": 32}, "image size 32: only named data sets are resized"),
        ({"test": {"classes": ("a", "b")}}, "training split has classes 10, the test split 2"),
        ({"attack": "zhu"}, "unknown attack 'zhu'"),
    ],
)
def test_own_values_that_cannot_work_are_one_line(
    job: SearchJob, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    train, test = load("fashion-mnist-mini", "train"), load("fashion-mnist-mini", "test")
    test = replace(test, **changes.pop("test", {}))
    given: dict[str, Any] = {"model": "own_search_nets:linear", "attack": "closed-form"}
    given |= {"data": (train, test), "checkpoint": job.checkpoint} | changes
    assert says in toys.refused(search_policies, **given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_attack_is_named_after_its_preset_or_its_class(job: SearchJob) -> None:
    dlg = find("dlg")
    assert isinstance(dlg, GradientMatching)
    assert replace(job, attack=dlg).settings()["attack"] == "dlg"
    own = replace(job, attack=replace(dlg, steps=7)).settings()
    assert own["attack"] == "GradientMatching" and "steps=7" in own["attack_settings"]
    both = replace(job, attack=find("masked+likelihood"), attack_name="masked+likelihood")
    assert both.settings()["attack"] == "masked+likelihood"
    assert "attack_settings" not in both.settings()


def test_a_result_shows_itself_as_a_table(whole: SearchResult) -> None:
    text, page = repr(whole), whole._repr_html_()
    assert text.startswith("4 of 8 policies kept: own_search_nets:linear on fashion-mnist-mini\n")
    for tried in whole.kept:
        cells = (str(tried.policy), tried.quantities["over_blind"].text())
        assert all(cell in text and f"<td>{cell}</td>" in page for cell in cells)
    for part in (f"Hybrid: {whole.hybrid}.", *whole.words):
        assert part in text and html.escape(part) in page


def test_a_lock_that_a_killed_search_left_goes_when_its_result_is_read(
    job: SearchJob, whole: SearchResult
) -> None:
    lock = whole.out / LOCK
    lock.write_text("process 1 on elsewhere\n")
    assert run_search(job, whole.out, progress=False) == whole and not lock.exists()
    with alone(whole.out, "searching into"):
        assert run_search(job, whole.out, progress=False) == whole and lock.exists()


def test_names_in_a_result_send_no_codes_and_add_no_lines(whole: SearchResult) -> None:
    odd = replace(
        whole, settings={"model": "m\x1b[2J\n<b>", "data": "d"}, words=("of \x1b]0;t\x07\nx",)
    )
    text, page = repr(odd), odd._repr_html_()
    assert len(text.splitlines()) == len(repr(whole).splitlines()) - len(whole.words) + 1
    assert r"m\x1b[2J\n<b> on d" in text and r"of \x1b]0;t\x07\nx" in text
    assert r"m\x1b[2J\n&lt;b&gt; on d</caption>" in page and r"<p>of \x1b]0;t\x07\nx</p>" in page
    assert all(letter.isprintable() for letter in page)


def test_trials_become_a_data_frame_where_pandas_is_installed(
    whole: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = ModuleType("pandas")
    fake.DataFrame = lambda rows, columns: (rows, columns)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", fake)
    rows, columns = whole.to_pandas()
    assert len(rows) == 8 and columns[:4] == ["trial", "policy", "state", columns[3]]
    assert dict(zip(columns, rows[0], strict=True))["over_blind_n"] == 8
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(GradveilError, match=r"^to_pandas needs pandas: pip install pandas$"):
        whole.to_pandas()


def test_a_data_frame_of_trials_has_a_row_for_each(whole: SearchResult) -> None:
    pandas = pytest.importorskip("pandas")
    frame = whole.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame["trial"]) == list(range(8))
    kept = {tried.number: tried.quantities["over_blind"].mean for tried in whole.kept}
    found = frame.set_index("trial")["over_blind_mean"].loc[list(kept)]
    assert found.dtype == float and list(found) == list(kept.values())
