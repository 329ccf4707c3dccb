"""What clients of a Flower app give away, by round."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

from gradveil.stats import can_tell
from results.records import chance, facts, table

NAMES = (
    "federated-leakage-h200.json",
    "federated-leakage-cpu.json",
    "federated-leakage-batches-cpu.json",
)
"""Of a cell that was measured again the last one counts."""
MATCHED = "federated-leakage-dense-matching-cpu.json"
"""Cells of a second run of the same federations, with more of the clients attacked."""
WORDS = {
    "fedsgd-1": "FedSGD, 1 image",
    "fedsgd-8": "FedSGD, 8 images",
    "fedavg-1-epoch": "FedAvg, 64 images, 1 epoch of 32",
    "fedavg-3-epochs": "FedAvg, 64 images, 3 epochs of 32",
}
ATTACKS = ("adam-cosine", "raced", "features", "raced+features", "dense-matching")
CLIENTS, OF_CLIENT = 50, 64  # as `benchmarks/federated.py` has them
STAGES = 4  # data sets and rounds of a client's way to share


def section() -> str:
    body = [line for cell in every() for line in _rows(cell)]
    head = ["data", "client", "round", "updates", "attack", "iterations", "rank 1 (95%)", "chance"]
    head += ["guess: class mean", "sham of the strongest", "p"]
    remarks = [
        f"Single images are given away: {singles()}.",
        f"Batches of 8, all cells together, those of one run each: {_together(8)}. That a race "
        "gains by the features is not shown.",
        f"FedAvg, all cells together, each run with its own controls: {averaged()}. So several "
        "local steps over 64 images do not hide them on CIFAR-100; that the other attacks found "
        "little said nothing of that. On Fashion-MNIST, with six or seven images of each class in "
        "an update, none of the attacks finds more than few.",
        "The models of later rounds are hardly trained.",
    ]
    if lacking := len(WORDS) * STAGES - len(cells()):
        remarks.append(f"{lacking} of {len(WORDS) * STAGES} cells are missing.")
    return (
        "## What clients of a Flower app give away\n"
        f"The convolutional network of Flower's quickstart in train mode, {CLIENTS} clients of "
        f"{OF_CLIENT} images; what the curious server kept of a round was attacked afterwards "
        f"({_devices(every())}; labels known, and which mini-batch an image was in).\n\n"
        "- Rank 1 is in a line-up of the image's class; its interval is over updates. An update "
        "counts once in p, which is corrected for the cell's attacks (Bonferroni). There is none "
        "where no attack could have a small one: an update of many images has one of rank 1 by "
        "luck alone.\n"
        "- `dense-matching` finds what the dense layers get of each image, by matching what is "
        "shared of them alone, and then images that give it. Its federations are a second run "
        f"of the same settings ({_matched_updates()} updates a cell of several images), so its "
        "images are others. Its settings were chosen on test images, and the victims are training "
        "images.\n"
        "- The other attacks had minutes at most for a cell, so most made few iterations "
        "(published: 4,800; of a race those of the two searches that its heats leave). A figure at "
        "chance says that this attacker failed, not that nothing leaks.\n"
        "- `features` match what dense layers tell of each image of one gradient, exactly (see "
        "above); their settings were chosen on test images too. Several local steps mix "
        f"gradients, so there are none of FedAvg.{_settings()}\n\n"
        f"{table(head, body)}\n\n"
        + "\n".join(f"- {remark}" for remark in remarks)
        + "\n\n`python benchmarks/federated.py record`, then `leakage`; records "
        f"{' and '.join(f'`{name}`' for name in (*NAMES, MATCHED))}."
    )


def _settings() -> str:
    """Say whether `features` were measured with the settings that they have now."""
    texts = [cell["attacks"].get("features", "") for cell in cells()]
    if any("features=1.0" in text for text in texts):
        return (
            " Where they stand beside `raced+features` they had one weight for all models; now it "
            "follows the model."
        )
    return ""


@cache
def cells() -> list[dict[str, Any]]:
    """Return the cells of all machines."""
    return [*{key: cell for name in NAMES for key, cell in facts(name).items()}.values()]


@cache
def every() -> list[dict[str, Any]]:
    """Return the cells of all machines and of the second run, those of one kind together."""
    both = [*cells(), *facts(MATCHED).values()]
    order = [*WORDS]
    return sorted(both, key=lambda c: (order.index(c["setting"]), c["data"], c["round"]))


def _matched_updates() -> str:
    return _joined({cell["updates"] for cell in facts(MATCHED).values()})


def singles() -> str:
    """Write between which counts single images have rank 1, over all attacks."""
    some = [cell for cell in cells() if cell["images_of_an_update"] == 1]
    found = [_found(cell, "attack", name) for cell in some for name in _names(cell)]
    hits = [each["identified"] for each in found]
    return f"{min(hits)} to {max(hits)} of {_joined({each['n'] for each in found})}"


def eights() -> str:
    """Write between which counts images of batches of 8 have rank 1, by each cell's best attack."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in every():
        if cell["images_of_an_update"] == 8:
            found, key = _best(cell)[1], (cell["data"], cell["round"])
            best[key] = max(found, best.get(key, found), key=lambda row: int(row["identified"]))
    hits = [each["identified"] for each in best.values()]
    return f"{min(hits)} to {max(hits)} of {_joined({each['n'] for each in best.values()})}"


def updates(images: int) -> str:
    """Write the number of updates of so many images in a cell."""
    some = [cell for cell in cells() if cell["images_of_an_update"] == images]
    return _joined({cell["updates"] for cell in some})


def _joined(values: set[int]) -> str:
    return " and ".join(map(str, sorted(values)))


def _devices(cells: list[dict[str, Any]]) -> str:
    """Say which cells were attacked on which machine."""
    counts = Counter("a CPU" if cell["device"] == "cpu" else cell["device"] for cell in cells)
    return ", ".join(f"{count} cells on {name}" for name, count in counts.items())


def _found(cell: dict[str, Any], kind: str, attack: str) -> dict[str, Any]:
    rows = (r for r in cell["rows"] if r["kind"] == kind and r["attack"] == attack)
    return next((r for r in rows if r["truth"] == "used"), {})


def _names(cell: dict[str, Any]) -> list[str]:
    """Return the attacks on a cell."""
    return [name for name in ATTACKS if _found(cell, "attack", name)]


def _best(cell: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the best attack on a cell, and its row."""
    found = {name: _found(cell, "attack", name) for name in _names(cell)}
    return max(found.items(), key=lambda item: int(item[1]["identified"]))


def _together(images: int) -> str:
    """Write the counts of rank 1 of each attack over the cells with so many images an update."""
    said = []
    for some in (cells(), facts(MATCHED).values()):
        those = [cell for cell in some if cell["images_of_an_update"] == images]
        found = {name: [_found(cell, "attack", name) for cell in those] for name in ATTACKS}
        figures = [
            f"`{name}` {sum(row['identified'] for row in rows)}/{sum(row['n'] for row in rows)}"
            for name, rows in found.items()
            if rows and all(rows)
        ]
        said.append(", ".join(figures))
    return "; ".join(said)


def averaged() -> str:
    """Write the counts of rank 1 in updates of FedAvg, beside a guess, shams and luck, by data."""
    said = []
    for data in sorted({cell["data"] for cell in _long(every())}):
        for some, names in ((cells(), ATTACKS[:2]), (facts(MATCHED).values(), ATTACKS[-1:])):
            those = [cell for cell in _long(some) if cell["data"] == data]
            kinds = {f"`{name}`": ("attack", name) for name in names}
            kinds |= {
                "the class mean": ("blind", "blind: class mean"),
                "the sham": ("sham", "sham"),
            }
            found = {words: _counted(those, *key) for words, key in kinds.items()}
            figures = ", ".join(f"{words} {h}/{n} ({h / n:.1%})" for words, (h, n) in found.items())
            said.append(f"{data} {figures}")
        luck = {chance(cell["candidates"]) for cell in _long(every()) if cell["data"] == data}
        said[-1] += f", luck {' and '.join(luck)}"
    return "; ".join(said)


def matched(data: str) -> str:
    """Write between which counts images of FedAvg's updates have rank 1 by the last attack."""
    those = [cell for cell in _long(facts(MATCHED).values()) if cell["data"] == data]
    found = [_found(cell, "attack", ATTACKS[-1]) for cell in those]
    hits = [each["identified"] for each in found]
    return f"{min(hits)} to {max(hits)} of {_joined({each['n'] for each in found})}"


def beside_guess(data: str) -> str:
    """Write the share of rank 1 in updates of FedAvg by the last attack, and by a guess."""
    those = [cell for cell in _long(facts(MATCHED).values()) if cell["data"] == data]
    (hits, n), (guessed, of) = (
        _counted(those, *key) for key in (("attack", ATTACKS[-1]), ("blind", "blind: class mean"))
    )
    return f"{hits / n:.1%} where a guess finds {guessed / of:.1%}"


def _counted(some: Iterable[dict[str, Any]], kind: str, name: str) -> tuple[int, int]:
    """Count rank 1, and images, over cells; of a kind of row that a cell has."""
    rows = [row for cell in some if (row := _found(cell, kind, name))]
    return sum(row["identified"] for row in rows), sum(row["n"] for row in rows)


def _long(some: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells of FedAvg."""
    return [cell for cell in some if cell["images_of_an_update"] == OF_CLIENT]


def _iterations(cell: dict[str, Any], attack: str = ATTACKS[0]) -> int:
    """Return the iterations of an attack; of a race, those of the searches that are left."""
    found = re.search(r"steps=(\d+)", cell["attacks"][attack])
    assert found is not None
    return int(found[1])


def _rank(row: dict[str, Any]) -> str:
    return f"{row['identified']}/{row['n']}" if row else "-"


def _ranked(row: dict[str, Any]) -> str:
    low, high = round(100 * row["identified_low"]), round(100 * row["identified_high"])
    return f"{_rank(row)} ({low} to {high}%)"


def _rows(cell: dict[str, Any]) -> list[list[str]]:
    """Return a row for each attack on a cell."""
    made, luck = [], 1 / cell["candidates"]
    untold = not can_tell(cell["updates"], luck, cell["images_of_an_update"], len(_names(cell)))
    for name in _names(cell):
        found = _found(cell, "attack", name)
        p = min(1.0, len(_names(cell)) * found["p_identified"])
        made.append(
            [
                cell["data"],
                WORDS[cell["setting"]],
                str(cell["round"]),
                str(cell["updates"]),
                f"`{name}`",
                f"{_iterations(cell, name):,}",
                _ranked(found),
                chance(cell["candidates"]),
                _rank(_found(cell, "blind", "blind: class mean")),
                _rank(_found(cell, "sham", "sham")),
                "-" if untold else "< 0.001" if p < 0.001 else f"{p:.3f}",
            ]
        )
    return made
