"""gradveil audit: what a model's shared gradients give away, measured by attacks and their controls."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.options import DataRoot, Device, Json, Seed, examples, say
from gradveil.core.types import Protocol
from gradveil.transforms import Policy

EXAMPLES = examples(
    "gradveil audit --data fashion-mnist-mini --model lenet --attack dlg --images 8 --out runs/lenet",
    "gradveil audit --data cifar100 --data-root DIR --model resnet20-4 --checkpoint runs/r/model.safetensors "
    "--attack adam-cosine --images 100 --policy 3-1-7+43-18-18 --out runs/hybrid",
    "gradveil audit --data folder:photos --model my_package.nets:make --attack adam-cosine --attack dlg --images 16 --out runs/mine",
)


def audit_command(
    data: Annotated[str, typer.Option("--data", help="A data set of `gradveil data list`, or folder:PATH.")],
    model: Annotated[str, typer.Option("--model", help="resnet20-4, convnet, lenet, mlp, vit, or package.module:factory.")],
    attack: Annotated[list[str], typer.Option("--attack", help="Such as adam-cosine, dlg or closed-form; may be given several times.")],
    images: Annotated[int, typer.Option(help="How many images to attack.")],
    out: Annotated[Path, typer.Option("--out", help="The audit's folder.")],
    checkpoint: Annotated[Path | None, typer.Option(help="The model's weights, as `gradveil train` saves them. Untrained without.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images of one victim, whose gradient is of their mean loss.")] = 1,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", "--defense", help="Policy of the clients, or the policies.toml of a search; random crop and flip come before it."
        ),
    ] = "none",
    steps: Annotated[int | None, typer.Option(help="Iterations of each attack. Default: as published.")] = None,
    restarts: Annotated[int | None, typer.Option(help="Searches for each victim. Default: as published.")] = None,
    labels: Annotated[str, typer.Option(help="known, or inferred from the gradient.")] = "known",
    local_steps: Annotated[int, typer.Option(help="Steps of SGD that a client makes before it shares.")] = 1,
    local_lr: Annotated[float, typer.Option(help="Learning rate of those steps.")] = 0.01,
    train_mode: Annotated[bool, typer.Option("--train-mode", help="Batch norm uses the batch's own statistics, dropout is on.")] = False,
    split: Annotated[str, typer.Option(help="train or test.")] = "test",
    first: Annotated[int, typer.Option(help="The first image, counted from 0.")] = 0,
    victims_at_once: Annotated[int | None, typer.Option(help="Victims attacked together. Default: 16 on a CPU, 100 on a GPU.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Resize the images to this many pixels a side.")] = None,
    data_root: DataRoot = None,
    as_json: Json = False,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Attack the gradients of images, beside blind guesses and an easy model. Run the same command again after a stop: it goes on."""
    from gradveil.audits import AuditJob, audit  # scipy and matplotlib take a second to import
    from gradveil.report.pictures import draw_audit
    from gradveil.report.tables import audit_tables, controls_in_words

    job = AuditJob(
        data,
        model,
        tuple(attack),
        images,
        checkpoint=checkpoint,
        batch_size=batch_size,
        policy=Policy.find(policy),
        steps=steps,
        restarts=restarts,
        labels=labels,
        protocol=Protocol(local_steps, local_lr, train_mode),
        split=split,
        first=first,
        victims_at_once=victims_at_once,
        image_size=image_size,
        seed=seed,
    )
    result = audit(job, out, root=data_root, device=device)
    pictures = draw_audit(result)
    words = controls_in_words(result)
    plain = {"out": out, "settings": result.settings, "rows": [row.plain() for row in result.rows], "notes": words, "pictures": pictures}
    files = "\n".join([f"records {out / 'records.jsonl'}", *(f"picture {path}" for path in pictures)])
    say(plain, as_json, *audit_tables(result), "\n".join(["", *words, "", files]))
