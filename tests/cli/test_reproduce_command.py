"""gradveil reproduce: the list, the status, a quick run, and one line for bad input."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradveil.cli.reproduce import fitted
from gradveil.papers.tables import Table

FIGURES = ("3/64", "8.24 ± 0.95", "0.02", "8.77")


def test_the_list_has_every_experiment_with_its_claim_and_minutes(gradveil: Any) -> None:
    found = {each["id"]: each for each in gradveil("reproduce --list --json").result["experiments"]}
    assert len(found) >= 20 and all(each["claim"] and each["agrees"] for each in found.values())
    assert found["exp9"]["minutes"] < found["table1b"]["minutes"]
    assert "table-defenses" in gradveil("reproduce --list").shown


def test_a_quick_run_goes_through_and_is_not_done_again(gradveil: Any, tmp_path: Path) -> None:
    outcome = gradveil("reproduce exp9 --scale quick --device cpu --json --as-published")
    assert outcome.status == 0, outcome.said
    assert len(outcome.result["done"]) == 1 and not outcome.result["failed"]
    assert "proves nothing" in outcome.said and "1 are to do" in outcome.said
    folder = tmp_path / "runs" / "reproduce-quick" / "records"
    assert len([*folder.glob("*/cell.json")]) == 1
    (found,) = outcome.result["experiments"]
    (table,) = found["tables"]
    assert table["head"] == ["quantity", "ours as published"] and len(table["body"]) == 3
    again = gradveil("reproduce exp9 --scale quick --device cpu --json --as-published")
    assert not again.result["done"] and again.result["experiments"] == [found]
    status = gradveil("reproduce exp9 --status --scale quick --device cpu --json").result
    assert (status["done"], status["missing"]) == (1, 1)


def test_quick_minutes_are_those_of_two_cores(gradveil: Any) -> None:
    shown = gradveil("reproduce exp9 --status --scale quick").shown
    assert "minutes on two cores" in shown and "H200" not in shown
    assert "Minutes are estimated for two cores" in gradveil("reproduce --list --scale quick").shown
    assert "GPU minutes on one H200" in gradveil("reproduce exp9 --status").shown


def test_a_file_in_place_of_a_folder_is_refused_before_the_work(
    gradveil: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    line = "reproduce exp9 --scale quick --device cpu"
    for option in ("--records file", "--out file", "--records file/below", "--archive file/x.tgz"):
        outcome = gradveil(f"{line} {option}")
        assert outcome.status == 2 and "cannot write file" in outcome.said
        assert "trained" not in outcome.said
    assert (tmp_path / "file").read_text() == "mine"


def test_without_records_or_data_all_is_missing(gradveil: Any) -> None:
    found = gradveil("reproduce --status --json").result
    assert not found["done"] and not found["missing"]
    assert all(each["data_absent"] for each in found["experiments"])
    assert all(each["absent"] == each["cells"] for each in found["experiments"])
    assert "cifar10: 12" in gradveil("reproduce precode-acc --status").shown
    said = gradveil("reproduce precode-acc --device cpu --json").said
    assert "36 cells need cifar10, cifar100, medical-mnist, not there" in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no experiment named: see gradveil reproduce --list, or give --all"),
        ("table9", "unknown experiment 'table9': choose from exp1"),
        ("exp1 --all", "give experiments, --all, --list or --status: one of them"),
        ("exp1 --scale huge", "unknown scale 'huge': choose from paper, quick"),
        ("exp1 --engine slurm", "unknown engine 'slurm': choose from local, ray"),
        ("exp1 --ray-address a:1", "ray address a:1: engine local has no use for it"),
        ("--all --minutes 0", "minutes 0: it must be above 0"),
        (
            "exp1 --switch loss=third",
            "unknown value of switch loss 'third': choose from whole, halved",
        ),
        ("--list --minutes 5", "minutes 5.0: --list has no use for it"),
        ("--list --figures drawn", "figures drawn: --list has no use for it"),
        ("--status --archive kept.tar.gz", "archive kept.tar.gz: --status has no use for it"),
        ("exp1 --images 0", "images 0: it must be from 1 to 10,000"),
        ("--list --seeds 99999999999999999999", "it must be from 1 to 100"),
        ("exp1 --archive x.zip", "archive x.zip: name it .tar.gz or .tgz"),
        ("exp1 --device gpu", "unknown device 'gpu': choose from auto, cpu, cuda"),
    ],
)
def test_bad_input_is_one_line(gradveil: Any, line: str, says: str) -> None:
    assert says in gradveil(f"reproduce {line}").error


def test_a_paper_s_table_breaks_no_word_and_no_figure_in_a_narrow_terminal() -> None:
    found = Table(
        "Rank 1",
        ["case", "attack", "rank 1 (95%)", "guess", "PSNR dB", "SSIM", "originals: PSNR dB"],
        [
            ["trained, batch 8, train mode", "dense-matching", "2/64 (0 to 11%)", *FIGURES],
            ["trained, batch 32, train mode", "raced", "-", *FIGURES],
        ],
    )
    console = Console(file=io.StringIO(), width=70)
    console.print(fitted(found))
    assert isinstance(console.file, io.StringIO)
    made = console.file.getvalue()
    for word in ("trained,", "dense-matching", "2/64 (0 to 11%)", "3/64", "8.24 ± 0.95"):
        assert word in made
    assert "8.77" not in made and "no room for originals: PSNR dB" in made
