"""gradveil data: list the data sets, check that their files are whole, and fetch them."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gradveil.cli.options import DataRoot, Device, Json, Seed, examples, progress, say, table

if TYPE_CHECKING:
    from gradveil.data import Dataset, Verification

app = typer.Typer(no_args_is_help=True, help="List, check and fetch data sets.")


@app.command(
    "list", epilog=examples("gradveil data list", "gradveil data list --data-root DIR --json")
)
def list_sets(
    data_root: DataRoot = None,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
    device: Device = "auto",
) -> None:
    """List every data set gradveil knows, and whether it lies below the data root."""
    from gradveil.data import catalog, find_root  # torch takes seconds to import
    from gradveil.engine.device import find_device

    find_device(device)
    root = find_root(data_root)
    sets = [_facts(entry, root) for entry in catalog()]
    rows = [
        (
            s["name"],
            f"{s['channels']}x{s['size']}x{s['size']}",
            s["classes"],
            s["train"],
            s["test"],
            "yes" if s["here"] else "no",
            s["license"],
        )
        for s in sets
    ]
    columns = ("name", "image", "classes", "train", "test", "here", "license")
    shown = table(f"Data sets below {root}", columns, rows)
    hint = (
        "A folder of your own: --data folder:PATH, "
        "with PATH/<class>/* or PATH/{train,test}/<class>/*."
    )
    say({"root": str(root), "datasets": sets}, as_json, shown, hint)


@app.command(
    "verify",
    epilog=examples(
        "gradveil data verify cifar100 --data-root DIR",
        "gradveil data verify fashion-mnist-mini --json",
    ),
)
def verify_set(
    name: str,
    data_root: DataRoot = None,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
    device: Device = "auto",
) -> None:
    """Check a data set's files; status 1 if a file is wrong.

    They are checked by checksum where the owner publishes one, else by decoding every image.
    """
    from gradveil.data import verify
    from gradveil.engine.device import find_device

    find_device(device)
    _report(verify(name, data_root), as_json)


@app.command("fetch", epilog=examples("gradveil data fetch fashion-mnist --data-root DIR"))
def fetch_set(
    name: str,
    data_root: DataRoot = None,
    as_json: Json = False,
    seed: Seed = 0,  # noqa: ARG001
    device: Device = "auto",
) -> None:
    """Download a data set below the data root and check it.

    It goes on where an earlier download stopped.
    """
    from gradveil.data import fetch
    from gradveil.engine.device import find_device

    find_device(device)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=progress)
    tasks: dict[str, TaskID] = {}

    def show(file: str, done: int, total: int | None) -> None:
        if not tasks:  # a bar that starts without tasks leaves an empty line
            bar.start()
        if file not in tasks:
            tasks[file] = bar.add_task(file, total=total)
        bar.update(tasks[file], completed=done, total=total)

    try:
        found = fetch(name, data_root, show)
    finally:
        if tasks:
            bar.stop()
    _report(found, as_json)


def _facts(entry: "Dataset", root: Path) -> dict[str, Any]:
    named = (
        "name",
        "title",
        "channels",
        "size",
        "classes",
        "train",
        "test",
        "license",
        "citation",
        "layout",
        "url",
        "home",
    )
    return {name: getattr(entry, name) for name in named} | {"here": entry.here(root)}


def _report(found: "Verification", as_json: bool) -> None:
    result = {
        "dataset": found.name,
        "verified": found.ok,
        "note": found.note,
        "files": [asdict(check) for check in found.files],
    }
    wrong = [check for check in found.files if not check.ok]
    files = "1 wrong file" if len(wrong) == 1 else f"{len(wrong)} wrong files"
    verdict = f"{found.name}: {'all is right' if found.ok else files}"
    note = f" ({found.note})" if found.note else ""
    lines = [f"  {check.path}: {check.problem}" for check in wrong[:20]]
    say(result, as_json, [verdict + note, *lines])
    if not found.ok:
        raise typer.Exit(1)
