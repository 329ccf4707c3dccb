"""gradveil reconstruct: a client's images from its weights before and after training."""

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli import completion, options
from gradveil.cli.options import examples, say
from gradveil.core.errors import GradveilError, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from gradveil.audits.fits import Tried
    from gradveil.core.types import Reconstruction
    from gradveil.data import Images
    from gradveil.federated.spied import Update

EXAMPLES = examples(
    "gradveil reconstruct --before r7.safetensors --after c3.safetensors --data cifar100 "
    "--model lenet --local-lr 0.01 --out found",
    "gradveil reconstruct --before a.pt --after b.npz --data folder:photos --model my.nets:make "
    "--local-steps 5 --batch-size 4 --out found",
    "gradveil reconstruct --spy spy --round 1 --data folder:photos --model my.nets:make "
    "--local-lr 0.01 --out found",
    "gradveil reconstruct --spy spy --round 1 --data folder:photos --model my.nets:make "
    "--loss my.nets:loss --train-mode --defense prune:0.95 --attack auto --truth images "
    "--out found",
)


@options.with_local
def reconstruct_command(
    *,
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
            help="Such as dlg or adam-cosine, package.module:NAME, or auto: the standard attack "
            "and the defense's breakers.",
        ),
    ] = "dlg",
    defense: Annotated[
        str,
        typer.Option(
            "--defense",
            autocompletion=completion.defenses,
            help="The client's defense as the attacker knows it, such as prune:0.95: some attacks "
            "need to know.",
        ),
    ] = "none",
    loss: options.Loss = None,
    size: Annotated[
        int | None,
        typer.Option(
            "--size",
            "--batch-size",
            min=1,
            max=10_000,
            help="Images that the client trained on. Default: 1, or what a spied client said.",
        ),
    ] = None,
    local: options.Local,
    truth: Annotated[
        Path | None,
        typer.Option(
            "--truth",
            help="The client's images, a folder of pictures or a .npz with `images`, to score by "
            "PSNR and SSIM; with --spy a folder with one of these for each client, by its name. "
            "There is no line-up without other images: `gradveil audit --flower` has it.",
        ),
    ] = None,
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

    With --spy and --round, those of each client in what a server of yours recorded. Without --truth
    there is nothing to score by: look at the pictures.
    """
    from gradveil.attacks import find  # torch takes seconds to import
    from gradveil.audits.attackers import AUTO
    from gradveil.audits.fits import Tried
    from gradveil.core.files import write_text
    from gradveil.core.locks import alone, refuse_held
    from gradveil.core.progress import Bar, Iterations
    from gradveil.data import load
    from gradveil.defenses import parse
    from gradveil.updates import reconstruct

    refuse_held(out, "writing reconstructions into")
    known, given_loss = parse(defense), options.read_loss(loss)
    split = load(data, "test", root=data_root, image_size=image_size, channels=channels)
    chosen = options.normalized_model(model, normalize)
    settings: dict[str, Any] = {
        "images": split,
        "defense": known,
        "attack": attack,
        "steps": steps,
        "seed": seed,
        "device": device,
        **local.protocol.settings(),
        **({} if given_loss is None else {"loss": given_loss}),
    }
    if attack != AUTO:
        find(attack, also=(AUTO,))
    updates = _updates(before, after, spy, number, client)
    targets = {name: size or _count(update) for name, update in updates.items()}
    true = {name: _truth(truth, name, split, image_size, targets) for name in targets}
    bar = Bar(shown=True)
    settings["progress"] = Iterations(bar, "reconstructing", "--steps")

    def run(name: str) -> Tried:
        """Attack one client, or what two files hold."""
        if (update := updates[name]) is None:
            assert before is not None and after is not None
            found = reconstruct(before, after, chosen, size=size or 1, **settings)
        else:
            from gradveil.federated.inversion import reconstruct_spied

            assert spy is not None
            found = reconstruct_spied(spy, update, chosen, size=size, **settings)
        return found if isinstance(found, Tried) else Tried({attack: found}, {}, {})

    try:
        tried = {name: run(name) for name in targets}
    finally:
        bar.stop()
    automatic = attack == AUTO
    facts: dict[str, Any] = {}
    lines: list[str] = []
    with alone(out, "writing reconstructions into"):
        for name, attempts in tried.items():
            key = f"client-{name}" if name else ""
            scored = _scored(attempts, true[name], f"client {name}" if name else str(truth))
            made = {}
            for called, (found, scores) in scored.items():
                folder = out / key / (called if automatic else "")
                made[called] = _write(found, scores, folder, split.classes, called, seed)
            lines += [f"client {name}"] if name else []
            lines += [line for fact in made.values() for line in _lines(fact, automatic)]
            facts[key] = _compared(made, attempts) if automatic else made[attack]
            lines += _comparison(facts[key]) if automatic else []
        written = facts.get("", facts)
        write_text(out / "found.json", json.dumps(written, indent=2) + "\n")
    say(written, as_json, lines)


def _updates(
    before: Path | None,
    after: Path | None,
    spy: Path | None,
    number: int | None,
    client: list[str] | None,
) -> "dict[str, Update | None]":
    """Return what to attack by the client's name; for two files the name is empty."""
    if spy is not None and number is not None and before is None and after is None:
        from gradveil.federated.spied import read_round

        found = {update.client: update for update in read_round(spy, number)}
        for name in client or ():
            if name not in found:
                raise unknown(f"client of round {number}", name, found)
        return {name: found[name] for name in client or found}
    if before is not None and after is not None and spy is None and number is None:
        return {"": None}
    raise GradveilError(
        "reconstruct: give --before and --after, two files of weights, or --spy and --round"
    )


def _count(update: "Update | None") -> int:
    """Count the images behind an update: 0 where a client did not say it, 1 for two files."""
    return 1 if update is None else round(update.examples * max(1, len(update.members)))


def _truth(
    truth: Path | None,
    client: str,
    split: "Images",
    image_size: int | None,
    targets: dict[str, int],
) -> "Tensor | None":
    """Return the images of a client, (N, C, H, W) in [0, 1]; None where none are given."""
    from gradveil.data.client_files import find_client, read_client

    if truth is None:
        return None
    path = truth if not client else find_client(truth, client)
    if path is None and len(targets) == 1:
        path = truth
    if path is None:
        raise GradveilError(
            f"--truth {truth} has no images of client {client}: a folder or a .npz for each "
            f"client, such as {client}; --client chooses some"
        )
    images, _ = read_client(path, split, resized=image_size is not None, labeled=False)
    if targets[client] and len(images) != targets[client]:
        raise GradveilError(
            f"{path} has {len(images)} image(s), and the update is of {targets[client]}: give all "
            "of them, or --size"
        )
    return images.float() / 255


def _scored(
    tried: "Tried", truth: "Tensor | None", name: str
) -> "dict[str, tuple[Reconstruction, dict[str, list[float]]]]":
    """Return what each attack found in the order of the true images, with scores where these are.

    `name` is what an error calls the true images.
    """
    from gradveil.updates import score

    if truth is None:
        return {attack: (found, {}) for attack, found in tried.found.items()}
    return {attack: score(found, truth, name) for attack, found in tried.found.items()}


def _write(
    found: "Reconstruction",
    scores: dict[str, list[float]],
    folder: Path,
    names: tuple[str, ...],
    attack: str,
    seed: int,
) -> dict[str, Any]:
    """Write the pictures of a reconstruction, and return what is said of it."""
    from gradveil.report.pictures import as_picture, save_picture

    paths = [folder / f"image-{number}.png" for number in range(len(found.images))]
    for path, image in zip(paths, found.images, strict=True):
        save_picture(path, as_picture((image * 255).round().byte()))
    labels = [] if found.labels is None else found.labels.tolist()
    return {
        "attack": attack,
        "status": found.status,
        "distance": found.distance if isfinite(found.distance) else None,
        "labels": [names[label] if label >= 0 else "unknown" for label in labels],
        "pictures": [str(path) for path in paths],
        "seed": seed,
        **({"scores": scores} if scores else {}),
    }


def _lines(fact: dict[str, Any], named: bool) -> list[str]:
    start = f"{fact['attack']}: " if named else ""
    ended = "the search has ended" if fact["status"] == "ok" else fact["status"]
    distance = "none" if fact["distance"] is None else f"{fact['distance']:.3g}"
    lines = [
        f"{start}{ended}: gradient distance {distance}, of the updates, not of the images",
        f"labels inferred: {', '.join(fact['labels'])}",
    ]
    if "scores" in fact:
        pairs = list(zip(fact["scores"]["psnr"], fact["scores"]["ssim"], strict=True))
        lines += [
            f"{path}: PSNR {psnr:.1f} dB, SSIM {ssim:.2f}"
            for path, (psnr, ssim) in zip(fact["pictures"], pairs, strict=True)
        ]
        return lines
    return [*lines, *fact["pictures"]]


def _compared(made: dict[str, dict[str, Any]], tried: "Tried") -> dict[str, Any]:
    """Return the facts of several attacks, and which came nearest of those that measure alike."""
    found = [
        {"measured_by": kind, "attack": best, "among": list(names)}
        for kind, (best, names) in tried.nearest.items()
    ]
    return {"attacks": made, "left_out": dict(tried.left_out), "nearest": found}


def _comparison(facts: dict[str, Any]) -> list[str]:
    from gradveil.audits.attackers import without_name

    lines = [
        f"nearest by {each['measured_by']}: {each['attack']}, of {', '.join(each['among'])}"
        for each in facts["nearest"]
    ]
    if facts["nearest"]:
        lines.append("distances by other measures cannot be compared")
    return lines + [
        f"left out: {name}: {without_name(name, why)}" for name, why in facts["left_out"].items()
    ]
