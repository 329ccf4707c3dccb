"""What clients of a Flower app give away, by round."""

import re
from typing import Any

from results.records import facts, table

NAME = "federated-leakage-h200.json"
WORDS = {
    "fedsgd-1": "FedSGD, 1 image",
    "fedsgd-8": "FedSGD, 8 images",
    "fedavg-1-epoch": "FedAvg, 64 images, 1 epoch of 32",
    "fedavg-3-epochs": "FedAvg, 64 images, 3 epochs of 32",
}
FEWEST = 2  # updates below which nothing can be told


def section() -> str:
    cells = [*facts(NAME).values()]
    body = [_row(cell) for cell in cells]
    single = [cell for cell in cells if cell["images_of_an_update"] == 1]
    low, high = (
        f(
            _found(cell, "attack", name)["identified"]
            for cell in single
            for name in ("adam-cosine", "raced")
        )
        for f in (min, max)
    )
    few = sum(cell["updates"] < FEWEST for cell in cells)
    steps = [_iterations(cell) for cell in cells if cell["updates"] < FEWEST]
    head = ["data", "client", "round", "updates", "iterations", "`adam-cosine`", "`raced`"]
    head += ["chance", "class mean", "sham", "p, for both attacks"]
    return (
        "## What clients of a Flower app give away\n"
        "The convolutional network of Flower's quickstart in train mode, 50 "
        "clients of 64 images; what the curious server kept of a round was attacked afterwards "
        f"({cells[0]['device']}; labels known). Images with rank 1 in a line-up of their class. "
        "An update counts once in p. The attacks had a minute or less for a cell, so most made "
        "few iterations (published: 4,800): a figure at chance says that this attacker failed, "
        "not that nothing leaks.\n\n"
        f"{table(head, body)}\n\n"
        f"Single images are given away: {low} to {high} of 32. Four updates of 8 images are too "
        "few for more than a hint. "
        f"Of FedAvg each of the {few} cells is one client, attacked by {min(steps)} to "
        f"{max(steps)} iterations: nothing can be told from them. The models of later rounds are "
        "hardly trained. `python benchmarks/federated.py record`, then `leakage`; record "
        f"`{NAME}`; {16 - len(cells)} of 16 cells are missing."
    )


def _found(cell: dict[str, Any], kind: str, attack: str) -> dict[str, Any]:
    rows = (r for r in cell["rows"] if r["kind"] == kind and r["attack"] == attack)
    return next((r for r in rows if r["truth"] == "used"), {})


def _iterations(cell: dict[str, Any]) -> int:
    found = re.search(r"steps=(\d+)", cell["attacks"]["adam-cosine"])
    assert found is not None
    return int(found[1])


def _rank(row: dict[str, Any]) -> str:
    return f"{row['identified']}/{row['n']}" if row else "-"


def _row(cell: dict[str, Any]) -> list[str]:
    usual, raced = (_found(cell, "attack", name) for name in ("adam-cosine", "raced"))
    p = min(1.0, 2 * min(usual["p_identified"], raced["p_identified"]))
    few = cell["updates"] < FEWEST
    return [
        cell["data"],
        WORDS[cell["setting"]],
        str(cell["round"]),
        str(cell["updates"]),
        f"{_iterations(cell):,}",
        _rank(usual),
        _rank(raced),
        f"1 in {cell['candidates']}",
        _rank(_found(cell, "blind", "blind: class mean")),
        _rank(_found(cell, "sham", "sham")),
        "too few" if few else "< 0.001" if p < 0.001 else f"{p:.3f}",
    ]
