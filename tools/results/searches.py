"""Automatic transformation search: what was drawn, kept and confirmed."""

import csv
import tomllib
from typing import Any

from results.records import RECORDS, facts, mean, rows_of, spread, table

SEARCHES = {
    "The published search (S_pri), CIFAR-100": "published",
    "By the probe, with a race, CIFAR-100": "probe-cifar100",
    "By the probe, with a race, Fashion-MNIST, lenet": "probe-fashion-mnist-lenet",
}
MODELS = ("semi-trained", "untrained")
POLICIES = ("none", "random", "single", "hybrid")


def section() -> str:
    return "\n\n".join(
        (
            "## Automatic transformation search †\n"
            "Semi-trained models as in the paper (10% of the training images, 50 epochs), seed 0. "
            "Each search draws random policies, drops those that cost accuracy, keeps the ten with "
            "the best score, and audits none, random, the best and (where there is one) the hybrid "
            "with `adam-cosine` on test images 0 to 31, against the images used. PSNR and SSIM do "
            "not compare policies with each other: a policy changes the image, and with it what a "
            "guess scores. Commands and machines: `benchmarks/results/searches/README.md`.",
            *(_search(title, folder) for title, folder in SEARCHES.items()),
            _singles(),
        )
    )


def _search(title: str, folder: str) -> str:
    path = RECORDS / "searches" / folder
    kept: dict[str, Any] = tomllib.loads((path / "policies.toml").read_text())
    trials = list(csv.DictReader((path / "trials.csv").read_text().splitlines()))
    states: dict[str, int] = {}
    for trial in trials:
        states[trial["state"]] = states.get(trial["state"], 0) + 1
    body = []
    for model in MODELS:
        for policy in POLICIES:
            file = path / f"confirm-{model}-{policy}.jsonl"
            if not file.is_file():
                continue
            rows = rows_of(str(file.relative_to(RECORDS)))
            (found,) = (row for (kind, _), row in rows.items() if kind == "attack")
            name = {"single": kept["best"], "hybrid": kept.get("hybrid", "")}.get(policy, policy)
            body.append([model, f"`{name}`", str(found.n), spread(found.psnr, 2), mean(found.ssim)])
    counts = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))
    head = ["model", "policy", "n", "PSNR dB", "SSIM"]
    best = ", ".join(f"`{policy}`" for policy in _ten(kept))
    return (
        f"**{title}** (`searches/{folder}`): {len(trials):,} policies, {counts}. Kept: {best}.\n\n"
        f"{table(head, body)}"
    )


def _ten(kept: dict[str, Any]) -> list[str]:
    return [str(each["policy"]) for each in kept["policy"]]


def _singles() -> str:
    found = facts("singles-h200.json")
    parts = []
    for rule, words in (("privacy, code", "the code's"), ("privacy, paper", "the paper's")):
        if rule in found:
            parts.append(
                f"by {words} definition {', '.join(found[rule]['ten_best'])}; of the paper's five "
                f"best (3, 15, 18, 26, 1) it has {', '.join(found[rule]['of_the_paper'])}"
            )
    n = found["privacy, code"]["n"]
    return (
        f"**Single transformations by S_pri**, {found['device']}, {n} images, the ten lowest: "
        f"{'; '.join(parts)}. `benchmarks/singles.py`, records `singles-h200.json`."
    )
