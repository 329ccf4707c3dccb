"""gradveil reconstruct: a client's images from its weights before and after training."""

import json
from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli import options
from gradveil.cli.options import examples, say

EXAMPLES = examples(
    "gradveil reconstruct --before r7.safetensors --after c3.safetensors --data cifar100 "
    "--model lenet --local-lr 0.01 --out found",
    "gradveil reconstruct --before a.pt --after b.npz --data folder:photos --model my.nets:make "
    "--local-steps 5 --size 4 --out found",
)


def reconstruct_command(
    before: Annotated[
        Path,
        typer.Option(
            "--before", help="Weights that the client got: .safetensors, .npz, .pt, .pth or .ckpt."
        ),
    ],
    after: Annotated[Path, typer.Option("--after", help="Weights that it sent back.")],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="The data set whose image shape, classes and normalization the model has.",
        ),
    ],
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", help="The folder for the pictures.")],
    attack: Annotated[
        str, typer.Option("--attack", help="Such as dlg or adam-cosine, or package.module:NAME.")
    ] = "dlg",
    size: Annotated[
        int, typer.Option(min=1, max=10_000, help="Images that the client trained on.")
    ] = 1,
    local_steps: options.LocalSteps = 1,
    local_lr: options.LocalRate = 0.01,
    local_epochs: options.LocalEpochs = 1,
    local_batch_size: options.LocalBatchSize = None,
    client_momentum: options.ClientMomentum = 0.0,
    client_weight_decay: options.ClientWeightDecay = 0.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Iterations of the attack. Default: as published.")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Pixels a side, where they differ from the data set's.")
    ] = None,
    data_root: options.DataRoot = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Reconstruct a client's images from two checkpoints, inferring the labels.

    There is no truth to score by: look at the pictures.
    """
    from gradveil.core.files import write_text  # torch takes seconds to import
    from gradveil.core.locks import alone, refuse_held
    from gradveil.data import load
    from gradveil.report.pictures import as_picture, save_picture
    from gradveil.updates import reconstruct

    refuse_held(out, "writing reconstructions into")
    split = load(data, "test", root=data_root, image_size=image_size)
    found = reconstruct(
        before,
        after,
        model,
        images=split,
        size=size,
        attack=attack,
        steps=steps,
        local_steps=local_steps,
        local_lr=local_lr,
        local_epochs=local_epochs,
        local_batch_size=local_batch_size,
        client_momentum=client_momentum,
        client_weight_decay=client_weight_decay,
        seed=seed,
        device=device,
    )
    paths = [out / f"image-{number}.png" for number in range(size)]
    labels = (
        [] if found.labels is None else [split.classes[label] for label in found.labels.tolist()]
    )
    facts = {
        "status": found.status,
        "distance": found.distance,
        "labels": labels,
        "pictures": [str(path) for path in paths],
        "seed": seed,
    }
    with alone(out, "writing reconstructions into"):
        for path, image in zip(paths, found.images, strict=True):
            save_picture(path, as_picture((image * 255).round().byte()))
        write_text(out / "found.json", json.dumps(facts, indent=2) + "\n")
    lines = [
        f"{found.status}: gradient distance {found.distance:.3g}",
        f"labels inferred: {', '.join(labels)}",
        *map(str, paths),
    ]
    say(facts, as_json, lines)
