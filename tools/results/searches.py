"""Automatic transformation search: what was drawn, kept and confirmed."""

import csv
import gzip
import json
import tomllib
from typing import Any

from gradveil.papers.plan import Part
from gradveil.papers.published import published
from gradveil.papers.records import Records
from gradveil.papers.searched import Searched
from gradveil.papers.tables import rank_tests
from gradveil.search.comparisons import AGAINST, SATURATED, confirmation, saturated
from gradveil.search.confirm import RANDOM
from results.records import RECORDS, facts, link, mean, percent, rows_of, spread, table

SEARCHES = {
    "The published search (S_pri), CIFAR-100": "published",
    "By the probe, with a race, CIFAR-100": "probe-cifar100",
    "By the probe, with a race, Fashion-MNIST, lenet": "probe-fashion-mnist-lenet",
}
SMALL = "the probe, Fashion-MNIST, lenet"
RACES = {  # recorded at the default confidence: the score's column, and the records
    "the probe": ("ssim", "reproduce/search-cifar100-resnet20-4-probe-*/trials.csv.gz"),
    SMALL: ("ssim", "reproduce/search-fashion-mnist-lenet-probe-*/trials.csv.gz"),
    "S_pri": ("privacy", "searches/raced/trials.csv"),
}
MODELS = ("semi-trained", "untrained")
POLICIES = ("none", "random", "single", "hybrid")


def section() -> str:
    return "\n\n".join(
        (
            "## Automatic transformation search †\n"
            "Earlier searches; those with line-ups are in "
            f"{link('searches')}.\n\n"
            "- Semi-trained models as in the paper (10% of the training images, 50 epochs), seed "
            "0. Each search draws random policies, drops those that cost accuracy, keeps the ten "
            "with the best score, and audits none, random, the best and (where there is one) the "
            "hybrid with `adam-cosine` on test images 0 to 31, against the images used.\n"
            "- PSNR and SSIM do not compare policies with each other: a policy changes the image, "
            "and with it what a guess scores.\n"
            "- These records have no line-up as it is now, no sham and no ceilings, and the attack "
            "was not told the policy.\n\n"
            "Commands and machines: `benchmarks/results/searches/README.md`.",
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
        f"### {title}\n{len(trials):,} policies, {counts}. Kept: {best}. Records "
        f"`searches/{folder}`.\n\n{table(head, body)}"
    )


def _ten(kept: dict[str, Any]) -> list[str]:
    return [str(each["policy"]) for each in kept["policy"]]


def _singles() -> str:
    found = facts("singles-h200.json")
    body = [
        [
            f"the {rule}'s",
            ", ".join(found[f"privacy, {rule}"]["ten_best"]),
            ", ".join(found[f"privacy, {rule}"]["of_the_paper"]),
        ]
        for rule in ("code", "paper")
    ]
    paper = ", ".join(str(number) for number in published()["best"]["paper"])
    head = ["definition", "the ten lowest, from the lowest on", f"of the paper's five ({paper})"]
    return (
        f"### Single transformations by S_pri\n{found['device']}, {found['privacy, code']['n']} "
        f"images.\n\n{table(head, body)}\n\n"
        "`benchmarks/singles.py`, records `singles-h200.json`."
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


def _races(part: Part, records: Records) -> list[str]:
    """Say what the race of each search by the probe dropped."""
    told = []
    for entry in part.entries:
        if records.done(entry.cell) and isinstance(entry.cell, Searched) and entry.row in RACES:
            dropped, tried, saved = race(entry.row)
            told.append(
                f"on {entry.cell.data} {dropped} of {tried:,} policies dropped, {percent(saved)} "
                "of the work saved"
            )
    return told


def _shared(part: Part, records: Records) -> list[str]:
    """Name the searches whose rows of none and random policies are one measurement."""
    alike: dict[str, list[str]] = {}
    for entry in part.entries:
        assert isinstance(entry.cell, Searched)
        found = [
            [record.scores for record in case.of("attack")]
            for cases in records.confirmed(entry.cell).values()
            for name, case in cases.items()
            if name in AGAINST
        ]
        if found:
            alike.setdefault(json.dumps(found), []).append(entry.row)
    return [
        f"The rows of none and random of {' and '.join(f'*{row}*' for row in rows)} are one "
        "measurement: the same images, weights and figures."
        for rows in alike.values()
        if len(rows) > 1
    ]


def race_words() -> list[str]:
    """Return what recorded races saved, as documentation and help have it."""
    probed, tried, little = race(SMALL)
    scored, _, much = race("S_pri")
    raced, whole = (
        tomllib.loads((RECORDS / "searches" / name / "policies.toml").read_text())
        for name in ("raced", "published")
    )
    assert _ten(raced) == _ten(whole), "the race by S_pri kept other policies: say so"
    return [
        f"{probed} of {tried:,} policies",
        f"{percent(little)} of the work",
        f"{scored:,}, {percent(much, 0)}",
    ]


def remarks(part: Part, records: Records) -> str:
    """Return what to know of the tables of the searches' audits."""
    full: dict[str, dict[str, None]] = {}
    told: set[str] = set()
    for entry in part.entries:
        assert isinstance(entry.cell, Searched)
        for model, cases in records.confirmed(entry.cell).items():
            for name, case in cases.items():
                told |= {str(case.settings["knows"][confirmation(case).attack])}
                found = {} if name in AGAINST else rank_tests(cases, name)
                for other in (other for other, test in found.items() if saturated(test)):
                    full.setdefault(f"{entry.row}, {model}", {})[other] = None
    lines = [
        f"Races by the probe: {'; '.join(_races(part, records))}.",
        *_shared(part, records),
    ]
    lines.append(f"Each image of random gets one of {RANDOM} policies that no search has seen.")
    if not any("policy" in each for each in told):
        lines.append(
            f"The attack was told the {' and '.join(sorted(told))} alone, not the policy: to one "
            "that knows it a policy may leak more (`--attack auto`)."
        )
    if full:
        where = "; ".join(f"{at} (against {' and '.join(who)})" for at, who in full.items())
        lines.append(
            f"At least {SATURATED:.0%} of images have rank 1 on both sides, so that it separates "
            f"nothing at this setting: {where}."
        )
    return "\n".join(f"- {line}" for line in lines)
