"""gradveil federate: many clients, a server that spies, and what their updates give away."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli import completion, options
from gradveil.cli.options import examples, say, table
from gradveil.core.errors import GradveilError
from gradveil.core.stopping import end, signaled

if TYPE_CHECKING:
    from gradveil.federated import FederationJob, FederationResult

CONTROLS = ("blind", "sham")  # of each kind that with most images of rank 1
EXAMPLES = examples(
    "gradveil federate --data fashion-mnist-mini --model lenet --clients 10 --rounds 20 --lr 0.05 "
    "--out runs/federated",
    "gradveil federate --data fashion-mnist --model lenet --rounds 10 --batch-size 1 "
    "--defense prune:0.95 --attack auto --spy-rounds 1,5,10 --out runs/spied",
    "gradveil federate --data cifar100 --model convnet --split dirichlet:0.3 --local-epochs 3 "
    "--batch-size 32 --fraction 0.5 --out runs/fedavg",
    "gradveil federate --data fashion-mnist-mini --model lenet --graph ring --spy 3 "
    "--spy-rounds 1 --attack dlg --out runs/ring",
)


def federate_command(
    data: options.Data,
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", help="The folder of the run.")],
    clients: Annotated[int, typer.Option(help="Participants.")] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 10,
    defense: Annotated[
        str | None,
        typer.Option(
            "--defense",
            autocompletion=completion.defenses,
            help="A defense of `gradveil defenses list`, such as prune:0.95, in every client; "
            "several joined by ,then,.",
        ),
    ] = None,
    policy: options.OtherSpelling = None,
    checkpoint: options.Start = None,
    split: Annotated[
        str,
        typer.Option(help="How images are shared out: equal, dirichlet:0.3, or classes:2."),
    ] = "equal",
    batch_size: Annotated[
        int, typer.Option(help="Images of a client's gradient, or of its local steps.")
    ] = 8,
    local_epochs: Annotated[
        int | None, typer.Option(help="Train each client over its images (FedAvg).")
    ] = None,
    local_steps: Annotated[int | None, typer.Option(help="The same, by a number of steps.")] = None,
    lr: Annotated[
        float,
        typer.Option(
            "--lr", help="Learning rate; divided by ten at 3/8, 5/8 and 7/8 of the rounds."
        ),
    ] = 0.1,
    momentum: Annotated[
        float, typer.Option(help="Momentum: Nesterov's of the server, plain in local training.")
    ] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 5e-4,
    fraction: Annotated[float, typer.Option(help="Share of the clients in a round.")] = 1.0,
    train_mode: Annotated[
        bool,
        typer.Option(help="Batch norm uses the batch's own statistics, dropout is on."),
    ] = True,
    graph: Annotated[
        str | None,
        typer.Option(help="No server: who exchanges gradients, ring, full, or 0-1,1-2,2-0."),
    ] = None,
    spy: Annotated[
        int | None, typer.Option(help="The participant that spies in a graph; 0 without.")
    ] = None,
    spy_rounds: Annotated[
        str, typer.Option(help="Rounds whose updates are kept and attacked, such as 1,5,10.")
    ] = "",
    average_of: Annotated[
        int | None,
        typer.Option(
            help="The spy has averages of so many clients alone, as behind secure aggregation."
        ),
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            "--attack",
            autocompletion=completion.attacks,
            help="auto, or an attack of `gradveil audit`; may be repeated.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Iterations of every attack.")] = None,
    audited: Annotated[int, typer.Option(help="Images attacked in a round, at most.")] = 32,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    normalize: options.Normalization = None,
    data_root: options.DataRoot = None,
    as_json: options.Json = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Train with many clients on Flower's simulation engine, and attack what they send.

    Run the same command again after a stop: it goes on after the last whole round, with the same
    result.
    """
    from gradveil.audits import name_attacks
    from gradveil.federated import FederationJob, federate
    from gradveil.federated.partition import parse_graph, parse_partition

    if spy is not None and graph is None:
        raise GradveilError(
            f"spy {spy}: without --graph it is the server that spies; leave it out, or give a graph"
        )
    auto, attacks = name_attacks(attack or [])
    job = FederationJob(
        data,
        options.normalized_model(model, normalize),
        clients,
        rounds,
        options.find_defense(defense, policy),
        parse_partition(split),
        batch_size,
        local_epochs,
        local_steps,
        lr,
        momentum,
        weight_decay,
        fraction,
        train_mode,
        None if graph is None else parse_graph(graph, clients),
        spy or 0,
        options.read_counts(spy_rounds, "spy-rounds", "1,5,10"),
        average_of,
        attacks,
        auto,
        steps,
        audited,
        image_size,
        channels,
        seed=seed,
        start=checkpoint,
    )
    try:
        found = federate(job, out, root=data_root, device=device)
    except KeyboardInterrupt:
        if signaled():
            end()  # threads of Flower's engine would wait for its workers, which have ended
        raise
    _show(job, found, f"{model} on {data}", as_json)


def _show(job: "FederationJob", found: "FederationResult", subject: str, as_json: bool) -> None:
    """Print the accuracy, and what the audits of spied rounds say; write their page."""
    from gradveil.report.audit import lineup_head
    from gradveil.report.write import write_report

    attacked = sorted(job.spy_rounds) if job.auto or job.attacks else []
    rows = [_row(number, found) for number in attacked]
    result: dict[str, Any] = {
        "accuracy": found.accuracy,
        "rounds": job.rounds,
        "clients": job.clients,
        "defense": str(job.defense),
        "out": found.out,
        "checkpoint": found.checkpoint,
        "history": found.history,
        "audits": rows,
    }
    lines = [
        f"{subject}: test accuracy {found.accuracy:.2%} after {job.rounds} "
        f"round{'s' * (job.rounds > 1)} of {job.clients} clients"
    ]
    if job.defense.parts():
        lines.append(f"defense {job.defense}")
    lines.append(f"weights {found.checkpoint}")
    shown: list[Any] = [lines]
    if rows:
        cases = [audit.cases[0] for audit in found.audits.values()]
        columns = ("round", "strongest attack", lineup_head(cases), *CONTROLS, "PSNR dB", "")
        shown.append(table("What the updates give away", columns, [_cells(row) for row in rows]))
        shown.append(["", *_notes(rows)])
    if found.audits:
        result["page"] = write_report(found.out).page
        shown.append([f"page    {result['page']}"])
    say(result, as_json, *shown)


def _row(number: int, found: "FederationResult") -> dict[str, Any]:
    """Return what an audit of a round says, or why there is none."""
    if number not in found.audits:
        return {"round": number, "not_attacked": found.not_attacked[number]}
    (case,) = found.audits[number].cases
    strongest = case.strongest
    beside = [row for row in case.rows if row.truth == strongest.truth]
    controls = {
        kind: max(
            (row for row in beside if row.kind == kind),
            key=lambda row: row.identified,
            default=None,
        )
        for kind in CONTROLS
    }
    return {
        "round": number,
        **strongest.plain(),
        "note": found.notes.get(number, ""),
        "folder": case.out,
        "lineup": strongest.lineup,
        **{kind: "-" if row is None else row.lineup for kind, row in controls.items()},
    }


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    if "not_attacked" in row:
        return row["round"], "not attacked", *[""] * (len(CONTROLS) + 3)
    controls = [row[kind] for kind in CONTROLS]
    psnr = f"{row['psnr']['mean']:.1f}"
    return row["round"], row["attack"], row["lineup"], *controls, psnr, "; ".join(row["flags"])


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    """Say how the rounds' updates were taken, or why they were not attacked."""
    said: dict[str, list[str]] = {}
    for row in rows:
        number = str(row["round"])
        why = row.get("not_attacked", row.get("note", "")).removeprefix(f"round {number}: ")
        said.setdefault(why, []).append(number)
    return [
        f"Round{'s' * (len(rounds) > 1)} {', '.join(rounds)}: {why}."
        for why, rounds in said.items()
        if why
    ]
