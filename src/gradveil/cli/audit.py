"""gradveil audit: attack what a model's clients share, under a defense or several."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli import completion, options
from gradveil.cli.options import examples, say
from gradveil.cli.report import read_certify
from gradveil.core.errors import GradveilError

if TYPE_CHECKING:
    from gradveil.audits import AuditJob, AuditResult, Threshold
    from gradveil.core.formats import ThresholdsFile
    from gradveil.core.types import Loss
    from gradveil.defenses import Defense

END = "end"

EXAMPLES = examples(
    "gradveil audit --data fashion-mnist-mini --model lenet --attack dlg --images 8 "
    "--out runs/lenet",
    "gradveil audit --data cifar100 --data-root DIR --model resnet20-4 "
    "--checkpoint runs/r/model.safetensors --attack adam-cosine --images 100 "
    "--defense 3-1-7+43-18-18 --out runs/hybrid",
    "gradveil audit --data fashion-mnist-mini --model mlp --defense none --defense prune:0.95 "
    "--defense precode:k=256 --attack auto --images 16 --certify psnr=15 --out runs/grid",
    "gradveil audit --data cifar100 --data-root DIR --model resnet20-4 --run runs/r --at 0,1,end "
    "--attack auto --images 32 --out runs/t",
    "gradveil audit --flower runs/federated --round 10 --data fashion-mnist-mini --model lenet "
    "--attack auto --images 8 --out runs/round",
    "gradveil audit --flower spy --round 1 --client-images images --data folder:photos "
    "--model my.nets:make --local-lr 0.01 --attack auto --images 8 --out runs/app",
)

OF_A_RUN = (
    *("batch_size", "local_steps", "local_lr", "local_epochs", "local_batch_size"),
    *("client_momentum", "client_weight_decay", "client_optimizer", "train_mode", "image_size"),
    *("channels", "seed", "client_images", "loss"),
)
"""Options that the settings of a run of `gradveil federate` answer."""

NOT_SPIED = ("checkpoint", "batch_size", "clean", "run", "at", "split", "first", "control")
"""Options that say which weights and images are audited: a spy's files do."""

SPIED = ("round", "client_images", "loss")
"""Options that are for --flower alone."""


@options.with_local
def audit_command(
    *,
    context: typer.Context,
    data: options.Data,
    model: options.Model,
    attack: Annotated[
        list[str],
        typer.Option(
            "--attack",
            autocompletion=completion.attacks,
            help="Such as adam-cosine or dlg, or auto: the standard attack and the defense's "
            "breakers. Several times for several.",
        ),
    ],
    images: Annotated[int, typer.Option(help="How many images to attack.")],
    out: Annotated[Path, typer.Option("--out", help="The audit's folder.")],
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{options.CHECKPOINT} PATH for all, or DEFENSE=PATH. Untrained without."
        ),
    ] = None,
    batch_size: options.BatchSize = 1,
    defense: Annotated[
        list[str] | None,
        typer.Option(
            "--defense",
            autocompletion=completion.defenses,
            help="The clients' defense, see `gradveil defenses list`: a policy, prune:0.95, ... "
            "Several times: a table of them.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", help="Another spelling of --defense; also the policies.toml of a search."
        ),
    ] = "none",
    clean: Annotated[
        str,
        typer.Option(
            help="yes: the clean gradient is attacked, as published; defenses act on it in "
            "training only. both: side by side."
        ),
    ] = "no",
    run: Annotated[
        list[str] | None,
        typer.Option("--run", help="For --at: a training's folder, FOLDER or DEFENSE=FOLDER."),
    ] = None,
    at: Annotated[
        str, typer.Option(help="Audit the weights after these training steps, such as 0,1,10,end.")
    ] = "",
    flower: Annotated[
        Path | None,
        typer.Option(
            help="Audit what a server recorded: the folder of `gradveil federate`, or that of "
            "gradveil.federated.Spy in an app of yours, with --client-images.",
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("--round", help="For --flower: the round. Default: the only one kept."),
    ] = None,
    client_images: Annotated[
        Path | None,
        typer.Option(
            help="For --flower: a folder with the images of each client, by the name of its file: "
            "folders CLIENT/CLASS/, or CLIENT.npz with images and labels; in the order of their "
            "names, as the client used them.",
        ),
    ] = None,
    loss: options.Loss = None,
    certify: Annotated[
        str | None,
        typer.Option(
            help="lineup, psnr=15 or ssim=0.5: exact bound on the share of images reconstructed "
            "so well; lineup: with rank 1."
        ),
    ] = None,
    delta: options.Delta = None,
    gamma: options.Gamma = None,
    steps: Annotated[
        int | None, typer.Option(help="Iterations of each attack. Default: as published.")
    ] = None,
    restarts: Annotated[
        int | None, typer.Option(help="Searches for each victim. Default: as published.")
    ] = None,
    labels: options.Labels = "known",
    local: options.Local,
    split: Annotated[str, typer.Option(help="train or test.")] = "test",
    first: Annotated[
        int | None,
        typer.Option(
            help="Attack consecutive images from this one on, counted from 0. Default: images "
            "drawn over all classes by the seed."
        ),
    ] = None,
    sham: Annotated[
        bool,
        typer.Option(
            "--sham/--no-sham",
            help="Also run the strongest attack on updates of other images, to see what it finds "
            "without the victim's.",
        ),
    ] = True,
    control: Annotated[
        bool,
        typer.Option(
            "--control/--no-control",
            help="Also audit what a policy comes with, crop and flip, alone, where no such case "
            "is named.",
        ),
    ] = True,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Minutes that the attacks may take: each makes as large a share of its "
            "iterations as fits."
        ),
    ] = None,
    victims_at_once: Annotated[
        int | None,
        typer.Option(help="Victims attacked together. Default: 16 on a CPU, 100 on a GPU."),
    ] = None,
    thresholds: options.Thresholds = None,
    with_pictures: options.WithPictures = False,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    normalize: options.Normalization = None,
    data_root: options.DataRoot = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Attack the gradients of images, beside blind guesses and an easy model.

    Run the same command again after a stop: it goes on. The page is index.html in the folder. With
    --flower the updates are those that clients sent.
    """
    from gradveil.audits import AuditJob, make_cases, name_attacks
    from gradveil.audits.job import controls_in_words, with_controls
    from gradveil.audits.run import run_audit  # scipy and matplotlib take a second to import
    from gradveil.core.progress import Bar
    from gradveil.report.verdict import read_thresholds

    limits = None if thresholds is None else read_thresholds(thresholds)
    defenses = _defenses(defense, policy)
    threshold = read_certify(certify, delta, gamma)
    auto, attacks = name_attacks(attack)
    given = [name for name in context.params if _was_given(context, name)]
    asked = AuditJob(
        options.normalized_model(model, normalize),
        data,
        attacks,
        auto,
        images=images,
        steps=steps,
        restarts=restarts,
        labels=labels,
        protocol=local.protocol,
        sham=sham,
        budget=budget,
        victims_at_once=victims_at_once,
        image_size=image_size,
        channels=channels,
        seed=seed,
    )
    if flower is not None:
        job = _spied_job(
            asked,
            flower,
            number,
            client_images,
            defenses,
            given,
            options.read_loss(loss),
            data_root,
        )
    else:
        _refuse(given, SPIED, "is for --flower")
        cases = make_cases(
            defenses,
            checkpoints=parse_paths(checkpoint or (), defenses, "checkpoint"),
            runs=parse_paths(run or (), defenses, "run"),
            at=parse_steps(at),
            clean=clean,
        )
        if control:
            cases = with_controls(cases)
            if said := controls_in_words(cases, "--no-control"):
                Bar(True).say(said)
        job = replace(asked, cases=cases, batch_size=batch_size, split=split, first=first)
    result = run_audit(job, out, root=data_root, device=device)
    if _show(result, threshold, limits, with_pictures, as_json) is False:
        raise typer.Exit(1)


def _was_given(context: typer.Context, name: str) -> bool:
    """Tell whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _refuse(given: Sequence[str], options: Sequence[str], why: str) -> None:
    """Refuse the first of these options that was given."""
    for name in given:
        shown = {"number": "round"}.get(name, name)
        if shown in options:
            raise GradveilError(f"--{shown.replace('_', '-')} {why}; leave it out")


def _spied_job(
    asked: "AuditJob",
    flower: Path,
    number: int | None,
    client_images: Path | None,
    defenses: "list[Defense]",
    given: Sequence[str],
    loss: "Loss | None",
    root: Path | None,
) -> "AuditJob":
    """Return the audit that was asked for, of a round that a spy kept."""
    from gradveil.data import load
    from gradveil.federated.job import SPY
    from gradveil.federated.recorded import make_audit
    from gradveil.federated.spied_audits import find_round, is_run, make_app_audit, read_run
    from gradveil.models import NormalizedName

    _refuse(given, NOT_SPIED, "does not go with --flower: the spy's files say it")
    if len(defenses) > 1:
        raise GradveilError(
            f"--flower and {len(defenses)} defenses: the updates are of one, give that alone"
        )
    (defense,) = defenses
    more: dict[str, Any] = {"attacks": asked.attacks, "auto": asked.auto}
    more |= {"steps": asked.steps, "audited": asked.images}
    assert isinstance(asked.data, str) and isinstance(asked.model, str | NormalizedName)
    if is_run(flower):
        _refuse(given, OF_A_RUN, f"is known of {flower}, a run of gradveil federate")
        run = read_run(flower, asked.data, asked.model, defense, **more)
        job = make_audit(run, find_round(flower / SPY, number), flower, run.splits(root))
    else:
        chosen = find_round(flower, number)
        if client_images is None:
            raise GradveilError(
                f"--flower {flower} is of an app of yours: a line-up needs --client-images; "
                f"without them use gradveil reconstruct --spy {flower} --round {chosen}"
            )
        size = asked.image_size
        train, test = (
            load(asked.data, name, root=root, image_size=size, channels=asked.channels)
            for name in ("train", "test")
        )
        job = make_app_audit(
            flower,
            chosen,
            client_images,
            (train, test),
            asked.model,
            defense,
            protocol=asked.protocol,
            loss=loss,
            resized=size is not None,
            seed=asked.seed,
            **more,
        )
    return replace(
        job,
        restarts=asked.restarts,
        labels=asked.labels,
        sham=asked.sham,
        budget=asked.budget,
        victims_at_once=asked.victims_at_once,
    )


def _show(
    result: "AuditResult",
    threshold: "Threshold | None",
    limits: "ThresholdsFile | None",
    with_pictures: bool,
    as_json: bool,
) -> bool | None:
    """Print the result: a table of its attacks for one case, of its defenses for several.

    Write its page, and return whether the limits hold; None without any.
    """
    from gradveil.report.audit import audit_in_words, audit_tables
    from gradveil.report.certificates import (
        certificate_table,
        certificates_in_words,
        certify_cases,
    )
    from gradveil.report.pictures import draw_case, draw_timeline
    from gradveil.report.verdict import verdict_words
    from gradveil.report.write import write_files

    first, out = result.cases[0], result.out
    pictures = [path for case in result.cases for path in draw_case(case)]
    shown = pictures if len(result.cases) == 1 else []
    if first.asked_step is not None:
        shown = [draw_timeline(result)]
        pictures += shown
    words, tables = audit_in_words(result), audit_tables(result)
    plain: dict[str, Any] = {"out": out, "settings": result.settings, "cases": result.plain()}
    if threshold is not None:
        found = {case.name: made for case, made in certify_cases(result, threshold)}
        words += certificates_in_words(found, first)
        tables.append(certificate_table(found))
        plain["certificates"] = {name: made.plain() for name, made in found.items()}
    written = write_files(
        {"": result}, out, limits, with_pictures=with_pictures, threshold=threshold
    )
    words += verdict_words(written.decision)
    plain |= {"notes": words, "pictures": pictures, "page": written.page}
    plain["passed"] = written.passed
    files = [f"records {case.out / 'records.jsonl'}" for case in result.cases]
    files += [f"page    {written.page}"]
    lines = ["", *words, "", *files, *(f"picture {path}" for path in shown)]
    say(plain, as_json, *tables, lines)
    return written.passed


def _defenses(defenses: list[str] | None, policy: str) -> "list[Defense]":
    if policy != "none" and defenses:
        raise GradveilError(
            f"--policy {policy} and --defense {defenses[0]}: give one of them; a policy is a "
            "defense too"
        )
    from gradveil.defenses import parse

    return [parse(text) for text in ([policy] if policy != "none" else defenses or ["none"])]


LONGEST_STEP = 18  # digits


def parse_steps(text: str) -> tuple[str, ...]:
    """Parse steps from text such as `0,1,10,end`, in order and without repeats."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for part in parts:
        if part != END and not (part.isdecimal() and part.isascii() and len(part) <= LONGEST_STEP):
            raise GradveilError(
                f"at {text!r}: {part!r} is no step; write whole numbers with commas and end, such "
                "as 0,1,10,end"
            )
    numbers = sorted({int(part) for part in parts if part != END})
    return (*map(str, numbers), *([END] if END in parts else []))


def parse_paths(
    values: Sequence[str], defenses: "Sequence[Defense]", option: str
) -> dict[str, Path]:
    """Return paths by the defense's text from DEFENSE=PATH, and under "" from a bare PATH."""
    found: dict[str, Path] = {}
    texts = [str(defense) for defense in defenses]
    for value in values:
        key, path = _split(value, texts, option)
        if key in found:
            raise GradveilError(
                f"--{option} was given twice for {key or 'all defenses'}: {found[key]} and {path}"
            )
        found[key] = path
    return found


def _split(value: str, defenses: Sequence[str], option: str) -> tuple[str, Path]:
    """Split DEFENSE=PATH; the defense's text may hold `=` too, so the split is tried at each."""
    from gradveil.defenses import parse

    for position in (number for number, letter in enumerate(value) if letter == "="):
        try:
            text = str(parse(value[:position]))
        except GradveilError:
            continue
        if text in defenses:
            return text, Path(value[position + 1 :])
        if not Path(value).exists():
            raise GradveilError(
                f"--{option} {value}: {text} is not among the defenses audited, "
                f"{', '.join(defenses)}"
            )
    return "", Path(value)
