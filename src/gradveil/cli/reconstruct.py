"""gradveil reconstruct: a client's images from its weights before and after training."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.cli import completion, options
from gradveil.cli.options import examples, say
from gradveil.core.errors import GradveilError

EXAMPLES = examples(
    "gradveil reconstruct --before r7.safetensors --after c3.safetensors --data cifar100 "
    "--model lenet --local-lr 0.01 --out found",
    "gradveil reconstruct --before a.pt --after b.npz --data folder:photos --model my.nets:make "
    "--local-steps 5 --size 4 --out found",
    "gradveil reconstruct --spy spy --round 1 --data folder:photos --model my.nets:make "
    "--local-lr 0.01 --out found",
)


def reconstruct_command(
    data: Annotated[
        str,
        typer.Option(
            "--data",
            autocompletion=completion.data_sets,
            help="The data set whose image shape, classes and normalization the model has.",
        ),
    ],
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", help="The folder for the pictures.")],
    before: Annotated[
        Path | None,
        typer.Option(
            "--before", help="Weights that the client got: .safetensors, .npz, .pt, .pth or .ckpt."
        ),
    ] = None,
    after: Annotated[
        Path | None, typer.Option("--after", help="Weights that it sent back.")
    ] = None,
    spy: Annotated[
        Path | None,
        typer.Option(
            "--spy",
            help="Instead of two files: the folder of gradveil.federated.Spy, with --round.",
        ),
    ] = None,
    number: Annotated[int | None, typer.Option("--round", help="The spied round.")] = None,
    client: Annotated[
        list[str] | None,
        typer.Option("--client", help="A client of that round; may be repeated. Default: all."),
    ] = None,
    attack: Annotated[
        str,
        typer.Option(
            "--attack",
            autocompletion=completion.attacks,
            help="Such as dlg or adam-cosine, or package.module:NAME.",
        ),
    ] = "dlg",
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Images that the client trained on. Default: 1, or what a spied client said.",
        ),
    ] = None,
    local_steps: options.LocalSteps = 1,
    local_lr: options.LocalRate = 0.01,
    local_epochs: options.LocalEpochs = 1,
    local_batch_size: options.LocalBatchSize = None,
    client_momentum: options.ClientMomentum = 0.0,
    client_weight_decay: options.ClientWeightDecay = 0.0,
    client_optimizer: options.ClientOptimizer = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Iterations of the attack. Default: as published.")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Pixels a side, where they differ from the data set's.")
    ] = None,
    channels: options.Channels = None,
    normalize: options.Normalization = None,
    data_root: options.DataRoot = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Reconstruct a client's images from two checkpoints, inferring the labels.

    With --spy and --round, those of each client in what a server of yours recorded. There is no
    truth to score by: look at the pictures.
    """
    from gradveil.core.files import write_text  # torch takes seconds to import
    from gradveil.core.locks import alone, refuse_held
    from gradveil.core.progress import Bar, Iterations
    from gradveil.data import load
    from gradveil.report.pictures import as_picture, save_picture
    from gradveil.updates import reconstruct

    client_momentum, client_weight_decay = options.client_optimizer(
        client_optimizer, client_momentum, client_weight_decay
    )
    refuse_held(out, "writing reconstructions into")
    split = load(data, "test", root=data_root, image_size=image_size, channels=channels)
    chosen = options.normalized_model(model, normalize)
    settings: dict[str, Any] = {
        "images": split,
        "attack": attack,
        "steps": steps,
        "local_steps": local_steps,
        "local_lr": local_lr,
        "local_epochs": local_epochs,
        "local_batch_size": local_batch_size,
        "client_momentum": client_momentum,
        "client_weight_decay": client_weight_decay,
        "seed": seed,
        "device": device,
    }
    bar = Bar(shown=True)
    settings["progress"] = Iterations(bar, "reconstructing", "--steps")
    try:
        if spy is not None and number is not None and before is None and after is None:
            from gradveil.federated import invert

            named = tuple(client) if client else None
            several = invert(spy, number, chosen, clients=named, size=size, **settings)
            found = {f"client-{each.client}": each.found for each in several}
        elif before is not None and after is not None and spy is None and number is None:
            found = {"": reconstruct(before, after, chosen, size=size or 1, **settings)}
        else:
            raise GradveilError(
                "reconstruct: give --before and --after, two files of weights, or --spy and --round"
            )
    finally:
        bar.stop()
    facts, lines = {}, []
    with alone(out, "writing reconstructions into"):
        for name, made in found.items():
            paths = [out / name / f"image-{each}.png" for each in range(len(made.images))]
            for path, image in zip(paths, made.images, strict=True):
                save_picture(path, as_picture((image * 255).round().byte()))
            labels = [] if made.labels is None else made.labels.tolist()
            classes = [split.classes[label] for label in labels]
            facts[name] = {
                "status": made.status,
                "distance": made.distance,
                "labels": classes,
                "pictures": [str(path) for path in paths],
                "seed": seed,
            }
            lines += [
                f"{name}{': ' if name else ''}{made.status}: gradient distance {made.distance:.3g}",
                f"labels inferred: {', '.join(classes)}",
                *map(str, paths),
            ]
        written = facts.get("", facts)
        write_text(out / "found.json", json.dumps(written, indent=2) + "\n")
    say(written, as_json, lines)
