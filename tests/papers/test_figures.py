"""Figures are drawn of what is done, and of nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from PIL import Image

from gradveil.audits.records import Record
from gradveil.papers.catalog import EXPERIMENTS
from gradveil.papers.cells import Cell, Workspace
from gradveil.papers.experiments import Size
from gradveil.papers.figures import draw_curves, draw_figures, draw_singles, draw_stages
from gradveil.papers.plan import make_parts
from gradveil.papers.records import Records
from gradveil.papers.switches import OURS, VARIANTS
from gradveil.papers.tables import compare, median_distance


def values(names: list[str]) -> dict[str, list[float]]:
    rng = np.random.default_rng(0)
    return {name: list(rng.random(3)) for name in names}


def history() -> dict[str, Any]:
    epochs = [{"epoch": k, "train_loss": 1 / k, "test_accuracy": 0.1 * k} for k in (1, 2, 3)]
    return {"history": epochs, "accuracy": 0.3}


def attacked() -> dict[str, Any]:
    names = ["3", "7-1", "9"]
    return {
        "privacy": {"code": values(names), "paper": values(names)},
        "attack": {name: {"psnr": each} for name, each in values(names).items()},
    }


def layers() -> dict[str, Any]:
    return {"steps": [0, 1], "layers": {"first": {"mean": [0, 1]}, "last": {"mean": [1, 0.5]}}}


def lines() -> dict[str, Any]:
    curve = {"mean": [0.0, 0.5, 1.0], "std": [0.1, 0.2, 0.0]}
    return {"points": 3, "lines": {"none": curve, "3-1-7": curve}}


RESULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "exp1": lines,
    "exp7": history,
    "exp8": layers,
    "exp9": lambda: {"values": {"code": values(["none", *map(str, range(50))])}},
    "exp10": attacked,
    "precode-acc": history,
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_figure_is_drawn_once_a_cell_is_done(tmp_path: Path, name: str) -> None:
    workspace, records = Workspace(tmp_path, device="cpu"), Records((tmp_path / "records",))
    parts = make_parts([EXPERIMENTS[name]], {"ours": OURS}, Size(), workspace)
    assert draw_figures(parts, records, tmp_path / "figures") == []
    cell: Cell = parts[0].entries[0].cell
    records.write(cell, workspace, RESULTS[name](), 1.0)
    (path,) = draw_figures(parts, records, tmp_path / "figures")
    assert path.name == f"{name}-ours.png" and path.read_bytes().startswith(b"\x89PNG")


def test_a_table_of_attacks_has_no_curves(tmp_path: Path) -> None:
    workspace, records = Workspace(tmp_path, device="cpu"), Records((tmp_path / "records",))
    parts = make_parts([EXPERIMENTS["table1a"]], {"ours": OURS}, Size(), workspace)
    records.write(parts[0].entries[0].cell, workspace, history(), 1.0)
    assert draw_figures(parts, records, tmp_path) == []


COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "reproduce"


@pytest.mark.parametrize("name", ["over-training", "precode-rec"])
def test_figures_of_audits_are_drawn_from_their_records(tmp_path: Path, name: str) -> None:
    nowhere = Workspace(tmp_path / "work", tmp_path / "data", device="cpu")
    parts = make_parts([EXPERIMENTS[name]], {"ours": OURS}, Size(), nowhere)
    (path,) = draw_figures(parts, Records((COMMITTED,)), tmp_path)
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width > 500


def test_rows_that_are_the_same_in_both_ways_are_shown_once(tmp_path: Path) -> None:
    nowhere = Workspace(tmp_path / "work", tmp_path / "data", device="cpu")
    found = {}
    for name in ("table1a", "precode-rec"):
        parts = make_parts([EXPERIMENTS[name]], VARIANTS, Size(), nowhere)
        found[name] = compare({part.way: part for part in parts}, Records((COMMITTED,)))
    beside, *both = found["table1a"]
    assert {"accuracy %, paper", "PSNR dB, replication"} <= {*beside.head}
    assert ["as published" in table.title for table in both] == [True, False]
    (table,) = found["precode-rec"]
    assert "(the rows of iga: both ways)" in table.title
    firsts = [row[0] for row in table.body if row[1] == "iga"]
    assert len(firsts) == len({*firsts}) >= 16


def test_clients_alone_have_the_distance_at_which_a_search_ended(tmp_path: Path) -> None:
    nowhere = Workspace(tmp_path / "work", tmp_path / "data", device="cpu")
    heads, rows = {}, {}
    for name in ("clients", "larger"):
        parts = make_parts([EXPERIMENTS[name]], {"ours": OURS}, Size(), nowhere)
        (table,) = compare({"ours": parts[0]}, Records((COMMITTED,)))
        heads[name], rows[name] = table.head, table.body
    assert "distance (median)" not in heads["larger"]
    where = heads["clients"].index("distance (median)")
    found = {(row[0], row[1]): row[where] for row in rows["clients"]}
    assert found["untrained, batch 8, 1 step, train mode", "raced"] == "0.286"
    assert {cell == "-" for (_, attack), cell in found.items() if attack == "dense-matching"} == {
        True
    }


def test_a_median_distance_is_over_updates_and_counts_those_that_diverged() -> None:
    def ended(attack: str, *distances: float | None) -> str:
        return median_distance(
            [
                Record(
                    *("of a test", "attack", attack, 0, 8 * update + image, "ok", 0, None),
                    *(distance, 50, {}, 0.0, 8 * update),
                )
                for update, distance in enumerate(distances)
                for image in range(1 + 3 * (update == 0))  # the first update has more images
            ]
        )

    assert ended("raced", 0.1, 0.3, 0.2) == "0.200"
    assert ended("raced", 0.1, None, 0.2) == "0.200"
    assert ended("raced", 0.1, None, None) == ended("dense-matching", 0.1, 0.3, 0.2) == ""
    assert ended("raced", 0.1, None) == ""


def test_stages_stand_in_the_order_of_training_with_the_end_last() -> None:
    line = [(-1, 1, 4), (50, 2, 4), (0, 4, 4)]
    axis = draw_stages("some", {("none", "raced"): line}).axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "50", "end"]
    (drawn,) = axis.containers
    assert list(drawn[0].get_ydata()) == [100, 50, 25]


def test_a_bar_stands_at_the_number_of_its_transformation() -> None:
    scores = {name: [float(name)] for name in sorted(map(str, range(50)))}  # as JSON sorts them
    result = {"values": {"code": {"none": [60.0], **scores}}}
    axis = draw_singles("some", [("singles", result)]).axes[0]
    boxes = [bar for bar in axis.patches if isinstance(bar, Rectangle)]
    bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in boxes}
    assert bars == {number: float(number) for number in range(50)}


def test_curves_of_each_data_set_and_model_have_panels_of_their_own() -> None:
    result = {"history": [{"epoch": 1, "train_loss": 2.0, "test_accuracy": 0.5}]}
    rows = ["a, mlp, none", "a, mlp, none", "a, mlp, precode", "b, mlp, none"]
    axes = draw_curves("some", [(row, result) for row in rows]).axes
    assert [axis.get_title() for axis in axes] == ["a, mlp", "a, mlp", "b, mlp", "b, mlp"]
    assert [len(axis.lines) for axis in axes] == [3, 3, 1, 1]
    legend = axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["none", "precode"]
    alone = draw_curves("some", [("none", result), ("3-1-7", result)]).axes
    assert [len(axis.lines) for axis in alone] == [2, 2]
