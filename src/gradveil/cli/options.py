"""Options that commands share, and their output: tables for people, JSON for programs."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gradveil.cli import completion
from gradveil.core.errors import GradveilError, kind_of, unknown
from gradveil.core.streams import print_line
from gradveil.core.text import SafeConsole, on_one_line, read_number

if TYPE_CHECKING:
    from gradveil.core.types import Protocol
    from gradveil.defenses import Defense
    from gradveil.models import NormalizedName

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
    str,
    typer.Option(
        "--data",
        autocompletion=completion.data_sets,
        help="A data set of `gradveil data list`, or folder:PATH.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        autocompletion=completion.models,
        help="resnet20-4, convnet, convnet-9, lenet, mlp, vit, or package.module:factory.",
    ),
]
ImageSize = Annotated[
    int | None, typer.Option(help="Resize the images to this many pixels a side.")
]
Channels = Annotated[
    int | None, typer.Option(help="3: gray images get three equal planes; 1: color becomes gray.")
]
Normalization = Annotated[
    str | None,
    typer.Option(
        "--normalize",
        metavar="MEAN,STD",
        help="What your loader normalizes by, for a model of yours: 0.5,0.25, the means of all "
        "channels and then the stds, or imagenet, cifar10, cifar100, mnist, fashion-mnist, half.",
    ),
]
CHECKPOINT = "The model's weights: .safetensors, .pt, .pth, .ckpt or .npz; never unpickled."
Weights = Annotated[Path | None, typer.Option(help=f"{CHECKPOINT} Untrained without.")]
Start = Annotated[Path | None, typer.Option(help=f"Start from these weights. {CHECKPOINT}")]
OtherSpelling = Annotated[
    str | None, typer.Option("--policy", help="Another spelling of --defense.")
]
Augment = Annotated[
    bool, typer.Option(help="Random crop (padding 4) and mirror image before the policy.")
]

Study = Annotated[str, typer.Option(help="The study's name in the storage.")]
RayAddress = Annotated[
    str | None,
    typer.Option(help="The cluster's address. Default: $RAY_ADDRESS, else one on this machine."),
]
Thresholds = Annotated[
    Path | None,
    typer.Option(
        "--thresholds",
        help="A TOML file of what the run must keep to, such as \\[most] identified = 0.05 or "
        "\\[least] accuracy = 0.9. The status is 1 where it does not.",
    ),
]
WithPictures = Annotated[
    bool,
    typer.Option(
        "--with-pictures",
        help="Show your own images in the page too. Those of published data sets are always shown.",
    ),
]
Delta = Annotated[
    float | None, typer.Option(help="For --certify: decide whether that share is at most this.")
]
Gamma = Annotated[
    float | None,
    typer.Option(help="For --certify: decide whether the loss of accuracy is below this."),
]
BatchSize = Annotated[
    int, typer.Option(help="Images of one victim, whose gradient is of their mean loss.")
]
Labels = Annotated[str, typer.Option(help="known, or inferred from the gradient.")]
Loss = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="MODULE:FUNCTION",
        help="The client's loss, of logits and labels, with a value for each image. Default: cross "
        "entropy.",
    ),
]

progress = SafeConsole(stderr=True)


def read_loss(reference: str | None) -> "Callable[..., Any] | None":
    """Return the loss function of this name; None where none was given."""
    if reference is None:
        return None
    from gradveil.core.importing import import_named

    found = import_named(reference, "loss")
    if not callable(found) or isinstance(found, type):
        raise GradveilError(f"loss {reference!r} is {kind_of(found)}: expected a function")
    return found


def client_optimizer(text: str | None, momentum: float, decay: float) -> tuple[float, float]:
    """Return the momentum and weight decay of the client's SGD, which `text` may hold too."""
    if text is None:
        return momentum, decay
    name, _, settings = text.partition(":")
    if name != "sgd":
        raise unknown("client optimizer", name, ("sgd", "sgd:momentum=0.9,weight-decay=5e-4"))
    found = {"momentum": momentum, "weight-decay": decay}
    for part in filter(None, settings.split(",")):
        key, _, value = part.partition("=")
        key = key.strip().replace("_", "-")
        if key not in found:
            raise unknown("setting of the client's sgd", key, found)
        if found[key]:
            raise GradveilError(f"--client-optimizer {text}: --client-{key} says it too; give one")
        try:
            found[key] = read_number(value, float)
        except ValueError:
            raise GradveilError(
                f"--client-optimizer {text}: {key} is {value!r}; expected a number"
            ) from None
    return found["momentum"], found["weight-decay"]


@dataclass(frozen=True, kw_only=True)
class Local:
    """How a client makes an update, its local training: a field for each option."""

    local_steps: Annotated[
        int, typer.Option(help="Steps of SGD that a client makes, each over all its images.")
    ] = 1
    local_lr: Annotated[float, typer.Option(help="Learning rate of those steps.")] = 0.01
    local_epochs: Annotated[
        int,
        typer.Option(
            help="Times that a client goes through its images, in place of --local-steps."
        ),
    ] = 1
    local_batch_size: Annotated[
        int | None,
        typer.Option(help="Images in a client's mini-batch, a step each. Default: all its images."),
    ] = None
    client_momentum: Annotated[float, typer.Option(help="Momentum of the client's SGD.")] = 0.0
    client_weight_decay: Annotated[
        float, typer.Option(help="Weight decay of the client's SGD.")
    ] = 0.0
    client_optimizer: Annotated[
        str | None,
        typer.Option(
            "--client-optimizer",
            help="The client's optimizer as one text: sgd, or sgd:momentum=0.9,weight-decay=5e-4.",
        ),
    ] = None
    train_mode: Annotated[
        bool,
        typer.Option(
            "--train-mode", help="Batch norm uses the batch's own statistics, dropout is on."
        ),
    ] = False

    @property
    def protocol(self) -> "Protocol":
        """The options as a value."""
        from gradveil.core.types import Protocol  # torch takes seconds to import

        momentum, decay = client_optimizer(
            self.client_optimizer, self.client_momentum, self.client_weight_decay
        )
        return Protocol(
            self.local_steps,
            self.local_lr,
            self.train_mode,
            self.local_epochs,
            self.local_batch_size,
            momentum,
            decay,
        )


def with_local(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command have the options of `Local`, in the place of its parameter `local`."""
    fields = inspect.signature(Local).parameters
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        shown += fields.values() if name == "local" else [parameter]

    @wraps(command)
    def run(**given: Any) -> None:
        local = Local(**{name: given.pop(name) for name in fields})
        command(**given, local=local)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # typer reads it
    return run


def find_defense(defense: str | None, policy: str | None) -> "Defense":
    """Return the defense of --defense or of its other spelling, --policy; none without both."""
    if defense is not None and policy is not None:
        raise GradveilError(
            f"policy {policy} and defense {defense}: give one; for a chain, "
            f"--defense {policy},then,{defense}"
        )
    from gradveil.defenses import parse

    return parse(defense or policy or "none")


def read_counts(text: str, option: str, example: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them; return each once, the smallest first."""
    try:
        return tuple(sorted({read_number(part, int) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise GradveilError(
            f"{option} {text!r}: write whole numbers with commas, such as {example}"
        ) from None


def normalized_model(model: str, constants: str | None) -> "str | NormalizedName":
    """Return the model's name, with the constants that its loader normalizes by."""
    if constants is None:
        return model
    from gradveil.models import NormalizedName  # torch takes seconds to import
    from gradveil.models.normalized import read_constants

    return NormalizedName(model, *read_constants(constants))


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


WIDEST = 10_000  # letters, more than any table needs
NARROW = 120  # letters of a line below which a list is not a table


def listing(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> Table | list[str]:
    """Build a table, or where lines are short a few lines for each row, its cells named."""
    if SafeConsole().width >= NARROW:
        return table(title, columns, rows)
    return _as_lines(title, columns[1:], [(f"{row[0]}: {row[1]}", *row[2:]) for row in rows])


def fitting(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> Table | list[str]:
    """Build a table, or where it would break words a few lines for each row, its cells named."""
    console, made = SafeConsole(), table(title, columns, rows)
    unlimited = console.options.update(width=WIDEST)
    if Measurement.get(console, unlimited, made).minimum <= console.width:
        return made
    return _as_lines(title, columns, rows)


def _as_lines(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Write a line for the first cell of each row, and one with its name for each of the others."""
    lines = [title]
    for first, *more in rows:
        lines.append(str(first))
        named = zip(columns[1:], more, strict=True)
        lines += [f"    {name}: {cell}" for name, cell in named if cell]
    return lines


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
