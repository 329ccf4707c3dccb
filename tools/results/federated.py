"""What clients of a Flower app give away, by round."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from results.records import chance, facts, p_value, table

NAMES = (
    "federated-leakage-h200.json",
    "federated-leakage-cpu.json",
    "federated-leakage-batches-cpu.json",
    "federated-leakage-updates-h200.json",
    "federated-leakage-dense-matching-cpu.json",
)
"""What an attack found of a cell counts as the last of these has it."""
WORDS = {
    "fedsgd-1": "FedSGD, 1 image",
    "fedsgd-8": "FedSGD, 8 images",
    "fedavg-1-epoch": "FedAvg, 64 images, 1 epoch of 32",
    "fedavg-3-epochs": "FedAvg, 64 images, 3 epochs of 32",
}
ATTACKS = ("adam-cosine", "raced", "features", "raced+features", "dense-matching")
CLIENTS, OF_CLIENT = 50, 64  # as `benchmarks/federated.py` has them
LEVEL = 0.05
STAGES = 4  # data sets and rounds of a client's way to share


@dataclass(frozen=True)
class Attacked:
    """What one attack found in the updates of a cell."""

    cell: dict[str, Any]
    name: str

    @property
    def place(self) -> tuple[str, str, int]:
        """What was attacked."""
        return self.cell["setting"], self.cell["data"], self.cell["round"]

    @property
    def images(self) -> int:
        """Images of an update."""
        return int(self.cell["images_of_an_update"])

    @property
    def found(self) -> dict[str, Any]:
        return self.row("attack", self.name)

    @property
    def iterations(self) -> int:
        """Iterations; of a race, those of the searches that are left."""
        found = re.search(r"steps=(\d+)", self.cell["attacks"][self.name])
        assert found is not None
        return int(found[1])

    @property
    def p(self) -> str:
        """The p-value against luck, corrected; none by a test that cannot tell."""
        return "-" if self.corrected is None else p_value(self.corrected)

    @property
    def corrected(self) -> float | None:
        """The p-value times all attacks on what was attacked, in whatever run.

        Where the hits of each update were not kept, it is of the updates that have one at all.
        """
        tests = sum(each.place == self.place for each in attacked())
        least = min(1.0, self.images / self.cell["candidates"]) ** self.cell["updates"]
        if "identified_of_updates" not in self.cell and tests * least > LEVEL:
            return None
        return min(1.0, tests * float(self.found["p_identified"]))

    def row(self, kind: str, name: str) -> dict[str, Any]:
        """Return a row of the cell, scored against the image used; empty where there is none."""
        rows = (r for r in self.cell["rows"] if (r["kind"], r["attack"]) == (kind, name))
        return next((r for r in rows if r["truth"] == "used"), {})


@cache
def attacked() -> list[Attacked]:
    """Return what each attack found of each cell, measured last, those of one setting together."""
    order, last = [*WORDS], {}
    for name in NAMES:
        for cell in facts(name).values():
            for attack in cell["attacks"]:
                each = Attacked(cell, attack)
                last[each.place, attack] = each
    return sorted(
        last.values(),
        key=lambda each: (order.index(each.place[0]), each.place[1:], ATTACKS.index(each.name)),
    )


def of(images: int, data: str = "") -> list[Attacked]:
    """Return what was found in updates of so many images."""
    return [e for e in attacked() if e.images == images and data in (e.cell["data"], "")]


def section() -> str:
    head = ["data", "client", "round", "updates", "attack", "iterations", "rank 1 (95%)", "chance"]
    head += ["guess: class mean", "sham of the strongest", "p"]
    body = [_line(each) for each in attacked()]
    totals = ["data", "attack", "updates", "images", "rank 1", "guess: class mean"]
    totals += ["sham of the strongest", "luck"]
    remarks = [
        f"Single images are given away: {singles()}.",
        f"Batches of 8, all cells together: {_together(8)}. That a race gains by the features is "
        "not shown.",
        "Several local steps over 64 images do not hide them on CIFAR-100; that the other attacks "
        "found little said nothing of that. On Fashion-MNIST, with six or seven images of each "
        f"class in an update, {_shown_by('fashion-mnist')}.",
        f"{len(_earlier())} of these cells were attacked by `{ATTACKS[-1]}` before, with "
        f"{_between_iterations()} iterations; the figures above replace those: {_before()}.",
        "The models of later rounds are hardly trained.",
    ]
    if lacking := len(WORDS) * STAGES - len({each.place for each in attacked()}):
        remarks.append(f"{lacking} of {len(WORDS) * STAGES} cells are missing.")
    return (
        "## What clients of a Flower app give away\n"
        "The convolutional network of Flower's quickstart, which has no batch norm and no dropout, "
        f"{CLIENTS} clients of {OF_CLIENT} images; what the curious server kept of a round was "
        "attacked afterwards "
        f"({_devices()}; labels known, and which mini-batch an image was in).\n\n"
        "- Rank 1 is in a line-up of the image's class; its interval is over updates. p is against "
        "luck, over updates, and corrected for the attacks of a cell, in whatever run "
        "(Bonferroni), not for the number of cells; `-` where it was not kept how many images of "
        "rank 1 each update had, and the number of updates with one cannot tell.\n"
        "- `dense-matching` finds what the dense layers get of each image, by matching what is "
        "shared of them alone, and then images that give it. Its settings were chosen on test "
        "images, and the victims are training images.\n"
        "- The other attacks on updates of 64 images had minutes at most for a cell and made few "
        "iterations (published: 4,800; of a race those of the two searches that its heats leave). "
        "A figure at chance says that this attacker failed, not that nothing leaks. Attacks with "
        "as many updates of a cell attacked the same images.\n"
        "- `features` match what dense layers tell of each image of one gradient, exactly (see "
        "above); their settings were chosen on test images too. Several local steps mix "
        f"gradients, so there are none of FedAvg.{_settings()}\n\n"
        f"{table(head, body)}\n\n"
        f"FedAvg, all cells of a data set together:\n\n{table(totals, _totals())}\n\n"
        + "\n".join(f"- {remark}" for remark in remarks)
        + "\n\n`python benchmarks/federated.py record`, then `leakage`; records "
        f"{' and '.join(f'`{name}`' for name in NAMES)}."
    )


def _settings() -> str:
    """Say whether `features` were measured with the settings that they have now."""
    if any("features=1.0" in each.cell["attacks"].get("features", "") for each in attacked()):
        return (
            " Where they stand beside `raced+features` they had one weight for all models; now it "
            "follows the model."
        )
    return ""


def _line(each: Attacked) -> list[str]:
    """Return a row of the table."""
    cell, found = each.cell, each.found
    low, high = round(100 * found["identified_low"]), round(100 * found["identified_high"])
    return [
        cell["data"],
        WORDS[cell["setting"]],
        str(cell["round"]),
        str(cell["updates"]),
        f"`{each.name}`",
        f"{each.iterations:,}",
        f"{_rank(found)} ({low} to {high}%)",
        chance(cell["candidates"]),
        _rank(each.row("blind", "blind: class mean")),
        _rank(each.row("sham", "sham")),
        each.p,
    ]


def _totals() -> list[list[str]]:
    """Return the sums over FedAvg's cells of a data set, for each attack."""
    body = []
    for data in sorted({each.cell["data"] for each in of(OF_CLIENT)}):
        for name in ATTACKS:
            if some := [each for each in of(OF_CLIENT, data) if each.name == name]:
                kinds = (("attack", name), ("blind", "blind: class mean"), ("sham", "sham"))
                shares = [_share(some, *kind) for kind in kinds]
                updates = sum(each.cell["updates"] for each in some)
                luck = {chance(each.cell["candidates"]) for each in some}
                body.append([data, f"`{name}`", str(updates), str(OF_CLIENT * updates)])
                body[-1] += [*shares, " and ".join(luck)]
    return body


def singles() -> str:
    """Write between which counts single images have rank 1, over all attacks."""
    return _between([each.found for each in of(1)])


def eights() -> str:
    """Write between which counts images of batches of 8 have rank 1, by each cell's best attack."""
    best: dict[Any, dict[str, Any]] = {}
    for each in of(8):
        known = best.get(each.place, each.found)
        best[each.place] = max(known, each.found, key=lambda row: int(row["identified"]))
    return _between(best.values())


def matched(data: str) -> str:
    """Write between which counts images of FedAvg's updates have rank 1 by the last attack."""
    return _between([each.found for each in of(OF_CLIENT, data) if each.name == ATTACKS[-1]])


def luck(data: str) -> str:
    """Say that no cell of FedAvg shows the last attack to be better than luck on a data set."""
    p = [each.corrected for each in of(OF_CLIENT, data) if each.name == ATTACKS[-1]]
    assert all(value is not None and value > LEVEL for value in p), (
        f"{data}: {p}; mend the findings"
    )
    return "in no cell shown to be more than luck"


def _shown_by(data: str) -> str:
    """Say that no attack on FedAvg is shown to be better than luck on a data set."""
    every = [each.corrected for each in of(OF_CLIENT, data)]
    shown = sum(p is not None and p < LEVEL for p in every)
    assert not shown, f"{data}: mend the remark"
    return (
        f"none of the {len(every)} figures is shown to be more than luck; so few updates could not "
        "show a small leak"
    )


@cache
def _earlier() -> list[Attacked]:
    """Return what the last attack found before, of cells that were measured again."""
    found = [
        Attacked(cell, name)
        for file in NAMES
        for cell in facts(file).values()
        for name in cell["attacks"]
        if name == ATTACKS[-1]
    ]
    return [each for each in found if each not in attacked()]


def _before() -> str:
    """Write the counts of the last attack that others replaced."""
    names = sorted({each.cell["data"] for each in _earlier()})
    found = {name: [e.found for e in _earlier() if e.cell["data"] == name] for name in names}
    return ", ".join(f"{name} {_between(rows)}" for name, rows in found.items())


def _between_iterations() -> str:
    made = [each.iterations for each in _earlier()]
    return f"{min(made)} to {max(made)}"


def told_by_gradients(data: str) -> str:
    """Write how many images of FedAvg the line-up by gradients tells."""
    some = [each for each in of(OF_CLIENT, data) if each.name == ATTACKS[-1]]
    hits, n = _counted(some, "ceiling", "gradient line-up")
    return f"{hits} of {n}"


def updates(images: int) -> str:
    """Write the number of updates of so many images in a cell."""
    return _joined({each.cell["updates"] for each in of(images)})


def beside_guess(data: str) -> str:
    """Write the share of rank 1 in updates of FedAvg by the last attack, and by a guess."""
    some = [each for each in of(OF_CLIENT, data) if each.name == ATTACKS[-1]]
    (hits, n), (guessed, all_) = (
        _counted(some, *key) for key in (("attack", ATTACKS[-1]), ("blind", "blind: class mean"))
    )
    sham, shams = _counted(some, "sham", "sham")
    return f"{hits / n:.1%} where a guess finds {guessed / all_:.1%} and a sham {sham / shams:.1%}"


def _together(images: int) -> str:
    """Write the counts of rank 1 of each attack over the cells with so many images an update."""
    found = {name: [each for each in of(images) if each.name == name] for name in ATTACKS}
    counts = {name: _counted(some, "attack", name) for name, some in found.items() if some}
    return ", ".join(f"`{name}` {hits}/{n}" for name, (hits, n) in counts.items())


def _between(found: Iterable[dict[str, Any]]) -> str:
    rows = [*found]
    hits = [row["identified"] for row in rows]
    return f"{min(hits)} to {max(hits)} of {_joined({row['n'] for row in rows})}"


def _counted(some: Iterable[Attacked], kind: str, name: str) -> tuple[int, int]:
    """Count rank 1, and images, over cells that have such a row."""
    rows = [row for each in some if (row := each.row(kind, name))]
    return sum(row["identified"] for row in rows), sum(row["n"] for row in rows)


def _share(some: Iterable[Attacked], kind: str, name: str) -> str:
    hits, n = _counted(some, kind, name)
    return f"{hits}/{n} ({hits / n:.1%})" if n else "-"


def _joined(values: set[int]) -> str:
    return " and ".join(map(str, sorted(values)))


def _devices() -> str:
    """Say which cells were attacked on which machine."""
    cells = {id(each.cell): each.cell["device"] for each in attacked()}
    counts = Counter("a CPU" if name == "cpu" else name for name in cells.values())
    return ", ".join(f"{count} cells on {name}" for name, count in counts.items())


def _rank(row: dict[str, Any]) -> str:
    return f"{row['identified']}/{row['n']}" if row else "-"
