"""Thresholds decide a run; tables and figures are what their suffix says."""

import csv
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gradveil.audits import AuditResult
from gradveil.core.errors import GradveilError
from gradveil.report.tables import csv_text, latex_text
from gradveil.report.verdict import decide, read_thresholds
from gradveil.report.write import write_report
from report.folders import make_audit

HITS = {"none": {"dlg": 12}, "prune:0.99": {"dlg": 2, "masked": 4}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verdict") / "run"
    return make_audit(folder, HITS, 16, accuracies={"none": 0.9, "prune:0.99": 0.8})


def thresholds(folder: Path, text: str) -> Path:
    path = folder / "thresholds.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("[most]\nidentified = 0.75", True),
        ("[most]\nidentified = 0.7", False),
        ('defenses = ["prune:0.99"]\n[most]\nidentified = 0.25', True),
        ('defenses = ["prune:0.99"]\n[most]\nidentified = 0.2', False),  # by masked, not by dlg
        ('defenses = ["prune:0.99"]\n[most]\nidentified_high = 0.52', False),
        ('defenses = ["prune:0.99"]\n[most]\nidentified_high = 0.53', True),
        ("[least]\naccuracy = 0.8", True),
        ("[least]\naccuracy = 0.85", False),
        ("[least]\nimages = 16", True),
        ("[least]\nimages = 17", False),
        ("[most]\nover_blind = 6.0\npsnr = 18\nssim = 0.4\nfailed = 0", True),
        ("[most]\npsnr = 17", False),
        ("positive_control = true", True),
        ("", True),
    ],
)
def test_a_run_passes_where_every_case_keeps_to_every_threshold(
    run: Path, tmp_path: Path, text: str, passed: bool
) -> None:
    made = write_report(run, out=tmp_path / "out", thresholds=thresholds(tmp_path, text))
    found = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert made.passed is passed and found["passed"] is passed
    assert all(check["holds"] for check in found["checks"]) is passed
    words = made.page.read_text()
    assert ("All thresholds hold." in words) is passed


def test_what_was_not_measured_breaks_a_threshold(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 0}})
    asked = read_thresholds(thresholds(tmp_path, "[least]\naccuracy = 0.1"))
    decision = decide({"": AuditResult.read(run)}, asked)
    (check,) = decision.broken
    assert check.holds is None and decision.passed is False
    assert check.words == "none: accuracy was not measured, at least 0.1 was asked for"


def test_where_all_reconstructions_failed_none_was_measured_to_be_unrecognized(
    tmp_path: Path,
) -> None:
    asked = read_thresholds(thresholds(tmp_path, "[most]\nidentified = 0.5\nidentified_high = 0.5"))
    for failed, measured in (7, True), (8, False):
        run = make_audit(tmp_path / f"{failed}", {"none": {"dlg": 0}}, failed=failed)
        decision = decide({"": AuditResult.read(run)}, asked)
        assert decision.passed is measured
        assert [check.holds for check in decision.checks] == [measured or None] * 2


def test_without_thresholds_a_verdict_decides_nothing_and_has_the_figures(run: Path) -> None:
    made = write_report(run)
    found = json.loads((run / "verdict.json").read_text())
    assert made.passed is None and found["passed"] is None and found["checks"] == []
    (told,) = found["runs"]
    assert told["leak_shown"] is True and len(told["answer"]) == 2
    none, pruned = told["cases"]
    assert none["accuracy"] == 0.9 and pruned["strongest"]["attack"] == "masked"
    row = AuditResult.read(run).cases[0].strongest
    assert none["strongest"]["identified"] == row.identified == 12
    assert none["strongest"]["identified_bounds"] == list(row.identified_bounds)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[most]\nidentified = 2", "most.identified: expected float <= 1.0"),
        ("[most]\nrank = 1", "most.rank: unknown field; choose from identified, "),
        ("[least]\nimages = 0", "least.images: expected int >= 1"),
        ("identified = 0.1", "identified: unknown field; choose from most, "),
        ("[most", "thresholds.toml: "),
        ('defenses = ["prune:0.5"]', "unknown defense of the thresholds 'prune:0.5': choose from"),
    ],
)
def test_a_bad_file_of_thresholds_is_one_line_and_nothing_is_written(
    run: Path, tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(GradveilError) as caught:
        write_report(run, out=tmp_path / "out", thresholds=thresholds(tmp_path, text))
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_figures_are_in_the_format_of_their_suffix_and_a_column_wide(
    run: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / f"leakage{suffix}" for suffix in (".png", ".pdf", ".svg")]
    write_report(run, save=paths)
    first = [path.read_bytes() for path in paths]
    with Image.open(paths[0]) as picture:
        assert picture.format == "PNG" and picture.width == round(3.35 * 300)
    assert first[1].startswith(b"%PDF-")
    drawn = ET.fromstring(first[2])
    assert drawn.tag.endswith("svg") and drawn.attrib["width"] == "241.2pt"
    write_report(run, save=paths)
    assert [path.read_bytes() for path in paths] == first


@pytest.mark.parametrize("name", ["x.gif", "x", "x.html"])
def test_a_suffix_without_a_format_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(GradveilError, match=r"choose from \.png, \.pdf, \.svg, \.csv, \.tex"):
        write_report(run, out=tmp_path / "out", save=[tmp_path / name])
    assert not (tmp_path / "out").exists()


def test_a_latex_table_has_a_line_for_each_case_and_no_bare_special_letter(
    tmp_path: Path,
) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}, "a_b&c%$#{}\\~^": {"dlg": 1}})
    text = latex_text({"": AuditResult.read(run)})
    assert r"a\_b\&c\%\$\#\{\}\textbackslash{}\textasciitilde{}\textasciicircum{}" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 3 and len({line.replace(r"\&", "").count("&") for line in rows}) == 1
    assert r"5/8 & 24\% to 91\% & 0/8" in text


def test_a_text_in_the_csv_is_no_formula(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}, "=1+1": {"dlg": 1}})
    lines = [*csv.DictReader(io.StringIO(csv_text({"": AuditResult.read(run)})))]
    assert {line["defense"] for line in lines} == {"none", "'=1+1"}
    assert all(float(line["over_blind"]) < 9 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"runs": 3}, "runs: a whole number; expected a path, or a list of paths"),
        ({"runs": [3]}, "runs: a whole number in the list; expected paths"),
        ({"runs": []}, "no run was named"),
        ({"runs": "nowhere", "save": "x.png"}, "save: a text; expected a path, or a list"),
        (
            {"runs": "nowhere", "with_pictures": "yes"},
            "with pictures 'yes': expected True or False",
        ),
    ],
)
def test_arguments_of_a_wrong_type_are_one_line(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(GradveilError) as caught:
        write_report(**arguments)
    assert says in str(caught.value)
