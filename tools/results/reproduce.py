"""The papers' experiments, run again: verdicts, tables four ways, and what is missing."""

import json
from collections.abc import Sequence
from pathlib import Path

from gradveil.papers.beyond import Searches
from gradveil.papers.catalog import EXPERIMENTS
from gradveil.papers.cells import Audited, Workspace
from gradveil.papers.claims import decide_all
from gradveil.papers.experiments import (
    HYBRID,
    NONE,
    OPTIONAL_DATA,
    STRONGEST,
    DefenseTable,
    Experiment,
    Size,
)
from gradveil.papers.figures import Stages, draw_figures, find_drawing, find_stages
from gradveil.papers.plan import Part, make_parts
from gradveil.papers.published import table_title
from gradveil.papers.records import Records
from gradveil.papers.switches import VARIANTS
from gradveil.papers.tables import compare
from gradveil.papers.verdicts import INFEASIBLE, MISSING, POINT
from gradveil.scores.lineup import FAR
from gradveil.stats import holm
from results import searches
from results.records import RECORDS, ROOT, mcnemar, ranked_first, table

LEVEL = 0.05
FOLDER = RECORDS / "reproduce"
FIGURES = "docs/figures"
NOWHERE = Workspace(Path("no-weights"), Path("no-data"), "cpu")  # so that no machine's files count


def section() -> str:
    records = Records((FOLDER,))
    parts = make_parts([*EXPERIMENTS.values()], VARIANTS, Size(), NOWHERE)
    every = {entry.cell.key: entry.cell for part in parts for entry in part.entries}
    done = [cell for cell in every.values() if records.done(cell)]
    texts = [_intro(len(done), len(every), [*every])]
    texts.append(_verdicts(parts, records))
    for experiment in EXPERIMENTS.values():
        ways = {part.way: part for part in parts if part.experiment is experiment}
        texts += _experiment(experiment, ways, records)
    texts.append(_missing(parts, records))
    return "\n\n".join(filter(None, texts))


def draw() -> list[Path]:
    """Draw the figures that the section shows."""
    parts = make_parts([*EXPERIMENTS.values()], {"ours": VARIANTS["ours"]}, Size(), NOWHERE)
    return draw_figures(parts, Records((FOLDER,)), ROOT / FIGURES)


def stages() -> Stages:
    """Return rank 1 by stage of training."""
    experiment, ours = EXPERIMENTS["over-training"], {"ours": VARIANTS["ours"]}
    (part,) = make_parts([experiment], ours, Size(), NOWHERE)
    return find_stages(part, Records((FOLDER,)))


def _intro(done: int, total: int, keys: list[str]) -> str:
    text = (
        "## The papers' experiments, run again\n"
        "Each in two ways: *as published*, with the defects of the published code, and *as it "
        "should be* (`DEVIATIONS.md` lists the switches): what is shared is attacked, victims are "
        "cropped and flipped with a policy and without, drawn over all classes, and `raced`, the "
        "stronger attack at the end of training, and its sham stand beside the published one for "
        "none and the hybrid. "
        "PSNR is against the image used; line-ups count rank 1 with exact 95% intervals, and, "
        "where records hold it, rank 1 in a line-up that finds a picture moved by up to "
        f"{FAR} pixels. "
        f"{done} of {total} cells are done. `gradveil reproduce ID --data-root DIR`; records "
        "`reproduce/`, one folder for each cell."
    )
    spent: dict[str, float] = {}
    for key in keys:
        path = FOLDER / key / "cell.json"
        if path.is_file():
            facts = json.loads(path.read_text())
            used = facts["seconds"] + facts["result"].get("training_seconds", 0.0)
            spent[facts["device"]] = spent.get(facts["device"], 0.0) + used
    told = ", ".join(f"{seconds / 60:.0f} minutes on {name}" for name, seconds in spent.items())
    return text + (f" They took {told}." if told else "")


def _verdicts(parts: tuple[Part, ...], records: Records) -> str:
    body = [
        [each.name, each.claim, f"**{each.verdict}**", each.figure]
        for each in decide_all(parts, records)
    ]
    rest = [each for each in body if each[2] != f"**{MISSING}**"]
    if not rest:
        return f"None of the {len(body)} claims can be judged yet."
    rules = (
        "**Verdicts**, each at 95%, not corrected for their number. *Infeasible* means that at "
        f"most {INFEASIBLE:.0%} of images can have rank 1, under an attack that works without the "
        f"defense; it does not hold where it must be more, and holds in part where it is between "
        f"chance and that, but less than without the defense. *Almost nothing* is at most "
        f"{100 * POINT:.0f} point of accuracy. A claim of several tables holds where all of them "
        "do. Rank 1 is by a line-up that finds a picture moved by up to 2 pixels: shares of "
        "trained models are lower bounds (see *The line-up is strict*)."
    )
    return f"{rules}\n\n{table(['', 'claim', 'verdict', 'decided by'], body)}"


def _experiment(experiment: Experiment, ways: dict[str, Part], records: Records) -> list[str]:
    head, body = compare(ways, records)
    if not body:
        return []
    shown = table(head, body)
    if isinstance(experiment, Searches):
        shown = searches.confirmed(ways["ours"], records)
    title = experiment.claim if experiment.table is None else table_title(experiment.table)
    title = title.rstrip(".")
    text = f"**{experiment.id}**: {title}. Agreeing means: {experiment.agrees}\n\n{shown}"
    if find_drawing(ways["ours"], records) is not None:
        text += f"\n\n![{experiment.id}, as it should be]({FIGURES}/{experiment.id}-ours.png)"
    if isinstance(experiment, DefenseTable):
        return [text, *_paired(ways["ours"], records)]
    return [text]


def _paired(part: Part, records: Records) -> list[str]:
    """Compare the raced attack under each defense with that without and under the hybrid."""
    firsts: dict[str, dict[int, bool]] = {}
    for row, cell in part.entries:
        if isinstance(cell, Audited) and cell.attack.startswith(STRONGEST):
            case = records.case(cell)
            if case is None:
                return []
            firsts[row] = ranked_first(case, cell.attack)
    shared = sorted(set.intersection(*({*first} for first in firsts.values())))
    found = {row: [first[image] for image in shared] for row, first in firsts.items()}
    none, hybrid = found.pop(NONE), found.pop(HYBRID)
    ordered = sorted(found, key=lambda row: -sum(found[row]))
    tests = [mcnemar(none, found[row]) for row in ordered]
    left, right, p = mcnemar(none, hybrid)
    *adjusted, p = holm([*(p for _, _, p in tests), p])
    told = [
        f"`{row}` {sum(found[row])} ({only} : {other}, p = {p:.2g})"
        for row, (only, other, _), p in zip(ordered, tests, adjusted, strict=True)
    ]
    fewer = [row for row, p in zip(ordered, adjusted, strict=True) if p < LEVEL]
    beside = holm([mcnemar(hybrid, found[row])[2] for row in ordered])
    apart = sum(value < LEVEL for value in beside)
    return [
        f"**On the {len(shared)} images that all have** (as it should be, raced attacks; those on "
        f"a gradient defense know it): rank 1 for {sum(none)} without a defense; "
        f"{', '.join(told)}; in brackets how many only none and only the defense has, exact "
        f"McNemar p with Holm's correction for {len(tests) + 1}, the hybrid's included. After it "
        f"{_listed(fewer)} from none. The hybrid, attacked "
        f"without knowing it, has {sum(hybrid)} ({left} : {right}, p = {p:.2g}), and is "
        f"apart from {apart or 'none'} of the {len(beside)} gradient defenses. One training and "
        "one attacker seed each; these cells have no sham."
    ]


def _listed(rows: Sequence[str]) -> str:
    names = " and ".join(f"`{row}`" for row in rows)
    return f"{names} differ{'s' * (len(rows) == 1)}" if rows else "none differs"


def _missing(parts: tuple[Part, ...], records: Records) -> str:
    body, optional = [], set()
    for part in parts:
        cells = {entry.cell.key: entry.cell for entry in part.entries}
        absent = [cell for cell in cells.values() if not records.done(cell)]
        optional |= {cell.key for cell in absent if cell.data in OPTIONAL_DATA}
        left = [cell for cell in absent if cell.data not in OPTIONAL_DATA]
        if not left:
            continue
        trainings = {cell.training.key: cell.training.seconds for cell in left}
        seconds = sum(trainings.values()) + sum(cell.seconds for cell in left)
        body.append(
            [
                part.experiment.id,
                "as published" if part.way == "published" else "as it should be",
                f"{len(left)} of {len(cells)}",
                f"{seconds / 60:.0f}",
                part.experiment.claim,
            ]
        )
    more = (
        f"{len(optional)} further cells need {' and '.join(OPTIONAL_DATA)}, whose official files "
        "were not at hand."
        if optional
        else ""
    )
    if not body:
        return more
    head = ["missing", "way", "cells", "GPU minutes, estimated", "claim"]
    return (
        "Still missing (cells are shared, so the minutes do not add up; `gradveil reproduce "
        f"--status`):\n\n{table(head, body)}\n\n{more}"
    )
