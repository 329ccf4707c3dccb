"""gradveil reproduce: run the papers' experiments again, over several sittings."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from gradveil.cli import options
from gradveil.cli.options import examples, say, table
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.streams import print_line
from gradveil.core.text import on_one_line

if TYPE_CHECKING:
    from gradveil.papers.cells import Workspace
    from gradveil.papers.experiments import Experiment, Size
    from gradveil.papers.plan import Part, Plan
    from gradveil.papers.queue import Outcome
    from gradveil.papers.records import Records
    from gradveil.papers.switches import Switches
    from gradveil.papers.tables import Table as PaperTable

EXAMPLES = examples(
    "gradveil reproduce --list",
    "gradveil reproduce exp9 --scale quick",
    "gradveil reproduce table1a --data-root DIR --as-published",
    "gradveil reproduce --all --minutes 25 --data-root DIR",
    "gradveil reproduce --status",
)
SCALES = ("paper", "quick")
ARCHIVES = (".tar.gz", ".tgz")
QUICK = "quick: small stand-ins for models and data; it shows that everything runs, proves nothing"


def reproduce_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Experiments of --list, or exp1 to exp10."),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the experiments with claim and GPU minutes.")
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Show what the records hold, and what is missing.")
    ] = False,
    run_all: Annotated[
        bool,
        typer.Option("--all", help="Run all that is missing, the cheapest experiment first."),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="Start nothing that is not likely to end within so many minutes."),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(help="paper, or quick: in minutes on two cores; it proves nothing."),
    ] = "paper",
    images: Annotated[
        int | None,
        typer.Option(help="Images of a cell. Default: 64, and 32 as published."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Trainings of the rows none and hybrid. table1a has at least 3.")
    ] = 1,
    as_published: Annotated[
        bool,
        typer.Option(
            "--as-published",
            help="Only as the published code does it, with all switches set so. "
            "Default: both so and as it should be.",
        ),
    ] = False,
    switch: Annotated[
        list[str] | None,
        typer.Option(help="Set a switch of DEVIATIONS.md, such as loss=halved; several times."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Weights and unfinished work. Default: runs/reproduce."),
    ] = None,
    records: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of records. Given several times, they are written to the first and "
            "looked for in all. Default: benchmarks/results/reproduce; quick: in --out."
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(help="After each cell, write the first folder of records to this .tar.gz."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="Draw the figures of what is done into this folder."),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: on a Ray cluster.")] = "local",
    at_once: Annotated[
        int, typer.Option(help="Processes that work side by side; they may share a GPU.")
    ] = 1,
    ray_address: options.RayAddress = None,
    data_root: options.DataRoot = None,
    as_json: options.Json = False,
    device: options.Device = "auto",
) -> None:
    """Run experiments of the papers, beside what was published.

    What is done is kept as records and never done again. Run the same command again after a stop.
    """
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    asked = [*(names or ())]
    if bool(asked) + run_all + list_all + status > 1 and not (status and asked):
        raise GradveilError("give experiments, --all, --list or --status: one of them")
    if not (asked or run_all or list_all or status):
        raise GradveilError("no experiment named: see gradveil reproduce --list, or give --all")
    idle = {"minutes": minutes, "archive": archive} if list_all or status else {}
    idle |= {"figures": figures} if list_all else {}
    for name, value in idle.items():
        if value is not None:
            shows = "list" if list_all else "status"
            raise GradveilError(f"{name} {on_one_line(value)}: --{shows} has no use for it")
    if minutes is not None and not minutes > 0:
        raise GradveilError(f"minutes {minutes:g}: it must be above 0")
    if archive is not None and not archive.name.endswith(ARCHIVES):
        raise GradveilError(f"archive {on_one_line(archive)}: name it {' or '.join(ARCHIVES)}")
    from gradveil.engine.device import find_device
    from gradveil.papers.catalog import EXPERIMENTS, find_experiments
    from gradveil.papers.cells import Workspace
    from gradveil.papers.experiments import Size
    from gradveil.papers.plan import make_parts, make_plan
    from gradveil.papers.queue import run_queue
    from gradveil.papers.records import COMMITTED, Records
    from gradveil.search.services import check_engine

    find_device(device)
    check_engine(engine, ray_address)
    size = Size(images, seeds, scale == "quick")
    work = out or Path("runs") / ("reproduce-quick" if size.quick else "reproduce")
    folders = tuple(records or ()) or ((work / "records") if size.quick else COMMITTED,)
    workspace = Workspace(work, data_root, device, progress=engine == "local" and at_once == 1)
    kept = Records(folders)
    chosen = find_experiments(asked) if asked else [*EXPERIMENTS.values()]
    ways = _ways(as_published, switch or ())
    parts = make_parts(chosen, ways, size, workspace)
    plan = make_plan(parts, kept, workspace)
    if list_all:
        _show_list(chosen, parts, size, as_json)
        return
    if status:
        _draw(parts, kept, figures)
        _show_status(plan, workspace, kept, size, as_json)
        return
    for line in _announced(plan, workspace, size):
        print_line(line, error=True)
    outcome = run_queue(
        plan,
        kept,
        workspace,
        minutes=minutes,
        archive=archive,
        engine=engine,
        at_once=at_once,
        ray_address=ray_address,
    )
    _draw(parts, kept, figures)
    _show_outcome(make_plan(parts, kept, workspace), kept, outcome, size, as_json)
    if outcome.failed:
        raise typer.Exit(1)


def _ways(as_published: bool, settings: Sequence[str]) -> "dict[str, Switches]":
    """Return the switches of each way that is run."""
    from gradveil.papers.switches import VARIANTS, switched

    if as_published:
        return {"published": switched(VARIANTS["published"], settings)}
    if settings:
        return {"ours": switched(VARIANTS["ours"], settings)}
    return dict(VARIANTS)


def _draw(parts: "Sequence[Part]", records: "Records", folder: Path | None) -> None:
    if folder is not None:
        from gradveil.papers.figures import draw_figures

        for path in draw_figures(parts, records, folder):
            print_line(f"figure {path}", error=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"


def _show_list(
    chosen: "Sequence[Experiment]",
    parts: "Sequence[Part]",
    size: "Size",
    as_json: bool,
) -> None:
    from gradveil.papers.plan import whole

    rows, plain = [], []
    for experiment in chosen:
        theirs = [part for part in parts if part.experiment is experiment]
        every = {entry.cell.key: entry.cell for part in theirs for entry in part.entries}
        seconds = whole([*every.values()])
        plain.append(
            {
                "id": experiment.id,
                "documents": list(experiment.documents),
                "claim": experiment.claim,
                "agrees": experiment.agrees,
                "cells": len(every),
                "data": sorted({cell.data for cell in every.values()}),
                "minutes": round(seconds / 60, 1),
            }
        )
        documents = ", ".join(experiment.documents)
        rows.append((experiment.id, documents, experiment.claim, len(every), _minutes(seconds)))
    unit, machine = _unit(size)
    columns = ("id", "document", "claim", "cells", unit)
    note = (
        f"{unit[0].upper()}{unit[1:]} are estimated for {machine}. Experiments share cells: "
        "together they take less than their sum."
    )
    say({"experiments": plain}, as_json, table("Experiments", columns, rows), ["", note])


def _unit(size: "Size") -> tuple[str, str]:
    """Return what minutes are called, and the machine that they are estimated for."""
    return ("minutes", "two cores") if size.quick else ("GPU minutes", "one H200")


def _show_status(
    plan: "Plan", workspace: "Workspace", records: "Records", size: "Size", as_json: bool
) -> None:
    from gradveil.papers.plan import estimate

    rows, plain = [], []
    for part in plan.parts:
        every = {entry.cell.key: entry.cell for entry in part.entries}
        left = plan.left(part)
        absent = Counter(sorted(every[key].data for key in every if key in plan.absent))
        done = len([key for key in every if key in plan.done])
        seconds = estimate(left, workspace)
        plain.append(
            {
                "id": part.experiment.id,
                "way": part.way,
                "done": done,
                "cells": len(every),
                "minutes_left": round(seconds / 60, 1),
                "absent": absent.total(),
                "data_absent": [*absent],
                "missing": [cell.key for cell in left],
            }
        )
        rows.append(
            (
                part.experiment.id,
                part.way,
                f"{done} of {len(every)}",
                str(len(left)) if left else "",
                _minutes(seconds) if left else "",
                ", ".join(f"{data}: {count}" for data, count in absent.items()),
            )
        )
    total = plan.seconds(workspace)
    folders = ", ".join(str(folder) for folder in records.folders)
    missing = sum(len(group.cells) for group in plan.groups)
    unit, machine = _unit(size)
    lines = [
        "",
        f"records in {folders}: {len(plan.done)} cells are done, {missing} are missing, about "
        f"{_minutes(total)} {unit} on {machine}",
    ]
    if plan.absent:
        lines.append(f"{len(plan.absent)} more cells need data that is not there")
    columns = ("id", "way", "cells done", "missing", "minutes left", "no data")
    result = {
        "experiments": plain,
        "done": len(plan.done),
        "missing": missing,
        "minutes_left": round(total / 60, 1),
    }
    say(result, as_json, table("Reproduction", columns, rows), lines)


def _announced(plan: "Plan", workspace: "Workspace", size: "Size") -> list[str]:
    """Say before the work starts how much of it there is."""
    missing = sum(len(group.cells) for group in plan.groups)
    lines = [QUICK] if size.quick else []
    total = len(plan.done) + missing + len(plan.absent)
    text = f"{len(plan.done)} of {total} cells are done, {missing} are to do"
    if missing and not size.quick:
        text += f": about {_minutes(plan.seconds(workspace))} minutes on one H200"
    lines.append(text)
    if plan.absent:
        every = (entry.cell for part in plan.parts for entry in part.entries)
        needed = sorted({cell.data for cell in every if cell.key in plan.absent})
        lines.append(f"left out: {len(plan.absent)} cells need {', '.join(needed)}, not there")
    return lines


FIGURE = re.compile(r"[-\d]")  # how a cell begins that is one
TEXT = 14  # letters that a column of texts keeps: those of "dense-matching"


def fitted(found: "PaperTable") -> Table:
    """Build a table that gives way to a narrow terminal: texts are broken, then figures left out.

    Of the columns of figures the last are left out first, and the first one never.
    """
    from gradveil.report.layout import Fitted  # a package that imports torch

    texts = [
        number
        for number, cells in enumerate(zip(*found.body, strict=True))
        if not number or not all(map(FIGURE.match, filter(None, cells)))
    ]
    figures = [number for number in range(len(found.head)) if number not in texts]
    made = Fitted(found.title, found.head, dict.fromkeys(texts, TEXT), figures[:0:-1], tells=True)
    for cells in found.body:
        made.row(*cells)
    return made


def _show_outcome(
    plan: "Plan", records: "Records", outcome: "Outcome", size: "Size", as_json: bool
) -> None:
    from gradveil.papers.tables import compare

    shown: list[Table | str | list[str]] = []
    plain: list[dict[str, Any]] = []
    for experiment in dict.fromkeys(part.experiment for part in plan.parts):
        ways = {part.way: part for part in plan.parts if part.experiment is experiment}
        tables = compare(ways, records)
        shown += [f"{experiment.id}: {experiment.claim}"] if tables else []
        shown += [fitted(each) for each in tables]
        plain.append({"id": experiment.id, "tables": [asdict(each) for each in tables]})
    lines = ["", f"{len(outcome.done)} cells done now, {len(outcome.left)} left for later"]
    lines += [f"failed {key}: {reason}" for key, reason in outcome.failed.items()]
    lines += [QUICK] if size.quick else []
    lines.append(f"records {records.folders[0]}")
    result = {
        "done": outcome.done,
        "left": outcome.left,
        "failed": outcome.failed,
        "records": records.folders[0],
        "experiments": plain,
    }
    say(result, as_json, *shown, lines)
