"""Automatic transformation search: what was drawn, kept and confirmed."""

import csv
import gzip
import tomllib
from typing import Any

from gradveil.papers.plan import Part
from gradveil.papers.records import Records
from gradveil.papers.searched import Searched
from gradveil.papers.tables import rank_one, rank_tests
from gradveil.search.comparisons import (
    AGAINST,
    CONTROLS,
    SATURATED,
    Comparison,
    Confirmation,
    confirmation,
    control,
    saturated,
)
from gradveil.stats import holm
from results.records import RECORDS, facts, mean, percent, rows_of, spread, table

SEARCHES = {
    "The published search (S_pri), CIFAR-100": "published",
    "By the probe, with a race, CIFAR-100": "probe-cifar100",
    "By the probe, with a race, Fashion-MNIST, lenet": "probe-fashion-mnist-lenet",
}
RACES = {  # recorded at the default confidence: the score's column, and the records
    "the probe": ("ssim", "reproduce/search-fashion-mnist-lenet-probe-*/trials.csv.gz"),
    "S_pri": ("privacy", "searches/raced/trials.csv"),
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
            "guess scores. These records have no line-up as it is now, no sham and no ceilings, "
            "and the attack was not told the policy. Commands and machines: "
            "`benchmarks/results/searches/README.md`.",
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


def race(score: str) -> tuple[int, int, float]:
    """Return how many policies a recorded race dropped, of how many, and the work it saved."""
    name, pattern = RACES[score]
    (path,) = RECORDS.glob(pattern)
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    trials = list(csv.DictReader(text.splitlines()))
    images = [int(trial[f"{name}_n"]) for trial in trials]
    states = [trial["state"] for trial in trials]
    raced = len(states) - states.count("inaccurate")
    return states.count("dropped"), len(trials), 1 - sum(images) / (max(images) * raced)


def race_words() -> list[str]:
    """Return what recorded races saved, as documentation and help have it."""
    probed, tried, little = race("the probe")
    scored, _, much = race("S_pri")
    return [
        f"{probed} of {tried:,} policies",
        f"{percent(little)} of the work",
        f"{scored:,}, {percent(much, 0)}",
    ]


def confirmed(part: Part, records: Records) -> str:
    """Return the table of the searches' audits, with their controls, and what to know of it.

    p-values are corrected for all of the table's tests.
    """
    body: list[list[str]] = []
    tests: list[tuple[int, str, Comparison]] = []
    full: dict[str, dict[str, None]] = {}
    told: set[str] = set()
    for entry in part.entries:
        assert isinstance(entry.cell, Searched)
        for model, cases in records.confirmed(entry.cell).items():
            for name, case in cases.items():
                audit = confirmation(case)
                told |= {str(case.settings["knows"][audit.attack])}
                found = {} if name in AGAINST else rank_tests(cases, name)
                tests += [(len(body), other, test) for other, test in found.items()]
                for other in (other for other, test in found.items() if saturated(test)):
                    full.setdefault(f"{entry.row}, {model}", {})[other] = None
                defense = name if name in AGAINST else case.defense
                body.append([entry.row, model, defense, *_figures(audit)])
    if not body:
        return ""
    adjusted = holm([p for *_, test in tests for p in (test.less, test.more)])
    said: dict[int, list[str]] = {}
    for number, (line, other, _) in enumerate(tests):
        less, more = adjusted[2 * number : 2 * number + 2]
        said.setdefault(line, []).append(f"{other}: {less:.3g}, {more:.3g}")
    for line, cells in enumerate(body):
        cells.append("; ".join(said.get(line, ())))
    head = ["search", "model", "policy", "PSNR dB, SSIM, n", "line-up", "sham"]
    head += ["draws known", "noisy truth", "gradients", "p of fewer, of more"]
    return f"{table(head, body)}\n\n{_remarks(len(adjusted), full, told)}"


def _figures(audit: Confirmation) -> list[str]:
    """Return the figures of an attack, and rank 1 of its controls."""
    (row,) = (row for row in audit.rows if (row.kind, row.truth) == ("attack", "used"))
    controls = (control(audit, name) for name in CONTROLS)
    return [
        f"{spread(row.psnr, 2)}, {mean(row.ssim, 2)}, {row.n}",
        rank_one(row),
        *("-" if each is None else each.lineup for each in controls),
    ]


def _remarks(tests: int, full: dict[str, dict[str, None]], told: set[str]) -> str:
    probed, tried, little = race("the probe")
    text = (
        "Rank 1 of the controls stands beside each attack: its sham, the class mean that knows the "
        "victim's draws, and two ceilings (the true picture with noise, candidates ranked by their "
        f"gradients). p are of exact sign tests of rank 1, with Holm's correction for the table's "
        f"{tests}. The race by the probe dropped {probed} of {tried:,} policies, {percent(little)} "
        "of the work."
    )
    if not any("policy" in each for each in told):
        text += (
            f" The attack was told the {' and '.join(sorted(told))} alone, not the policy: to one "
            "that knows it a policy may leak more (`--attack auto`)."
        )
    if full:
        where = "; ".join(f"{at} (against {' and '.join(who)})" for at, who in full.items())
        text += (
            f" At least {SATURATED:.0%} of images have rank 1 on both sides, so that it separates "
            f"nothing at this setting: {where}."
        )
    return text
