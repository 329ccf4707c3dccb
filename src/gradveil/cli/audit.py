"""gradveil audit: what a model's shared gradients give away, measured by attacks and their controls, for one defence or a grid."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradveil.cli.options import DataRoot, Device, Json, Seed, examples
from gradveil.core.errors import GradveilError

if TYPE_CHECKING:
    from gradveil.audits import Threshold

EXAMPLES = examples(
    "gradveil audit --data fashion-mnist-mini --model lenet --attack dlg --images 8 --out runs/lenet",
    "gradveil audit --data cifar100 --data-root DIR --model resnet20-4 --checkpoint runs/r/model.safetensors "
    "--attack adam-cosine --images 100 --defense 3-1-7+43-18-18 --out runs/hybrid",
    "gradveil audit --data fashion-mnist-mini --model mlp --defense none --defense prune:0.95 --defense precode:k=256 --attack auto "
    "--images 16 --certify psnr=15 --out runs/grid",
    "gradveil audit --data cifar100 --data-root DIR --model resnet20-4 --run runs/r --at 0,1,end --attack auto --images 32 --out runs/t",
)


def audit_command(
    data: Annotated[
        str, typer.Option("--data", help="A data set of `gradveil data list`, or folder:PATH.")
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model", help="resnet20-4, convnet, lenet, mlp, vit, or package.module:factory."
        ),
    ],
    attack: Annotated[
        list[str],
        typer.Option(
            "--attack",
            help="Such as adam-cosine or dlg, or auto: the standard attack and the defense's breakers. Several times for several.",
        ),
    ],
    images: Annotated[int, typer.Option(help="How many images to attack.")],
    out: Annotated[Path, typer.Option("--out", help="The audit's folder.")],
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="The model's weights, as `gradveil train` saves them: PATH for all, or DEFENSE=PATH. Untrained without."
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Images of one victim, whose gradient is of their mean loss.")
    ] = 1,
    defense: Annotated[
        list[str] | None,
        typer.Option(
            "--defense",
            help="Of the clients, see `gradveil defenses list`: a policy, prune:0.95, ... Several times: a table of them.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", help="A defense that is a policy, or the policies.toml of a search."
        ),
    ] = "none",
    clean: Annotated[
        str,
        typer.Option(
            help="yes: the clean gradient is attacked, as published; defenses act on it in training only. both: side by side."
        ),
    ] = "no",
    run: Annotated[
        list[str] | None,
        typer.Option("--run", help="For --at: a training's folder, FOLDER or DEFENSE=FOLDER."),
    ] = None,
    at: Annotated[
        str, typer.Option(help="Audit the weights after these training steps, such as 0,1,10,end.")
    ] = "",
    certify: Annotated[
        str,
        typer.Option(
            help="psnr=15 or ssim=0.5: exact bound on the share of images reconstructed so well."
        ),
    ] = "",
    delta: Annotated[
        float | None, typer.Option(help="For --certify: decide whether that share is at most this.")
    ] = None,
    gamma: Annotated[
        float | None,
        typer.Option(help="For --certify: decide whether the loss of accuracy is below this."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Iterations of each attack. Default: as published.")
    ] = None,
    restarts: Annotated[
        int | None, typer.Option(help="Searches for each victim. Default: as published.")
    ] = None,
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
    split: Annotated[str, typer.Option(help="train or test.")] = "test",
    first: Annotated[int, typer.Option(help="The first image, counted from 0.")] = 0,
    victims_at_once: Annotated[
        int | None,
        typer.Option(help="Victims attacked together. Default: 16 on a CPU, 100 on a GPU."),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Resize the images to this many pixels a side.")
    ] = None,
    data_root: DataRoot = None,
    as_json: Json = False,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Attack the gradients of images, beside blind guesses and an easy model. Run the same command again after a stop: it goes on."""
    from gradveil.audits import AuditJob, GridJob  # scipy and matplotlib take a second to import
    from gradveil.audits.breakers import AUTO
    from gradveil.audits.cases import parse_paths, parse_steps
    from gradveil.cli.audits import run_grid, run_single
    from gradveil.core.types import Protocol
    from gradveil.transforms import Policy

    defenses = _defenses(defense, policy)
    threshold = _threshold(certify, delta, gamma)
    base = AuditJob(
        data,
        model,
        tuple(attack),
        images,
        batch_size=batch_size,
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
    paths = (
        parse_paths(checkpoint or (), defenses, "checkpoint"),
        parse_paths(run or (), defenses, "run"),
    )
    job = GridJob(base, defenses, *paths, parse_steps(at), clean)
    if len(cases := job.cases()) > 1 or AUTO in attack or at:
        run_grid(job, threshold, out, data_root, device, as_json)
        return
    (case,) = cases
    whose = {"policy": Policy.find(policy)} if policy != "none" else {"defense": case.defense}
    run_single(
        replace(base, **whose, clean=case.clean, checkpoint=case.checkpoint),
        threshold,
        out,
        data_root,
        device,
        as_json,
    )


def _defenses(defenses: list[str] | None, policy: str) -> tuple[str, ...]:
    if policy == "none":
        return tuple(defenses or ("none",))
    if defenses:
        raise GradveilError(
            f"--policy {policy} and --defense {defenses[0]}: give one of them; a policy is a defense too"
        )
    from gradveil.defenses import PolicyDefense
    from gradveil.transforms import Policy

    return (str(PolicyDefense(Policy.find(policy))),)


def _threshold(text: str, delta: float | None, gamma: float | None) -> "Threshold | None":
    from gradveil.audits import Threshold

    if text:
        return Threshold.parse(text, delta, gamma)
    for name, value in (("delta", delta), ("gamma", gamma)):
        if value is not None:
            raise GradveilError(
                f"--{name} {value:g} without --certify: give the threshold too, such as --certify psnr=15"
            )
    return None
