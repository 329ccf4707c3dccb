"""gradveil train: a model on a data set, by the published recipe."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli import completion, options
from gradveil.cli.options import examples, say

EXAMPLES = examples(
    "gradveil train --data fashion-mnist-mini --model mlp --epochs 10 --lr 0.05",
    "gradveil train --data cifar100 --data-root DIR --model resnet20-4 --defense 3-1-7+43-18-18",
    "gradveil train --data fashion-mnist-mini --model lenet --defense dp:norm=1,multiplier=1.1 "
    "--lr 0.05",
    "gradveil train --data folder:photos --model my_package.nets:make --save-at 0,1,10,50",
)


def train_command(
    data: options.Data,
    model: options.Model,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The run's folder. Default: runs/train-DATA-MODEL-SEED."),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 60,
    lr: Annotated[
        float,
        typer.Option(
            "--lr", help="Learning rate; divided by ten at 3/8, 5/8 and 7/8 of the epochs."
        ),
    ] = 0.1,
    momentum: Annotated[float, typer.Option(help="Nesterov momentum.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 5e-4,
    batch_size: Annotated[int, typer.Option(help="Images in a step.")] = 128,
    loss_scale: Annotated[
        float, typer.Option(help="Multiplies the training loss; the published code uses 0.5.")
    ] = 1.0,
    defense: Annotated[
        str | None,
        typer.Option(
            "--defense",
            autocompletion=completion.defenses,
            help="A defense of `gradveil defenses list`, such as prune:0.95; a policy, such as "
            "3-1-7, or the policies.toml of a search; a class of yours, package.module:Class(4); "
            "several joined by ,then,.",
        ),
    ] = None,
    policy: options.OtherSpelling = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Of DP-SGD's epsilon. Default: 1 / the number of training images."),
    ] = None,
    checkpoint: options.Start = None,
    augment: options.Augment = True,
    fraction: Annotated[
        float, typer.Option(help="Class-balanced share of the training images, such as 0.1.")
    ] = 1.0,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    normalize: options.Normalization = None,
    save_at: Annotated[
        str, typer.Option(help="Save the weights after these steps too, such as 0,1,10,50.")
    ] = "",
    precision: Annotated[str, typer.Option(help="auto (bf16 on a GPU), 32 or bf16.")] = "auto",
    data_root: options.DataRoot = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Train a model.

    Run the same command again after a stop: it goes on after the last whole epoch, with the same
    result.
    """
    from gradveil.training import Recipe, TrainingJob, train

    job = TrainingJob(
        data,
        options.normalized_model(model, normalize),
        Recipe(epochs, lr, momentum, weight_decay, batch_size, loss_scale),
        options.find_defense(defense, policy),
        augment,
        fraction,
        image_size,
        options.read_counts(save_at, "save-at", "0,1,10,50"),
        precision,
        seed,
        delta,
        channels=channels,
        start=checkpoint,
    )
    trained = train(job, out or job.folder, root=data_root, device=device)
    result = {
        "accuracy": trained.accuracy,
        "epochs": trained.epochs,
        "steps": trained.steps,
        "out": trained.out,
        "checkpoint": trained.checkpoint,
        "defense": str(job.defense),
        "epsilon": trained.epsilon,
        "delta": trained.delta,
        "history": trained.history,
    }
    length = "1 epoch" if trained.epochs == 1 else f"{trained.epochs} epochs"
    lines = [
        f"{model} on {data}: test accuracy {trained.accuracy:.2%} after {length} "
        f"({trained.steps} steps)"
    ]
    if job.defense.parts():
        lines.append(f"defense {job.defense}")
    if trained.epsilon is not None:
        lines.append(
            f"epsilon {trained.epsilon:.4g} at delta {trained.delta:.2g}, by Opacus' accountant, "
            "as for Poisson-sampled batches"
        )
    lines.append(f"weights {trained.checkpoint}")
    if trained.history:
        lines.append(f"metrics {trained.out / 'metrics.csv'}")
    say(result, as_json, lines)
