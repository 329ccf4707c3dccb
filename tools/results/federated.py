"""What clients of a Flower app give away, by round."""

import re
from collections import Counter
from typing import Any

from results.records import facts, table

NAMES = ("federated-leakage-h200.json", "federated-leakage-cpu.json")
WORDS = {
    "fedsgd-1": "FedSGD, 1 image",
    "fedsgd-8": "FedSGD, 8 images",
    "fedavg-1-epoch": "FedAvg, 64 images, 1 epoch of 32",
    "fedavg-3-epochs": "FedAvg, 64 images, 3 epochs of 32",
}
ATTACKS = ("adam-cosine", "raced")
FEWEST = 2  # updates below which nothing can be told


def section() -> str:
    cells = [cell for name in NAMES for cell in facts(name).values()]
    body = [_row(cell) for cell in cells]
    single = [cell for cell in cells if cell["images_of_an_update"] == 1]
    low, high = (
        f(_found(cell, "attack", name)["identified"] for cell in single for name in ATTACKS)
        for f in (min, max)
    )
    eights = sorted((c for c in cells if c["images_of_an_update"] == 8), key=_iterations)
    few = sum(cell["updates"] < FEWEST for cell in cells)
    steps, races = (
        [_iterations(cell, name) for cell in cells if cell["updates"] < FEWEST] for name in ATTACKS
    )
    head = ["data", "client", "round", "updates"]
    head += [f"`{name}`, iterations" for name in ATTACKS]
    head += ["chance", "class mean", "sham", "p, for both attacks"]
    return (
        "## What clients of a Flower app give away\n"
        "The convolutional network of Flower's quickstart in train mode, 50 "
        "clients of 64 images; what the curious server kept of a round was attacked afterwards "
        f"({_devices(cells)}; labels known). Images with rank 1 in a line-up of their class. "
        "An update counts once in p. The attacks had minutes at most for a cell, so most made "
        "few iterations (published: 4,800; of `raced` those of the two searches that its heats "
        "leave): a figure at chance says that this attacker failed, "
        "not that nothing leaks.\n\n"
        f"{table(head, body)}\n\n"
        f"Single images are given away: {low} to {high} of 32. Of batches of 8, four updates each, "
        f"the better of two attacks has {', '.join(map(_batches, eights))}: few updates, and few "
        "iterations but in the last. "
        f"Of FedAvg each of the {few} cells is one client, attacked by {min(steps)} to "
        f"{max(steps):,} iterations, and {min(races)} to {max(races)} of `raced`, whose heats had "
        "a fraction of that: nothing can be told from them. The models of later rounds are "
        "hardly trained. `python benchmarks/federated.py record`, then `leakage`; records "
        f"{' and '.join(f'`{name}`' for name in NAMES)}; {16 - len(cells)} of 16 cells are missing."
    )


def _devices(cells: list[dict[str, Any]]) -> str:
    """Say which cells were attacked on which machine."""
    counts = Counter("a CPU" if cell["device"] == "cpu" else cell["device"] for cell in cells)
    return ", ".join(f"{count} cells on {name}" for name, count in counts.items())


def _found(cell: dict[str, Any], kind: str, attack: str) -> dict[str, Any]:
    rows = (r for r in cell["rows"] if r["kind"] == kind and r["attack"] == attack)
    return next((r for r in rows if r["truth"] == "used"), {})


def _batches(cell: dict[str, Any]) -> str:
    both = {name: _found(cell, "attack", name)["identified"] for name in ATTACKS}
    best = max(ATTACKS, key=lambda name: both[name])
    n, data = _found(cell, "attack", best)["n"], cell["data"]
    made = f"`{best}`, {_iterations(cell, best):,} iterations"
    return f"{both[best]} of {n} ({data}, round {cell['round']}, {made})"


def _iterations(cell: dict[str, Any], attack: str = ATTACKS[0]) -> int:
    """Return the iterations of an attack; of a race, those of the searches that are left."""
    found = re.search(r"steps=(\d+)", cell["attacks"][attack])
    assert found is not None
    return int(found[1])


def _rank(row: dict[str, Any]) -> str:
    return f"{row['identified']}/{row['n']}" if row else "-"


def _row(cell: dict[str, Any]) -> list[str]:
    usual, raced = (_found(cell, "attack", name) for name in ATTACKS)
    p = min(1.0, 2 * min(usual["p_identified"], raced["p_identified"]))
    few = cell["updates"] < FEWEST
    return [
        cell["data"],
        WORDS[cell["setting"]],
        str(cell["round"]),
        str(cell["updates"]),
        *(
            f"{_rank(found)}, {_iterations(cell, name):,}"
            for name, found in zip(ATTACKS, (usual, raced), strict=True)
        ),
        f"1 in {cell['candidates']}",
        _rank(_found(cell, "blind", "blind: class mean")),
        _rank(_found(cell, "sham", "sham")),
        "too few" if few else "< 0.001" if p < 0.001 else f"{p:.3f}",
    ]
