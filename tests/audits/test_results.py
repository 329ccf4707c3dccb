"""Audits read back: whole, stopped, of another format, and those that RESULTS.md quotes."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gradveil.audits import AuditResult, CaseResult
from gradveil.audits.results import FORMAT, NO_BETTER, TOO_FEW, make_row
from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.report.audit import several_in_words, several_tables

ROOT = Path(__file__).parents[2]
COMMITTED = sorted(path.parent for path in ROOT.glob("benchmarks/results/grids/*/settings.json"))


def test_the_folder_of_an_audit_has_settings_and_a_folder_for_each_case(done: AuditResult) -> None:
    names = {path.relative_to(done.out).as_posix() for path in done.out.rglob("*")}
    case = "3-1-7+43-18-18"
    files = ("settings.json", "records.jsonl", "model.json", "images")
    assert {"settings.json", case, *(f"{case}/{name}" for name in files)} <= names
    assert {name for name in names if name.count("/") < 2} == {
        "settings.json",
        case,
        *(f"{case}/{name}" for name in files),
    }
    settings = json.loads((done.out / "settings.json").read_text())
    assert settings["format"] == done.cases[0].settings["format"] == FORMAT
    assert settings["cases"] == [
        {"defense": case, "checkpoint": None, "clean": False, "step": None, "folder": case}
    ]
    assert settings["attacks"] == ["guess", "closed-form"]


def test_a_folder_is_read_by_its_path_as_text_too(done: AuditResult) -> None:
    assert AuditResult.read(str(done.out)) == AuditResult.read(done.out) == done


def test_images_are_those_of_all_chunks_in_order(done: AuditResult) -> None:
    found = done.images("guess")
    truth = load("fashion-mnist-mini", "test").images[:5].float() / 255
    assert torch.equal(found["original"], truth) and found["found"].shape == truth.shape
    assert not torch.equal(found["used"], truth)
    assert torch.equal(done.images("guess", "3-1-7+43-18-18")["used"], found["used"])


@pytest.mark.parametrize(
    ("attack", "defense", "says"),
    [
        ("dlg", None, "unknown attack 'dlg': choose from guess, closed-form"),
        ("guess", "none", "unknown case 'none': choose from 3-1-7"),
    ],
)
def test_images_of_what_was_not_audited_are_refused(
    done: AuditResult, attack: str, defense: str | None, says: str
) -> None:
    with pytest.raises(GradveilError) as caught:
        done.images(attack, defense)
    assert says in str(caught.value)


def test_a_case_without_an_attacked_image_has_no_strongest_attack(result: CaseResult) -> None:
    stopped = replace(result, records=tuple(r for r in result.records if r.kind != "attack"))
    with pytest.raises(GradveilError, match="holds no attacked image yet: run the same command"):
        _ = stopped.strongest
    assert "blind: gray" in str(
        AuditResult(result.out, {"model": "m", "data": "d", "seed": 0}, (stopped,))
    )


def test_names_that_a_terminal_would_obey_are_shown_as_escapes(result: CaseResult) -> None:
    hostile = {"model": "lenet\x1b]0;title\x07", "data": "d\nerror: e", "seed": 0}
    named = replace(result, settings={**result.settings, "defense": "n\x1b[2J\n<f>"})
    shown = AuditResult(result.out, hostile, (named,))
    console = Console(width=200, color_system=None, highlight=False)
    with console.capture() as printed:
        console.print(shown)
    for text in (str(shown), printed.get()):
        assert "\x1b" not in text and r"lenet\x1b]0;title\x07 on d\nerror: e" in text
        assert r"n\x1b[2J\n<f>" in text
    page = shown._repr_html_()
    assert r"<td>n\x1b[2J\n&lt;f&gt;</td>" in page
    assert all(letter.isprintable() for letter in page)


def test_names_that_differ_at_their_end_alone_are_told_apart_in_the_table(
    result: CaseResult,
) -> None:
    names = [f"my_company.privacy.defenses:{'Quantize' * 12}(bits={bits})" for bits in (4, 5)]
    cases = [replace(result, settings={**result.settings, "defense": name}) for name in names]
    text = str(AuditResult(result.out, {"model": "m", "data": "d", "seed": 0}, tuple(cases)))
    assert max(map(len, text.splitlines())) <= 110
    first_cells = [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]
    for name in names:
        assert "".join(first_cells).count(name) == sum(row.truth == "used" for row in result.rows)


def test_an_audit_of_which_no_case_was_begun_is_empty(done: AuditResult) -> None:
    shutil.rmtree(done.cases[0].out)
    read = AuditResult.read(done.out)
    assert read.cases == () and read.plain() == []
    with pytest.raises(GradveilError, match="holds no case yet"):
        read.images("guess")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (None, "holds no audit: there is no settings.json in it"),
        ("{", "settings.json is no JSON object of settings"),
        ('{"epochs": 3}', "holds a training, no audit"),
        ('{"cases": [{"defense": "none"}]}', "gradveil audit 3"),
        ('{"format": "gradveil audit 1", "cases": []}', "gradveil audit 3"),
        ('{"format": "gradveil audit 2"}', "settings.json: data: missing"),
    ],
)
def test_a_folder_that_is_no_audit_is_one_line(
    tmp_path: Path, settings: str | None, says: str
) -> None:
    if settings is not None:
        (tmp_path / "settings.json").write_text(settings)
    with pytest.raises(GradveilError) as caught:
        AuditResult.read(tmp_path)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_record_is_one_line(result: CaseResult) -> None:
    path = result.out / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"image": 1', b'"imag', 1))
    with pytest.raises(GradveilError, match=r"line \d+ of .* is damaged"):
        AuditResult.read(result.out.parent)


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_the_committed_records_are_read(folder: Path) -> None:
    result = AuditResult.read(folder)
    assert len(result.cases) == len(result.settings["cases"]) > 0
    assert several_tables(result) and several_in_words(result)
    for case in result.cases:
        assert case.strongest.n == result.settings["images"]
        assert len(case.truths) == 1 + case.defense.startswith(("policy:", "random", *"0123456789"))


def test_there_are_committed_records() -> None:
    assert len(COMMITTED) == 20


@pytest.fixture
def tool() -> Any:
    path = ROOT / "tools" / "convert_results.py"
    spec = importlib.util.spec_from_file_location("convert_results", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_grid_of_the_first_version_becomes_an_audit(
    done: AuditResult, tool: Any, tmp_path: Path
) -> None:
    """The old layout is made from the new by leaving out what the first version did not write."""
    old = tmp_path / "old"
    shutil.copytree(done.out, old)
    top, case = dict(done.settings), dict(done.cases[0].settings)
    for name in ("format", "public_sha256"):
        del top[name]
    del top["cases"][0]["folder"]
    for name in ("format", "step", "changes_images"):
        del case[name]
    case |= {"policy": case["defense"], "defense": "none", "fitting": True, "positive": True}
    (old / "settings.json").write_text(json.dumps(top))
    (old / done.cases[0].out.name / "settings.json").write_text(json.dumps(case))
    with pytest.raises(GradveilError, match="gradveil audit 3"):
        AuditResult.read(old)
    assert tool.convert(old) and not tool.convert(old)
    read, again = AuditResult.read(old), AuditResult.read(done.out)
    older = {"format": "gradveil audit 2"}
    assert read.settings == dict(again.settings) | older
    assert read.cases[0].settings == dict(again.cases[0].settings) | older
    assert read.cases[0].records == again.cases[0].records


@pytest.mark.parametrize(
    ("defense", "changed"),
    [
        ("none", False),
        ("prune:0.9", False),
        ("3-1-7", True),
        ("invert(3)", True),
        ("policy:3,augment=no", True),
        ("random:4,seed=2", True),
        ("precode:k=4,then,gaussian:0.1", False),
        ("3-1-7,then,prune:0.9", True),
    ],
)
def test_whether_images_were_changed_is_told_by_the_names_of_defenses(
    tool: Any, defense: str, changed: bool
) -> None:
    assert tool.changes_images(defense) is changed


def test_images_of_one_update_count_once_in_the_test_over_blind(result: CaseResult) -> None:
    """All of eight gains above 0 have p = 1 / 256, those of two updates together 1 / 4."""
    first = next(record for record in result.records if record.kind == "attack" and record.ok)
    scores = {truth: {**some, "over_blind": 1.0} for truth, some in first.scores.items()}

    def p_value(updates: int) -> float:
        records = [
            replace(first, image=image, update=image % updates, scores=scores) for image in range(8)
        ]
        return make_row(records, "used").verdict.p_over_blind

    assert p_value(8) == pytest.approx(1 / 256) and p_value(2) == pytest.approx(1 / 4)


@pytest.mark.parametrize(("updates", "told"), [(1, False), (2, True), (4, True), (16, True)])
def test_a_single_large_update_is_too_few_to_tell_and_not_no_better_than_blind(
    result: CaseResult, updates: int, told: bool
) -> None:
    """Sixteen images of one update cannot show a leak, though every one of them is found."""
    first = next(record for record in result.records if record.kind == "attack" and record.ok)

    def doubt(rank: int, gain: float) -> str | None:
        scores = {"used": {**first.scores["used"], "rank": rank, "over_blind": gain}}
        made = [
            replace(first, image=i, update=i % updates, scores=scores, candidates=20)
            for i in range(16)
        ]
        return make_row(made, "used").doubt

    assert doubt(2, -1.0) == (NO_BETTER if told else TOO_FEW)
    assert doubt(1, 1.0) == (None if told else TOO_FEW)
