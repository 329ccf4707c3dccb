"""gradveil tune: find the strongest settings of an attack on public images."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli import completion, options
from gradveil.cli.options import examples, say

EXAMPLES = examples(
    "gradveil tune --data fashion-mnist-mini --model lenet --images 8 --held-out 16 --trials 12 "
    "--work 200 --out runs/tuned",
    "gradveil tune --data cifar100 --data-root DIR --model resnet20-4 "
    "--checkpoint runs/r/model.safetensors --images 32 --trials 60 --budget 120 --out runs/tuned",
    "gradveil audit --data cifar100 --data-root DIR --model resnet20-4 "
    "--checkpoint runs/r/model.safetensors --attack adam-cosine --attack runs/tuned/attack.toml "
    "--images 64 --out runs/audit",
)


@options.with_local
def tune_command(
    *,
    data: options.Data,
    model: options.Model,
    images: Annotated[int, typer.Option(help="Public images that attacks are tried on.")],
    trials: Annotated[int, typer.Option(help="Attacks to try.")],
    out: Annotated[Path, typer.Option("--out", help="The tuning's folder.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="The clients' weights. Untrained without.")
    ] = None,
    defense: Annotated[
        str,
        typer.Option(
            autocompletion=completion.defenses, help="Of the clients, see `gradveil defenses list`."
        ),
    ] = "none",
    public: Annotated[
        str | None,
        typer.Option(
            help="Images of the same classes to tune on: a folder, or a data set, whose training "
            "split is meant. Default: that of --data."
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(help="What is tried: package.module:NAME, a gradveil.tuning.AttackSpace."),
    ] = None,
    held_out: Annotated[
        int, typer.Option(help="Further images that the best attack is tested on.")
    ] = 32,
    work: Annotated[
        int | None,
        typer.Option(
            help="Iterations of an image, over all restarts and heats, the same for every attack. "
            "Default: those of the published attack."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Minutes that the tuning may take: the work is made as small as needed."),
    ] = None,
    batch_size: options.BatchSize = 1,
    labels: options.Labels = "known",
    local: options.Local,
    storage: Annotated[
        str | None,
        typer.Option(help="An Optuna storage URL that tunings share. Default: a file in --out."),
    ] = None,
    study: options.Study = "gradveil",
    engine: Annotated[str, typer.Option(help="local, or ray: trials on a Ray cluster.")] = "local",
    ray_address: options.RayAddress = None,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    normalize: options.Normalization = None,
    data_root: options.DataRoot = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Tune gradient matching on public images, as a server could, and write attack.toml.

    Every command that takes an attack takes that file. Run the same command again after a stop: it
    goes on.
    """
    from gradveil.data import load
    from gradveil.defenses import parse
    from gradveil.tuning import TuningJob, run_tuning  # torch and scipy take seconds to import
    from gradveil.tuning.space import find_space

    more = {} if work is None else {"work": work}
    job = TuningJob(
        model=options.normalized_model(model, normalize),
        data=data,
        images=images,
        trials=trials,
        public=None
        if public is None
        else load(public, "train", root=data_root, image_size=image_size, channels=channels),
        checkpoint=checkpoint,
        defense=parse(defense),
        space=None if space is None else find_space(space),
        held_out=held_out,
        batch_size=batch_size,
        labels=labels,
        protocol=local.protocol,
        budget=budget,
        image_size=image_size,
        channels=channels,
        seed=seed,
        **more,
    )
    result = run_tuning(
        job,
        out,
        root=data_root,
        device=device,
        storage=storage,
        study=study,
        engine=engine,
        ray_address=ray_address,
    )
    files = {"attack": out / "attack.toml", "results": out / "tuning.json"}
    where = [*(f"{name} {path}" for name, path in files.items())]
    where.append(f"study   optuna-dashboard {result.storage}")
    plain = {"out": out, "files": files, "gain": result.file.gain} | result.plain()
    say(plain, as_json, [*result.words, "", *where])
