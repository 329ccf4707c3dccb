"""What a client can do by itself: the guard, its look at a model, and the accuracy of many."""

import re
from collections.abc import Sequence
from statistics import median
from typing import Any

from results.records import facts, percent, table

UPDATES = "federated-guard-cpu.json"
EARLIER = "federated-guard-by-the-clock-cpu.json"
MODELS = "received-models-cpu.json"
ACCURACY = "federated-accuracy-cpu.json"
SPEED = "federated-speed-cpu.json"
LEAST = 50  # iterations of a check; that of the guard, which only Flower can import


def section() -> str:
    return "\n\n".join((_updates(), _models(), _accuracy(), _speed()))


def count_withheld(defense: str, *, identified: bool) -> tuple[int, int]:
    """Return how many updates under a defense were withheld, and of how many."""
    some = [
        row["withheld"] is not None
        for row in facts(UPDATES)["updates"]
        if row["defense"] == defense and (row["rank"] == 1) is identified
    ]
    return sum(some), len(some)


def _updates() -> str:
    found = facts(UPDATES)
    body = []
    for defense in ("none", "gaussian:1"):
        rows = [row for row in found["updates"] if row["defense"] == defense]
        for identified in (True, False):
            some = [row for row in rows if (row["rank"] == 1) is identified]
            if some:
                withheld = sum(row["withheld"] is not None for row in some)
                body.append(
                    [
                        f"`{defense}`",
                        "yes" if identified else "no",
                        str(len(some)),
                        str(withheld),
                        str(len(some) - withheld),
                        f"{_mean(some, 'guard_seconds', 'wall'):.1f}",
                        f"{_mean(some, 'guard_seconds', 'processor'):.1f}",
                        f"{_mean(some, 'training_seconds', 'processor'):.3f}",
                    ]
                )
    head = ["defense", "an audit identifies it", "updates", "withheld", "sent"]
    head += ["s a check", "s of the processor", "s a gradient"]
    candidates = found["updates"][0]["candidates"]
    failed = sum("the check failed" in row["said"] for row in found["updates"])
    also, spared = count_withheld("none", identified=False)
    lineups = {int(re.findall(r"line-up of (\d+)", row["said"])[0]) for row in _checked(found)}
    (size,) = lineups
    luck = 1 - (1 - 1 / size) ** found["canaries"]
    earlier = facts(EARLIER)
    seen = [row for row in earlier["updates"] if row["rank"] == 1]
    missed = [_iterations(row) for row in seen if row["withheld"] is None]
    return (
        "## A client that checks itself\n"
        "Updates of single images (LeNet, 16 x 16 pixels, 0 to 200 steps of training; one core of "
        "a busy machine).\n\n"
        "- The guard has its default attack, the search that `auto` has for the defense, for "
        f"{found['seconds']:g} s of the processor, and {found['canaries']} canaries.\n"
        "- The audit is a search of 150 iterations. Identified is rank 1 of "
        f"{candidates:,} images of ten classes (drawn from its class, 1 in {candidates // 10}).\n\n"
        f"{table(head, body)}\n\n"
        f"- Without a defense the guard also withholds {also} of {spared} that this audit did not "
        "identify: it asks about canaries in the image's place. So a rule that withholds whatever "
        "has no noise would do as well here: that the guard tells updates of one kind apart is not "
        "shown.\n"
        f"- Of all that is withheld, {failed} could not be checked: the time was too short for "
        f"{LEAST} iterations.\n"
        f"- Under noise, luck alone (1 in {size:,}, {found['canaries']} times) withholds "
        f"{percent(luck, 0)} of updates.\n"
        f"- A first run had {earlier['seconds']:g} s by the clock and a least number of 10 "
        f"iterations: it sent {len(missed)} of {len(seen)} updates that the audit identified, "
        f"after {min(missed)} to {max(missed)} iterations (record `{EARLIER}`).\n\n"
        f"`python benchmarks/federated.py guard`; record `{UPDATES}`."
    )


def _checked(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the updates whose canaries stood in a line-up."""
    return [row for row in found["updates"] if "line-up of" in row["said"]]


def _iterations(row: dict[str, Any]) -> int:
    found = re.search(r"\((\d+) iterations", row["said"])
    assert found is not None
    return int(found[1])


def _mean(rows: Sequence[dict[str, Any]], part: str, kind: str) -> float:
    return float(sum(row[part][kind] for row in rows) / len(rows))


def _models() -> str:
    rows = facts(MODELS)
    body = []
    for part in ("chosen", "judged"):
        for kind in ("honest", "planted", "hidden"):
            some = [row for row in rows if row["part"] == part and _kind(row) == kind]
            if some:
                refused = sum(row["refused"] is not None for row in some)
                body.append([part, KINDS[kind], str(len(some)), str(refused)])
    exposed = {row["planted"]: row["exposed"] for row in rows if _compared(row)}
    return (
        "### Models that a server sends\n"
        "A client refuses weights that no honest training gives: copied units, a last layer with "
        "zeros for most classes, and linear layers whose units have nearly the same sum of "
        "weights, which trap weights need.\n\n"
        "- The thresholds were chosen on models like the first, and the others judged once. Later "
        "the rule on dead and copied units was changed, since it refused honest models that start "
        "from zeros (last layers, adapters) or lost units by pruning or weight decay, and all were "
        "judged again.\n"
        "- Honest models are untrained, and trained for up to "
        f"{max(row['steps'] for row in rows):,} steps by SGD, Adam, with weight decay, pruned "
        "gradients, pruned weights and noise, on Fashion-MNIST and CIFAR-100.\n"
        "- Planted are trap weights (Boenisch et al. 2021) and imprints (Fowl et al. 2021).\n\n"
        f"{table(['models', 'of', 'number', 'refused'], body)}\n\n"
        "- What gets past: sums that vary nearly as much as by chance, traps in a fifth of the "
        "units, new signs alone.\n"
        "- A server that knows the test so leaks more than an honest one, and less than with plain "
        "traps. Of an untrained MLP (300 and 100 units, CIFAR-100), "
        f"{percent(exposed[''], 0)} of the images of a batch of 20 reach a unit alone, "
        f"{percent(exposed['traps, 0.96'], 0)} with traps, "
        f"{percent(exposed['traps, 0.96, sums vary by 0.6'], 0)} with sums that vary by 0.6, "
        f"{percent(exposed['a fifth of the units traps, 0.96'], 0)} with traps in a fifth.\n"
        "- Traps made by biases are not looked for. How often units answer tells nothing: in "
        "honest trained models many answer to few images.\n\n"
        f"`python benchmarks/received.py`; record `{MODELS}`."
    )


KINDS = {
    "honest": "honest trainings",
    "planted": "trap weights or an imprint",
    "hidden": "such, hidden",
}


def _kind(row: dict[str, Any]) -> str:
    if not row["planted"]:
        return "honest"
    return "planted" if row["counted"] else "hidden"


def _compared(row: dict[str, Any]) -> bool:
    wanted = {"part": "judged", "data": "cifar100", "model": "mlp-300-100", "steps": 0}
    return wanted.items() <= row.items()


def _accuracy() -> str:
    rows = facts(ACCURACY)
    ways = ("federated", "one_site")
    body = [[str(row["seed"]), *(f"{100 * row[way]:.1f}" for way in ways)] for row in rows]
    means = (sum(row[way] for row in rows) / len(rows) for way in ways)
    body.append(["mean", *(f"{100 * each:.1f}" for each in means)])
    one = rows[0]
    return (
        f"### {one['clients']} clients beside one site\n"
        f"The network of Flower's quickstart on {one['images']:,} images of Fashion-MNIST after "
        f"{one['steps']} steps from the same weights: FedSGD with {one['clients']} clients of 8 "
        "images a round, and `gradveil train` in batches of 80. Accuracy on "
        f"{one['test_images']:,} test images; a seed orders the images.\n\n"
        f"{table(['seed', 'federated, accuracy %', 'one site, accuracy %'], body)}\n\n"
        f"`python benchmarks/federated.py accuracy`; record `{ACCURACY}`."
    )


ENGINES = {"one-process": "one process", "simulation": "Flower's simulation on Ray"}


def _speed() -> str:
    rows = facts(SPEED)
    body = []
    for engine, clients in sorted({(row["engine"], row["clients"]) for row in rows}):
        some = [row for row in rows if (row["engine"], row["clients"]) == (engine, clients)]
        whole = [
            turn
            for repeat in sorted({row["repeat"] for row in some})
            if len(turn := {row["part"]: row for row in some if row["repeat"] == repeat}) == 3
        ]
        if not whole:
            continue
        used, wall = (
            [{part: _round(row, kind) for part, row in turn.items()} for turn in whole]
            for kind in ("processor", "wall")
        )
        body.append(
            [
                ENGINES[engine],
                str(clients),
                str(len(whole)),
                _range([each["plain"] for each in used]),
                _range([each["defense"] - each["plain"] for each in used]),
                _range([each["defense and spy"] - each["defense"] for each in used]),
                *(_range([each[part] for each in wall]) for part in ("plain", "defense and spy")),
            ]
        )
    loads = [row["load_before"] for row in rows]
    head = ["clients run in", "clients", "repeats", "plain, s", "the defense adds, s"]
    head += ["the spy adds, s", "plain, s by the clock", "with both, s by the clock"]
    return (
        "### Seconds a round\n"
        "LeNet on Fashion-MNIST (28 x 28 pixels), FedSGD with 8 images of each client, two cores; "
        "the defense is `prune:0.95`, and the spy keeps all that is sent.\n\n"
        "- Seconds of the processor, of all processes together, and by the clock: the median round "
        "but the first, over repeats that take turns (least to most).\n"
        "- The machine did other work too, with a load of "
        f"{min(loads):.1f} to {max(loads):.1f} before the runs, so that the clock tells of a busy "
        "machine.\n\n"
        f"{table(head, body)}\n\n"
        f"`python benchmarks/federated.py speed`; record `{SPEED}`."
    )


def _round(row: dict[str, Any], kind: str) -> float:
    """Return the median seconds of a round; the first loads what each process needs."""
    return float(median(each[kind] for each in row["rounds"][1:]))


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
