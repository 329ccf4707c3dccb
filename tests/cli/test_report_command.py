"""gradveil report and the page at the end of an audit: files, words, and the status."""

import json
from pathlib import Path
from typing import Any

import pytest

from report.folders import make_audit

AUDIT = "audit --data fashion-mnist-mini --model breaking:linear --attack closed-form --images 2"


@pytest.fixture
def run(gradveil: Any, tmp_path: Path) -> Path:  # noqa: ARG001  # it makes the current folder
    return make_audit(tmp_path / "run", {"none": {"dlg": 6}, "prune:0.99": {"dlg": 1}})


@pytest.mark.usefixtures("run")
def test_people_get_the_answer_and_the_files(gradveil: Any) -> None:
    outcome = gradveil("report run")
    assert outcome.status == 0 and outcome.shown.startswith("Without a defense, dlg attacked")
    for name in ("index.html", "verdict.json", "audit.csv"):
        assert f"wrote run/{name}" in outcome.shown and Path("run", name).is_file()


@pytest.mark.usefixtures("run")
def test_json_is_one_object_with_the_verdict(gradveil: Any) -> None:
    result = gradveil("report run --json").result
    assert result["verdict"] == json.loads(Path("run/verdict.json").read_text())
    assert result["files"]["index.html"] == "run/index.html"


@pytest.mark.usefixtures("run")
def test_the_status_is_one_where_a_threshold_is_broken(gradveil: Any) -> None:
    Path("t.toml").write_text("[most]\nidentified = 0.5\n")
    outcome = gradveil("report run --thresholds t.toml")
    assert outcome.status == 1 and "Thresholds: 1 of 2 are broken." in outcome.shown
    assert "Broken: none: identified is 0.75, at most 0.5 was asked for." in outcome.shown
    Path("t.toml").write_text("[most]\nidentified = 0.8\n")
    outcome = gradveil("report run --thresholds t.toml")
    assert outcome.status == 0 and "Thresholds: all 2 hold." in outcome.shown


def test_a_certificate_that_is_asked_for_is_said_and_not_in_the_page_alone(
    gradveil: Any, run: Path
) -> None:
    asked = "--certify lineup --delta 0.05"
    assert "delta" not in gradveil("report run").shown
    said = gradveil(f"report run {asked}").shown
    assert "none: 6 of n = 8 images reached rank 1 in the line-up by any attack" in said
    assert "delta 0.05 does not hold" in said and "prune:0.99: 1 of n = 8" in said
    make_audit(run.parent / "other", {"none": {"dlg": 2}})
    found = gradveil(f"report run other {asked} --json").result["certificates"]
    hits = {
        name: {case: one["overall"]["hits"] for case, one in made.items()}
        for name, made in found.items()
    }
    rows = found["run"]["none"]["rows"]
    assert [(row["kind"], row["attack"]) for row in rows[-2:]] == [
        ("strongest", "dlg"),
        ("any attacker", None),
    ]
    assert hits == {"run": {"none": 6, "prune:0.99": 1}, "other": {"none": 2}}
    assert "The upper bounds of all 2 cases" in said
    for made in found.values():
        assert {each["cases"] for each in made.values()} == {3}
        assert all("hold at once at 95%" in each["joint"] for each in made.values())


def test_two_runs_go_into_a_folder_of_their_own(gradveil: Any, run: Path) -> None:
    make_audit(run.parent / "other", {"none": {"dlg": 2}})
    outcome = gradveil("report run other --save t.tex --save f.svg")
    assert outcome.status == 0 and Path("gradveil-report/index.html").is_file()
    assert Path("t.tex").is_file() and Path("f.svg").is_file()
    assert not Path("run/index.html").exists() and "other:" in outcome.shown


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("report nowhere", "nowhere holds no audit: there is no settings.json in it"),
        ("report run run", "run: a run is named twice"),
        ("report run --thresholds none.toml", "no file at none.toml"),
        ("report run --thresholds run/none/records.jsonl", "records.jsonl: no TOML file: "),
        ("report run --save x.gif", "x.gif: its suffix names no format; choose from .png"),
        ("report", "Missing argument 'RUN...'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(gradveil: Any, line: str, says: str) -> None:
    assert says in gradveil(line).error
    assert not Path("run/index.html").exists() and not Path("nowhere").exists()


def test_an_audit_ends_with_its_page_and_may_be_decided_by_thresholds(gradveil: Any) -> None:
    outcome = gradveil(f"{AUDIT} --out run --json")
    assert outcome.status == 0 and outcome.result["page"] == "run/index.html"
    assert outcome.result["passed"] is None and "<h1>" in Path("run/index.html").read_text()
    Path("t.toml").write_text("[most]\nidentified = 0.1\n")
    outcome = gradveil(f"{AUDIT} --out run --thresholds t.toml")
    assert outcome.status == 1 and "Broken: none: identified is 1" in outcome.shown
    Path("t.toml").write_text("[most]\nnonsense = 0.1\n")
    outcome = gradveil(f"{AUDIT} --out other --thresholds t.toml")
    assert outcome.status == 2 and not Path("other").exists()
