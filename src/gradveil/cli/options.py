"""Options that commands share, and their output: tables for people, JSON for programs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from gradveil.core.streams import print_line
from gradveil.core.text import SafeConsole, on_one_line

Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on the standard output, and nothing else there."
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The seed of everything random.")]
Device = Annotated[
    str, typer.Option("--device", help="auto (the GPU where there is one), cpu or cuda.")
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        help="The folder that holds the data sets. "
        "Default: $GRADVEIL_DATA, else ~/.local/share/gradveil.",
    ),
]

Data = Annotated[
    str, typer.Option("--data", help="A data set of `gradveil data list`, or folder:PATH.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="resnet20-4, convnet, convnet-9, lenet, mlp, vit, or package.module:factory.",
    ),
]
ImageSize = Annotated[
    int | None, typer.Option(help="Resize the images to this many pixels a side.")
]
Augment = Annotated[
    bool, typer.Option(help="Random crop (padding 4) and mirror image before the policy.")
]

# The protocol of a client.
BatchSize = Annotated[
    int, typer.Option(help="Images of one victim, whose gradient is of their mean loss.")
]
Labels = Annotated[str, typer.Option(help="known, or inferred from the gradient.")]
LocalSteps = Annotated[
    int, typer.Option(help="Steps of SGD that a client makes, each over all its images.")
]
LocalRate = Annotated[float, typer.Option(help="Learning rate of those steps.")]
LocalEpochs = Annotated[
    int,
    typer.Option(help="Times that a client goes through its images, in place of --local-steps."),
]
LocalBatchSize = Annotated[
    int | None,
    typer.Option(help="Images in a client's mini-batch, a step each. Default: all its images."),
]
ClientMomentum = Annotated[float, typer.Option(help="Momentum of the client's SGD.")]
ClientWeightDecay = Annotated[float, typer.Option(help="Weight decay of the client's SGD.")]
TrainMode = Annotated[
    bool,
    typer.Option("--train-mode", help="Batch norm uses the batch's own statistics, dropout is on."),
]

progress = SafeConsole(stderr=True)


def say(result: Mapping[str, Any], as_json: bool, *shown: Table | str | Sequence[str]) -> None:
    """Print the result: the parts `shown`, or one JSON object where that was asked for.

    Of a list of lines each stays one line, whatever names are in it.
    """
    if as_json:
        print_line(json.dumps(result, default=str))
        return
    console = SafeConsole()
    for number, part in enumerate(shown):
        if number and isinstance(part, Table):
            console.print()
        text = part if isinstance(part, Table | str) else "\n".join(map(on_one_line, part))
        # Without markup, since a path may hold [brackets].
        console.print(text, soft_wrap=isinstance(text, str), markup=False, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Build a table that cuts no name; the first column, which a user types, is never broken."""
    made = Table(title=Text(on_one_line(title)), title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, no_wrap=number == 0, overflow="fold")
    for row in rows:
        made.add_row(*(Text(on_one_line(cell)) for cell in row))
    return made


def examples(*lines: str) -> str:
    """Write the examples that end a command's help."""
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)
