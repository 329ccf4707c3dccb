"""gradveil doctor: what an audit of this model and these images would meet, and whether attacks work on this machine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradveil.cli.options import DataRoot, Device, Json, Seed, examples, progress, say
from gradveil.core.errors import GradveilError
from gradveil.core.types import Protocol

if TYPE_CHECKING:
    from gradveil.attacks import Attack
    from gradveil.audits import AuditJob
    from gradveil.checks import Finding, Subject

VICTIMS = 8
SPARE = (
    1_000  # images, at most, that accuracy is measured on and reconstructions are identified among
)

EXAMPLES = examples(
    "gradveil doctor --data fashion-mnist-mini --model lenet --steps 30",
    "gradveil doctor --data cifar100 --model resnet20-4 --checkpoint runs/r/model.safetensors --defense prune:0.95 --labels inferred",
    "gradveil doctor --data folder:photos --model my_package.nets:make --batch-size 4 --train-mode --json",
)


def doctor_command(
    data: Annotated[
        str, typer.Option("--data", help="A data set of `gradveil data list`, or folder:PATH.")
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model", help="resnet20-4, convnet, lenet, mlp, vit, or package.module:factory."
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="The model's weights, as `gradveil train` saves them. Untrained without."
        ),
    ] = None,
    defense: Annotated[
        str,
        typer.Option("--defense", help="As `gradveil defenses list` shows, or a policies.toml."),
    ] = "none",
    batch_size: Annotated[
        int, typer.Option(help="Images of one victim, whose gradient is of their mean loss.")
    ] = 1,
    labels: Annotated[str, typer.Option(help="known, or inferred from the gradient.")] = "known",
    local_steps: Annotated[
        int, typer.Option(help="Steps of SGD that a client makes before it shares.")
    ] = 1,
    local_lr: Annotated[float, typer.Option(help="Learning rate of those steps.")] = 0.01,
    train_mode: Annotated[
        bool,
        typer.Option(
            "--train-mode", help="Batch norm uses the batch's own statistics, dropout is on."
        ),
    ] = False,
    attack: Annotated[
        str,
        typer.Option(
            "--attack",
            help="The attack that is tried on 4 images, beside blind guesses; auto: the standard one.",
        ),
    ] = "adam-cosine",
    steps: Annotated[
        int, typer.Option(min=0, help="Iterations of that attack; 0 leaves it out.")
    ] = 100,
    image_size: Annotated[
        int | None, typer.Option(help="Resize the images to this many pixels a side.")
    ] = None,
    data_root: DataRoot = None,
    as_json: Json = False,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Say what an audit of this would meet, what it means and what to do. Status 1 with an error among the findings, else 0."""
    from gradveil.attacks import GradientMatching
    from gradveil.audits import AuditJob
    from gradveil.checks import CHECKS, self_check
    from gradveil.checks.doctor import TRIAL, examine

    job = AuditJob(
        data,
        model,
        (attack,),
        VICTIMS * max(batch_size, 1),
        checkpoint=checkpoint,
        batch_size=batch_size,
        defense=defense,
        labels=labels,
        protocol=Protocol(local_steps, local_lr, train_mode),
        image_size=image_size,
        seed=seed,
    )
    if steps and isinstance(tried(job), GradientMatching):
        job = replace(job, steps=steps)
    with progress.status("reading the data and the model") as status:
        case = make_case(job, data_root, device, with_attack=steps > 0)
        made: dict[str, Finding | None] = {}
        for name, one in examine(case):
            made[name] = one
            status.update(f"{len(made)} of {len(CHECKS)} checks")
        status.update("self-check")
        found = [
            *(one for one in made.values() if one is not None),
            *automatic_note(job, ran=TRIAL in made),
            self_check(device),
        ]
    silent = [name for name, one in made.items() if one is None]
    errors = sum(one.level == "error" for one in found)
    skipped = [name for name in CHECKS if name not in made]
    result = {
        "findings": [one.plain() for one in found],
        "silent": silent,
        "skipped": skipped,
        "errors": errors,
    }
    say(result, as_json, in_words(found, silent, skipped))
    if errors:
        raise typer.Exit(1)


def make_case(job: "AuditJob", root: Path | None, device: str, *, with_attack: bool) -> "Subject":
    """The client and the first victims as an audit of this job would have them, and other images beside."""
    from gradveil.audits.weights import find_model
    from gradveil.checks import Subject
    from gradveil.checks.attack import ScaledCrossEntropy
    from gradveil.clients import Client
    from gradveil.core.types import Batch
    from gradveil.data import load
    from gradveil.engine.device import find_device
    from gradveil.engine.gradients import cross_entropy
    from gradveil.models.checkpoints import read_settings

    split = load(job.data, job.split, root=root, image_size=job.image_size)
    train = load(job.data, "train", root=root, image_size=job.image_size)
    if job.batch_size > len(split):
        raise GradveilError(
            f"batch size {job.batch_size}: {split.name} {split.split} has {len(split)} images"
        )
    whole = len(split) // job.batch_size * job.batch_size
    images, truth = (
        split.images[: min(job.images, whole)].float() / 255,
        split.labels[: min(job.images, whole)],
    )
    batches = [
        Batch(some, own)
        for some, own in zip(images.split(job.batch_size), truth.split(job.batch_size), strict=True)
    ]
    net, protected = find_model(job, split)
    # Clients share what they train with; the published code halves the loss there, and not in its attack.
    scale = float(read_settings(job.checkpoint).get("loss_scale", 1.0)) if job.checkpoint else 1.0
    client = Client(
        net.to(find_device(device)),
        classes=len(split.classes),
        loss=cross_entropy if scale == 1 else ScaledCrossEntropy(scale),
        protocol=job.protocol,
        defense=job.protection,
        protected=protected,
    )
    return Subject(
        client,
        batches,
        tried(job) if with_attack else None,
        "known" if job.labels == "known" else "inferred",
        attacker_loss=cross_entropy,
        public=Batch(train.images[:SPARE].float() / 255, train.labels[:SPARE]),
        test=Batch(split.images[:SPARE].float() / 255, split.labels[:SPARE]),
        trained=job.checkpoint is not None,
        seed=job.seed,
    )


def tried(job: "AuditJob") -> "Attack":
    """The attack named; of `auto` the standard one."""
    return next(iter(job.find_attacks().values()))


def automatic_note(job: "AuditJob", *, ran: bool) -> "list[Finding]":
    """What `auto` stands for in an audit, and whether any of it was run here."""
    from gradveil.audits.attackers import AUTO, automatic
    from gradveil.checks import Finding

    if AUTO not in job.attacks:
        return []
    *others, last = names = automatic(job.acting)
    means = f"of attack auto, {names[0] if ran else 'nothing'} was tried here"
    return [
        Finding(
            "note",
            "attack",
            means,
            f"an audit with it runs {', '.join(others)} and {last}, as far as they suit the model",
        )
    ]


def in_words(found: "Sequence[Finding]", silent: Sequence[str], skipped: Sequence[str]) -> str:
    """A line on what each finding means and one on what to do, the worst first; then what needs no word."""
    order = ("error", "warning", "note")
    *others, own = found
    lines = []
    for one in [*sorted(others, key=lambda one: order.index(one.level)), own]:
        lines += [f"{one.level:<8}{one.name}: {one.means}", f"{'':<8}{one.do}"]
    rest = [
        f"{word:<8}{len(names)} checks: {', '.join(names)}"
        for word, names in (("well", silent), ("skipped", skipped))
        if names
    ]
    return "\n".join([*lines[:-2], *rest, *lines[-2:]])
