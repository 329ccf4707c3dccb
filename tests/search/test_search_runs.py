"""A whole search on the embedded images: its files, its confirming audits, two processes in one folder, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradveil.audits import AuditJob, AuditResult
from gradveil.core.errors import GradveilError
from gradveil.models import build
from gradveil.models.checkpoints import save_checkpoint
from gradveil.report.search import search_in_words, search_tables
from gradveil.search import SearchJob, SearchResult, search
from gradveil.search.confirm import (
    FEWEST,
    MODELS,
    Comparison,
    compare,
    in_words,
    read,
    rows,
    verdict,
    work,
)
from gradveil.search.engine import LocalEngine
from gradveil.search.loop import qualified
from gradveil.search.results import accuracy_note, job_notes, threshold_note
from gradveil.search.space import Finished
from gradveil.transforms import Policy

SOURCE = """
from torch import nn


def linear(classes, size, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))
"""
ROWS = ("none", "random", "single", "hybrid")


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_search_nets.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr("gradveil.audits.pools.CANDIDATES", 20)  # quicker
        yield folder


@pytest.fixture(scope="module")
def job(nets: Path) -> SearchJob:
    """Quick: a linear model gives its images away in closed form."""
    model = "own_search_nets:linear"
    weights = nets / "weights.safetensors"
    save_checkpoint(
        weights, build(model, channels=1, size=28, classes=10, seed=9), {"test_accuracy": 0.125}
    )
    return SearchJob(
        "fashion-mnist-mini",
        model,
        weights,
        trials=12,
        keep=5,
        threshold=-1e7,
        images=12,
        attack="closed-form",
        audit_images=3,
        seed=4,
    )


@pytest.fixture(scope="module")
def whole(job: SearchJob, tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return search(job, tmp_path_factory.mktemp("whole") / "run", progress=False)


@pytest.fixture
def copied_audits(whole: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the whole search in place of new ones, where they are not the point."""

    def copy(engine: LocalEngine, work: Sequence[tuple[AuditJob, Path]], **more: object) -> None:  # noqa: ARG001
        for _, out in work:
            shutil.copytree(whole.out / "confirm" / out.name, out)

    monkeypatch.setattr(LocalEngine, "audits", copy)


def test_notes_say_that_the_model_learned_nothing_and_the_threshold_filtered_nothing(
    whole: SearchResult,
) -> None:
    found = [one.quantities["accuracy"].mean for one in whole.trials]
    assert any(
        note.startswith(
            "the semi-trained model has a test accuracy of 12.5%, chance is 10.0%: its scores say little"
        )
        for note in whole.notes
    )
    filtered = f"the accuracy threshold -1e+07 dropped no policy: their scores were {min(found):.1f} to {max(found):.1f}"
    assert filtered in whole.notes


@pytest.mark.parametrize(("accuracy", "doubtful"), [(0.19, True), (0.2, False), (0.8, False)])
def test_a_model_at_twice_chance_is_not_doubted(
    tmp_path: Path, accuracy: float, doubtful: bool
) -> None:
    save_checkpoint(
        tmp_path / "w.safetensors",
        build("mlp", channels=1, size=8, classes=10, seed=0),
        {"test_accuracy": accuracy},
    )
    (note,) = accuracy_note(tmp_path / "w.safetensors", 10)
    assert ("chance" in note) == doubtful


def test_notes_say_what_the_settings_leave_open(job: SearchJob, whole: SearchResult) -> None:
    assert "3 audit images: no test can tell two policies apart on fewer than 7" in whole.notes
    enough = replace(job, audit_images=7)
    assert job_notes(enough, job.keep) == job_notes(replace(enough, race=True), job.keep) == ()
    assert job_notes(enough, 3) == ("the front holds 3 policies that qualify, 5 were wanted",)
    (raced,) = job_notes(replace(enough, race=True, race_confidence=0.95), job.keep)
    assert raced.startswith("raced at a confidence of 0.95")


def test_no_test_can_reject_on_fewer_images_than_the_note_says() -> None:
    for n, can in ((FEWEST - 1, False), (FEWEST, True)):
        clear = Comparison("over_blind", n, 0.0, 1.0, 0.5**n, 1.0)
        assert (verdict([clear]) == "less") == can


def scored(number: int, policy: str, *values: float) -> Finished:
    return Finished(
        number, Policy.parse(policy), "scored", {"accuracy": (-1.0,), "over_blind": values}
    )


def test_of_policies_that_do_the_same_the_first_is_kept(job: SearchJob) -> None:
    """The same functions with other draws, functions that do nothing, and the same value on every image."""
    trials = [
        scored(0, "24", 3, 4),
        scored(1, "42-28", 2, 2),
        scored(2, "9", 1, 2),
        scored(3, "9-22", 1, 2),
        scored(4, "3", 1.5, 1.5),
    ]
    assert [str(one.policy) for one in qualified(job, trials)] == ["9", "3", "24"]


def test_what_of_the_probe_is_ranked_by_can_be_chosen_and_the_gain_over_blind_breaks_ties(
    job: SearchJob,
) -> None:
    measured = {"9": (5, 0.1, 1), "3": (4, 0.2, 0), "15": (3, 0.3, 0), "1": (2, 0.4, 1)}
    trials = [
        Finished(
            number,
            Policy.parse(policy),
            "scored",
            {"accuracy": (0.0,), "over_blind": (gain,), "ssim": (ssim,), "identified": (hit,)},
        )
        for number, (policy, (gain, ssim, hit)) in enumerate(measured.items())
    ]
    for rank_by, order in (
        ("over_blind", "1 15 3 9"),
        ("ssim", "9 3 15 1"),
        ("identified", "15 3 1 9"),
    ):
        assert (
            " ".join(str(one.policy) for one in qualified(replace(job, rank_by=rank_by), trials))
            == order
        )


def test_a_threshold_that_filters_is_not_noted(job: SearchJob) -> None:
    trials = [
        Finished(n, Policy.parse("1-2-3"), "scored", {"accuracy": (mean,), "over_blind": (0.0,)})
        for n, mean in enumerate((-80.0, -90.0))
    ]
    assert threshold_note(replace(job, threshold=-85), trials) == ()
    assert threshold_note(replace(job, threshold=-95), trials) == (
        "the accuracy threshold -95 dropped no policy: their scores were -90.0 to -80.0",
    )


def test_the_kept_policies_leak_least_and_the_files_agree(whole: SearchResult) -> None:
    means = [one.quantities["over_blind"].mean for one in whole.kept]
    everything = sorted(
        {one.quantities["over_blind"].mean for one in whole.trials}
    )  # some policies give the same images
    assert len(whole.kept) == 5 and len(whole.trials) == 12 and means == everything[:5]
    assert whole.hybrid is not None and len(whole.hybrid.members) == 2
    toml = whole.out / "policies.toml"
    assert (
        Policy.load(toml) == whole.hybrid
        and Policy.load(toml, "best") == whole.best == whole.kept[0].policy
    )
    assert [str(Policy.load(toml, str(rank))) for rank in range(1, 6)] == [
        str(one.policy) for one in whole.kept
    ]
    assert (whole.out / "trials.csv").read_text().count("\n") == 13
    assert json.loads((whole.out / "search.json").read_text())["hybrid"] == str(whole.hybrid)
    assert (
        whole.kept[0].quantities["over_blind"].n == 12
        and whole.kept[0].quantities["accuracy"].n == 10
    )


def test_every_row_is_audited_on_both_models(whole: SearchResult, job: SearchJob) -> None:
    audits = read(whole.out, whole.confirmed)
    assert tuple(audits) == MODELS and all(tuple(found) == ROWS for found in audits.values())
    weights = {
        model: {one.settings["weights_sha256"] for one in found.values()}
        for model, found in audits.items()
    }
    assert weights["semi-trained"] == {whole.settings["weights_sha256"]} and weights[
        "untrained"
    ].isdisjoint(weights["semi-trained"])
    for found in audits.values():
        assert found["none"].settings["policy"] == "none" and found["single"].settings[
            "policy"
        ] == str(whole.best)
        assert (
            found["hybrid"].settings["policy"] == str(whole.hybrid)
            and found["random"].settings["policy"].count("+") == 9
        )
        for one in found.values():
            assert {record.image for record in one.of("attack")} == {0, 1, 2} and one.of("blind")
    with_positive = [
        (model, row)
        for model, found in audits.items()
        for row, one in found.items()
        if one.of("positive")
    ]
    assert with_positive == [("semi-trained", "none")]  # it depends on neither
    assert job.checkpoint is not None and len(whole.words) == 2


def test_a_search_that_is_done_is_read_back(
    job: SearchJob, whole: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "score_units", lambda *_: pytest.fail("scored again"))
    monkeypatch.setattr(LocalEngine, "audits", lambda *_: pytest.fail("audited again"))
    assert search(job, whole.out, progress=False) == whole == SearchResult.read(whole.out)


@pytest.mark.usefixtures("copied_audits")
def test_every_step_that_is_done_is_skipped(
    job: SearchJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: SearchResult
) -> None:
    """Stopped in the audits: the second run scores nothing, and ends like one that was not stopped."""

    def stop(*_: object, **more: object) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "audits", stop)
        with pytest.raises(KeyboardInterrupt):
            search(job, tmp_path / "run", progress=False)
    with pytest.raises(GradveilError, match="has not ended"):
        SearchResult.read(tmp_path / "run")
    monkeypatch.setattr(LocalEngine, "score_units", lambda *_: pytest.fail("scored again"))
    again = search(job, tmp_path / "run", progress=False)
    assert (again.trials, again.kept, again.words) == (whole.trials, whole.kept, whole.words)
    assert (tmp_path / "run/policies.toml").read_text() == (whole.out / "policies.toml").read_text()


def test_people_are_told_what_was_found_and_what_was_less_than_usual(whole: SearchResult) -> None:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    for table in search_tables(whole):
        console.print(table)
    console.file.close()
    shown, words = console.export_text(), "\n".join(search_in_words(whole))
    for part in (
        "Policies kept",
        str(whole.best),
        "semi-trained",
        "untrained",
        "against the originals",
        "blind: class mean",
        "n 12",
        "n 10",
    ):
        assert part in shown
    for part in (
        "12 policies drawn: 12 scored",
        f"Hybrid: {whole.hybrid}",
        "12 images instead of 64",
        "10 batches of 30",
        "accuracy of 12.5%",
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
    found = search(settings, tmp_path / "run", progress=False)
    assert (
        found.saving is not None
        and found.saving.dropped == found.states("dropped") > 0
        and set(found.kept[0].quantities) == {"privacy", "accuracy"}
    )
    assert f"The race dropped {found.saving.dropped} policies" in "\n".join(search_in_words(found))
    assert SearchResult.read(found.out) == found


@pytest.mark.usefixtures("copied_audits")
@pytest.mark.parametrize("rank_by", ["ssim", "identified"])
def test_a_search_ranks_by_another_measure_of_the_probe(
    job: SearchJob, tmp_path: Path, rank_by: str
) -> None:
    found = search(replace(job, rank_by=rank_by), tmp_path / "run", progress=False)
    means = [one.quantities[rank_by].mean for one in found.kept]
    assert means == sorted(means) and means[0] == min(
        one.quantities[rank_by].mean for one in found.trials
    )


@pytest.mark.usefixtures("copied_audits")
def test_nsga2_reports_its_front(job: SearchJob, tmp_path: Path) -> None:
    found = search(replace(job, sampler="nsga2", score="privacy"), tmp_path / "run", progress=False)
    assert {one.number for one in found.kept} <= {
        one.number for one in found.front
    } and found.states("scored") == 12
    assert len(search_tables(found)) == 4


@pytest.mark.usefixtures("copied_audits")
def test_a_model_is_trained_where_none_is_given(job: SearchJob, tmp_path: Path) -> None:
    settings = replace(job, checkpoint=None, trials=1, keep=1, images=2, audit_images=1)
    found = search(settings, tmp_path / "run", progress=False)
    facts = json.loads((found.out / "semi-trained/model.json").read_text())
    assert (facts["epochs"], facts["fraction"], facts["images"], facts["seed"]) == (50, 0.1, 200, 4)
    assert (
        found.hybrid is None
        and found.no_hybrid == "only one policy qualifies"
        and "No hybrid: only one" in "\n".join(search_in_words(found))
    )


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from gradveil.audits import pools
from gradveil.search import SearchJob, search
pools.CANDIDATES = 20
result = search(SearchJob(**eval(sys.argv[1])), Path(sys.argv[2]), progress=False)
print(result.best)
"""


def test_two_processes_in_one_folder_end_with_the_same_result(
    job: SearchJob, nets: Path, tmp_path: Path, whole: SearchResult
) -> None:
    """They train once, share the trials, and one of them writes the files."""
    out = tmp_path / "run"
    arguments = {**vars(job), "checkpoint": None, "audit_images": 1}
    both = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, repr(arguments), str(out)],
            env=os.environ | {"PYTHONPATH": str(nets)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    found = SearchResult.read(out)
    assert said == [f"{found.best}\n"] * 2 and [one.number for one in found.trials] == list(
        range(12)
    )
    assert [str(one.policy) for one in found.trials] == [str(one.policy) for one in whole.trials]


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
    with pytest.raises(GradveilError) as caught:
        search(replace(job, **changes), tmp_path / "run", progress=False, **options)
    assert (
        says in str(caught.value)
        and "\n" not in str(caught.value)
        and "secret" not in str(caught.value)
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("copied_audits")
def test_a_study_of_other_settings_is_refused_and_the_folder_given_back(
    job: SearchJob, tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    settings = replace(job, trials=2, keep=1, images=2, audit_images=1)
    search(settings, tmp_path / "one", storage=storage, progress=False)
    with pytest.raises(
        GradveilError, match=r"is a search with other settings \(keep 1 there, 2 here\)"
    ):
        search(replace(settings, keep=2), tmp_path / "two", storage=storage, progress=False)
    assert not (tmp_path / "two").exists()
    joined = search(settings, tmp_path / "three", storage=storage, progress=False)
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
        search(job, whole.out, storage=storage, progress=False)
    settings = replace(job, trials=2, keep=1, images=2, audit_images=1)
    first = search(settings, tmp_path / "run", storage=storage, progress=False)
    assert search(settings, tmp_path / "run", storage=storage, progress=False) == first


def test_missing_audits_are_one_line_that_says_how_to_make_them_anew(
    whole: SearchResult, tmp_path: Path
) -> None:
    shutil.copytree(whole.out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/confirm/untrained-none")
    with pytest.raises(
        GradveilError,
        match=r"untrained-none holds no audit.*; delete .*search\.json and run the search again",
    ):
        search_tables(SearchResult.read(tmp_path / "run"))


@pytest.mark.parametrize(("augment", "defense"), [(True, "3-1"), (False, "policy:3-1,augment=no")])
def test_policies_are_audited_with_crop_and_flip_where_the_search_had_them(
    job: SearchJob, tmp_path: Path, augment: bool, defense: str
) -> None:
    policies = {"none": Policy(), "single": Policy.parse("3-1")}
    audits = work(replace(job, augment=augment), tmp_path / "weights", tmp_path, policies)
    assert [str(one.protection) for one, _ in audits] == ["none", defense] * 2


def test_a_folder_of_something_else_is_refused(
    job: SearchJob, whole: SearchResult, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for out, says in (
        (tmp_path, "is not empty and holds no search"),
        (tmp_path / "notes.txt", "is a file: choose another --out, a folder"),
        (whole.out / "confirm/untrained-none", "holds an audit, not a search"),
    ):
        with pytest.raises(GradveilError, match=says):
            search(job, out, progress=False)
    with pytest.raises(
        GradveilError, match=r"holds a search with other settings \(keep 5 there, 4 here\)"
    ):
        search(replace(job, keep=4), whole.out, progress=False)
    assert SearchResult.read(whole.out) == whole


def test_a_damaged_result_is_one_line(whole: SearchResult, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_bytes((whole.out / "settings.json").read_bytes())
    for text in ("{}", "[1]", '{"trials": 3', '{"trials": [{"number": 1}]}'):
        (tmp_path / "search.json").write_text(text)
        with pytest.raises(GradveilError, match=r"search\.json is damaged"):
            SearchResult.read(tmp_path)
    with pytest.raises(GradveilError, match="holds no search"):
        SearchResult.read(whole.out / "confirm")


def test_the_random_row_is_ten_policies_of_another_stream(
    job: SearchJob, whole: SearchResult, tmp_path: Path
) -> None:
    drawn = rows(job, whole.best, None)["random"]
    assert (
        drawn
        == rows(job, Policy(), None)["random"]
        != rows(replace(job, seed=5), Policy(), None)["random"]
    )
    assert len(drawn.members) == 10 and not {Policy((member,)) for member in drawn.members} & {
        one.policy for one in whole.trials
    }
    assert [path.name for _, path in work(job, tmp_path / "c", tmp_path, {"none": Policy()})] == [
        "semi-trained-none",
        "untrained-none",
    ]


def shifted(result: AuditResult, by: float, hit: float) -> AuditResult:
    """Sixteen images of an audit whose scores are those of the first, moved."""
    first = result.of("attack")[0]
    moved = [
        replace(
            first,
            image=image,
            scores={
                "used": dict(first.scores["used"])
                | {"over_blind": by + image / 10, "ssim": 0.5, "identified": hit}
            },
        )
        for image in range(16)
    ]
    return replace(result, records=tuple(moved))


def test_a_difference_is_claimed_only_where_a_test_finds_it(whole: SearchResult) -> None:
    audit = read(whole.out, whole.confirmed)["untrained"]["none"]
    low, high, same = shifted(audit, 0.0, 0.0), shifted(audit, 1.0, 1.0), shifted(audit, 0.0, 0.0)
    less, more, nothing = compare(low, high), compare(high, low), compare(low, same)
    assert [verdict(one) for one in (less, more, nothing)] == ["less", "more", "open"]
    assert (
        less[2] == Comparison("identified", 16, 0.0, 1.0, 0.5**16, 1.0)
        and nothing[0].less == nothing[0].more == 1.0
    )
    assert in_words(less, "none").startswith(
        "leaks less than none (n = 16: dB over blind +0.75 against +1.75, p = "
    )
    assert in_words(nothing, "none").startswith("was not shown to leak less than none (n = 16: ")
    mixed = compare(shifted(audit, 0.0, 1.0), shifted(audit, 1.0, 0.0))
    assert verdict(
        mixed
    ) == "mixed" and "less than random by one measure and more by another" in in_words(
        mixed, "random"
    )


def test_failed_images_are_left_out_of_both_sides(whole: SearchResult) -> None:
    audit = read(whole.out, whole.confirmed)["untrained"]["none"]
    low, high = shifted(audit, 0.0, 0.0), shifted(audit, 1.0, 1.0)
    torn = replace(
        low, records=(replace(low.records[0], status="failed: x", scores={}), *low.records[1:])
    )
    assert [one.n for one in compare(torn, high)] == [15, 15, 15]
    empty = replace(low, records=())
    assert verdict(compare(empty, high)) == "open"
