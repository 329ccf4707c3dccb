"""gradveil doctor: what an audit of a model and images would meet, said before it starts."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from gradveil.cli import completion, options
from gradveil.cli.options import examples, progress, say
from gradveil.core.errors import GradveilError, unknown

if TYPE_CHECKING:
    from gradveil.checks import Diagnosis, Finding

EXAMPLES = examples(
    "gradveil doctor --data fashion-mnist-mini --model lenet --steps 30",
    "gradveil doctor --data cifar100 --model resnet20-4 --checkpoint runs/r/model.safetensors "
    "--defense prune:0.95 --labels inferred",
    "gradveil doctor --data folder:photos --model my_package.nets:make --batch-size 4 "
    "--train-mode --json",
    "gradveil doctor --flower my_app",
    "gradveil doctor --flower running",
)


@options.with_local
def doctor_command(
    *,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            autocompletion=completion.data_sets,
            help="A data set of `gradveil data list`, or folder:PATH.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            autocompletion=completion.models,
            help="As `gradveil audit --model` takes it.",
        ),
    ] = None,
    flower: Annotated[
        str | None,
        typer.Option(
            "--flower",
            help="Instead of data and model: a Flower app's folder, which is read and never run; "
            "or `running`: the SuperLinks and SuperNodes that run on this machine.",
        ),
    ] = None,
    checkpoint: options.Weights = None,
    defense: Annotated[
        str,
        typer.Option(
            "--defense",
            autocompletion=completion.defenses,
            help="As `gradveil defenses list` shows, or a policies.toml.",
        ),
    ] = "none",
    batch_size: options.BatchSize = 1,
    labels: options.Labels = "known",
    local: options.Local,
    attack: Annotated[
        str,
        typer.Option(
            "--attack",
            autocompletion=completion.attacks,
            help="Tried on 4 images, beside blind guesses: a name, package.module:NAME, or auto, "
            "the standard attack.",
        ),
    ] = "adam-cosine",
    steps: Annotated[
        int, typer.Option(min=0, help="Iterations of that attack; 0 leaves it out.")
    ] = 100,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    normalize: options.Normalization = None,
    data_root: options.DataRoot = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Say what an audit of this would meet, what it means and what to do.

    The status is 1 with an error among the findings, else 0.
    """
    if flower is not None:
        from gradveil.checks.flower import RUNNING, check_app, check_running

        if data is not None or model is not None:
            raise GradveilError("doctor --flower: it takes no --data and no --model")
        _tell(check_running() if flower == RUNNING else check_app(flower), as_json)
        return
    if data is None and model is None:
        raise GradveilError("Missing options '--data' and '--model', or '--flower'.")
    if data is None or model is None:
        raise GradveilError(f"Missing option '--{'data' if data is None else 'model'}'.")
    from gradveil.attacks import find  # torch takes seconds to import
    from gradveil.audits.attackers import AUTO, automatic
    from gradveil.audits.job import LABELS
    from gradveil.checks.doctor import TRIAL, doctor
    from gradveil.defenses import parse

    if labels not in LABELS:
        raise unknown("labels", labels, LABELS)
    protection = parse(defense)
    names = automatic(protection) if attack == AUTO else (attack,)
    with progress.status("reading the data and the model") as status:
        found = doctor(
            options.normalized_model(model, normalize),
            data,
            defense=protection,
            attack=find(names[0], also=(AUTO,)),
            steps=steps,
            checkpoint=checkpoint,
            batch_size=batch_size,
            know_labels=labels == "known",
            **local.protocol.settings(),
            image_size=image_size,
            channels=channels,
            seed=seed,
            data_root=data_root,
            device=device,
            watch=lambda name: status.update(f"checking: {name}"),
        )
    if attack == AUTO:
        note = automatic_note(names, ran=TRIAL not in found.skipped)
        found = replace(found, findings=(*found.findings, note))
    _tell(found, as_json)


def _tell(found: "Diagnosis", as_json: bool) -> None:
    say(found.plain(), as_json, str(found))
    if found.errors:
        raise typer.Exit(1)


def automatic_note(names: tuple[str, ...], *, ran: bool) -> "Finding":
    """Say what `auto` stands for in an audit, and whether any of it was tried here."""
    from gradveil.checks import Finding

    *others, last = names
    means = f"of attack auto, {names[0] if ran else 'nothing'} was tried here"
    do = f"an audit with it runs {', '.join(others)} and {last}, as far as they suit the model"
    return Finding("note", "attack", means, do)
