"""Figures are drawn of what is done, and of nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradveil.papers.catalog import EXPERIMENTS
from gradveil.papers.cells import Cell, Place
from gradveil.papers.experiments import Size
from gradveil.papers.figures import draw_figures
from gradveil.papers.queue import make_parts
from gradveil.papers.records import Records
from gradveil.papers.switches import OURS


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
    place, records = Place(tmp_path, device="cpu"), Records((tmp_path / "records",))
    parts = make_parts([EXPERIMENTS[name]], {"ours": OURS}, Size(), place)
    assert draw_figures(parts, records, tmp_path / "figures") == []
    cell: Cell = parts[0].entries[0].cell
    records.write(cell, place, RESULTS[name](), 1.0)
    (path,) = draw_figures(parts, records, tmp_path / "figures")
    assert path.name == f"{name}-ours.png" and path.read_bytes().startswith(b"\x89PNG")


def test_a_table_of_attacks_has_no_curves(tmp_path: Path) -> None:
    place, records = Place(tmp_path, device="cpu"), Records((tmp_path / "records",))
    parts = make_parts([EXPERIMENTS["table1a"]], {"ours": OURS}, Size(), place)
    records.write(parts[0].entries[0].cell, place, history(), 1.0)
    assert draw_figures(parts, records, tmp_path) == []
