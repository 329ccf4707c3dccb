"""gradveil search: find policies that leak little and cost little accuracy, confirm by audits."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.cli import completion, options
from gradveil.cli.options import examples, say

EXAMPLES = examples(
    "gradveil search --data fashion-mnist-mini --model lenet "
    "--checkpoint runs/lenet/model.safetensors --attack dlg --trials 12 --keep 3 --images 6 "
    "--probe-steps 3 --audit-images 8 --audit-steps 12 --out runs/search",
    "gradveil search --data cifar100 --data-root DIR --model resnet20-4 --race --out runs/cifar100",
    "gradveil search --data cifar100 --model resnet20-4 --as-published --out runs/published",
    "gradveil search --data cifar100 --model resnet20-4 --checkpoint c.safetensors "
    "--storage postgresql://me@host/db --out runs/shared",
    "gradveil audit --data cifar100 --model resnet20-4 --attack adam-cosine --images 100 "
    "--defense runs/search/policies.toml --out runs/a",
)
RACE = (
    "Drop policies that are clearly worse after a few images. None of 50 simulated races erred at "
    "the default confidence of 0.999 (so at most 6% do, 95% confidence, with normal values), and "
    "they saved 57% of the work; at 0.99 at least 18 of 20 kept the same ten policies "
    "(tests/search/test_race.py). Recorded: by the probe on 20 images of Fashion-MNIST 29 of 1,500 "
    "policies were dropped, 1.2% of the work; by S_pri on 100 of CIFAR-100 1,267, 64%."
)


def search_command(
    data: options.Data,
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", help="The search's folder.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Semi-trained weights: .safetensors, .pt, .pth, .ckpt or .npz. Trained without: "
            "10% of the data, 50 epochs."
        ),
    ] = None,
    trials: Annotated[
        int,
        typer.Option(
            help="Policies to draw; as many again, at most three times, while too few qualify."
        ),
    ] = 1500,
    keep: Annotated[int, typer.Option(help="Policies to keep.")] = 10,
    threshold: Annotated[float, typer.Option(help="Least accuracy score that qualifies.")] = -85.0,
    score: Annotated[
        str | None,
        typer.Option(
            help="What leakage is ranked by: probe, a short real attack, or privacy, the paper's "
            "S_pri. Default: probe."
        ),
    ] = None,
    rule: Annotated[
        str,
        typer.Option(
            help="S_pri as the published code computes it, or as the paper writes it: code, paper."
        ),
    ] = "code",
    rank_by: Annotated[
        str,
        typer.Option(help="Quantity of the probe: ssim, over_blind or lineup; low leaks less."),
    ] = "ssim",
    sampler: Annotated[
        str,
        typer.Option(
            help="random, tpe, or nsga2, which gives the front of leakage against accuracy."
        ),
    ] = "random",
    race: Annotated[
        bool,
        typer.Option("--race", help=RACE),
    ] = False,
    race_confidence: Annotated[float, typer.Option(help="How sure the race must be.")] = 0.999,
    images: Annotated[
        int | None,
        typer.Option(
            help="Images that leakage is scored on. Default: 64 for probe, 100 for privacy."
        ),
    ] = None,
    attack: Annotated[
        str,
        typer.Option(
            autocompletion=completion.attacks,
            help="Attack of the probe and of the confirming audits.",
        ),
    ] = "adam-cosine",
    probe_steps: Annotated[int, typer.Option(help="Iterations of the probe.")] = 400,
    hybrid: Annotated[int, typer.Option(help="Members of the hybrid, at most.")] = 2,
    at_once: Annotated[
        int | None,
        typer.Option(help="Trials scored together. Default: as suits sampler, race and machine."),
    ] = None,
    audit_images: Annotated[
        int,
        typer.Option(
            help="Images of the confirming audits: of the test split, drawn over the classes by "
            "the seed, none that a score has used."
        ),
    ] = 32,
    audit_steps: Annotated[
        int | None, typer.Option(help="Iterations of the confirming audits. Default: as published.")
    ] = None,
    augment: options.Augment = True,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    normalize: options.Normalization = None,
    as_published: Annotated[
        bool,
        typer.Option(
            "--as-published", help="The paper's search: S_pri by its code, random, no race."
        ),
    ] = False,
    storage: Annotated[
        str | None,
        typer.Option(help="An Optuna storage URL that searches share. Default: a file in --out."),
    ] = None,
    study: options.Study = "gradveil",
    engine: Annotated[
        str, typer.Option(help="local, or ray: scores and audits on a Ray cluster.")
    ] = "local",
    ray_address: options.RayAddress = None,
    with_pictures: options.WithPictures = False,
    data_root: options.DataRoot = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Search for transformation policies and confirm them by audits.

    Run the same command again after a stop: it goes on.
    """
    from gradveil.attacks import find
    from gradveil.audits.job import short_name
    from gradveil.report.search import search_in_words, search_tables
    from gradveil.report.write import write_report
    from gradveil.search import SearchJob, run_search  # torch and scipy take seconds to import

    settings: dict[str, Any] = {
        "data": data,
        "model": options.normalized_model(model, normalize),
        "checkpoint": checkpoint,
        "trials": trials,
        "keep": keep,
        "threshold": threshold,
        "rule": rule,
        "rank_by": rank_by,
        "sampler": sampler,
        "race": race,
        "race_confidence": race_confidence,
        "images": images,
        "attack": find(attack),
        "attack_name": short_name(attack),
        "probe_steps": probe_steps,
        "hybrid": hybrid,
        "at_once": at_once,
        "audit_images": audit_images,
        "audit_steps": audit_steps,
        "augment": augment,
        "image_size": image_size,
        "channels": channels,
        "seed": seed,
    } | ({} if score is None else {"score": score})
    job = SearchJob.as_published(**settings) if as_published else SearchJob(**settings)
    result = run_search(
        job,
        out,
        root=data_root,
        device=device,
        storage=storage,
        study=study,
        engine=engine,
        ray_address=ray_address,
        progress=True,
    )
    names = {"policies": "policies.toml", "trials": "trials.csv", "results": "search.json"}
    files = {name: out / file for name, file in names.items()}
    files["page"] = write_report(out, with_pictures=with_pictures).page
    plain = {"out": out, "files": files} | result.plain()
    where = [
        *(f"{name} {path}" for name, path in files.items()),
        f"study   optuna-dashboard {result.storage}",
    ]
    say(
        plain,
        as_json,
        *search_tables(result),
        ["", *search_in_words(result), "", *where],
    )
