"""gradveil assess: what is shared now, which defenses help, what they cost, and what to do."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from gradveil.cli import completion, options
from gradveil.cli.options import examples, say, table

if TYPE_CHECKING:
    from gradveil.assessment import Assessment

EXAMPLES = examples(
    "gradveil assess --data fashion-mnist-mini --model lenet --budget 5",
    "gradveil assess --data folder:photos --model my_package.nets:make --checkpoint weights.pt "
    "--normalize imagenet",
    "gradveil assess --data cifar100 --model resnet20-4 --checkpoint runs/r/model.safetensors "
    "--defense prune:0.99 --defense 3-1-7+43-18-18 --out runs/assessed",
)


@options.with_local
def assess_command(
    *,
    data: options.Data,
    model: options.Model,
    checkpoint: options.Weights = None,
    out: Annotated[
        Path, typer.Option("--out", help="The folder of the assessment and its page.")
    ] = Path("assessment"),
    defense: Annotated[
        list[str] | None,
        typer.Option(
            "--defense",
            autocompletion=completion.defenses,
            help="A defense to try; several times for several. Default: a few, at sensible "
            "settings.",
        ),
    ] = None,
    images: Annotated[int, typer.Option(help="How many images to attack.")] = 32,
    epochs: Annotated[
        int, typer.Option(help="Epochs of training on under each defense, for its accuracy.")
    ] = 2,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate of that training.")] = 0.01,
    most_loss: Annotated[
        float, typer.Option(help="Share of accuracy that a defense may cost to be recommended.")
    ] = 0.02,
    budget: Annotated[float, typer.Option(help="Minutes for all of it, about.")] = 60.0,
    batch_size: options.BatchSize = 1,
    labels: options.Labels = "known",
    local: options.Local,
    with_pictures: options.WithPictures = False,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    normalize: options.Normalization = None,
    data_root: options.DataRoot = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Say what clients give away now, which defense is worth its cost, or that none is.

    Everything has a default. Run the same command again after a stop: it goes on.
    """
    from gradveil.assessment import AssessJob, run_assessment  # torch takes seconds to import
    from gradveil.defenses import parse

    job = AssessJob(
        options.normalized_model(model, normalize),
        data,
        checkpoint,
        tuple(parse(text) for text in defense or ()),
        images,
        batch_size,
        labels,
        local.protocol,
        epochs,
        lr,
        most_loss,
        budget,
        image_size,
        channels,
        seed,
    )
    found = run_assessment(job, out, root=data_root, device=device, with_pictures=with_pictures)
    lines = ["", *found.advice, "", f"page    {found.report.page}"]
    say(found.plain(), as_json, str(found.diagnosis), assessment_table(found), lines)


def assessment_table(found: "Assessment") -> Table:
    """Show what leaks now, and under each defense what leaks, what it costs, and the verdict."""
    rows = []
    for name, case in zip(("none, now", "none, trained on"), found.result.cases, strict=False):
        row, (low, high) = case.strongest, case.strongest.identified_bounds
        lineup = f"{row.identified}/{row.n} ({low:.0%} to {high:.0%})"
        accuracy = "" if case.model is None else f"{case.model.accuracy:.1%}"
        rows.append((name, row.attack, lineup, accuracy, row.doubt or "leaks"))
    for each in found.defenses:
        lineup = f"{each.identified}/{each.n} ({each.bounds[0]:.0%} to {each.bounds[1]:.0%})"
        cost = f"{each.accuracy:.1%} ({-100 * each.cost.value:+.1f})"
        rows.append((each.defense, each.attack, lineup, cost, "helps" if each.helps else "no"))
    columns = ("defense", "strongest attack", "identified (95%)", "accuracy", "verdict")
    return table("Assessment", columns, rows)
