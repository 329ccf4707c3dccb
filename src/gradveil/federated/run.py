"""A federated training: rounds on Flower's simulation engine, then the audits of what was spied."""

import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
from msgspec import to_builtins
from safetensors.torch import save
from torch import Tensor, nn

from gradveil.audits import AuditResult
from gradveil.audits.victims import refuse_tuned_on
from gradveil.core import job_folder
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.files import WriteError, shown, write_bytes
from gradveil.core.formats import FederatedRound
from gradveil.core.importing import RAISED
from gradveil.core.job_folder import SETTINGS, claim, remove_empty
from gradveil.core.locks import alone, refuse_held
from gradveil.core.progress import LONG, Bar, foretold
from gradveil.core.reading import parse_json
from gradveil.core.stopping import Stopped, signaled, stop_if_signaled
from gradveil.core.tensor_files import read_safetensors
from gradveil.data import Images
from gradveil.defenses import Defense
from gradveil.federated import need_flower
from gradveil.federated.job import (
    FEDERATION,
    FINAL,
    RESUME,
    SPY,
    FederationJob,
    make_first_model,
    make_model,
    make_shares,
)
from gradveil.models.accuracy import measure_accuracy
from gradveil.models.checkpoints import load_checkpoint, read_settings, save_checkpoint
from gradveil.training.run import check_accuracy, try_defense

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when Flower is imported
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
need_flower()

with warnings.catch_warnings():
    # Flower imports typer 0.20, which imports names that click 8.5 means to remove
    warnings.simplefilter("ignore", DeprecationWarning)
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from gradveil.federated.client_app import (
        Memory,
        Plan,
        Workshop,
        make_client_app,
        read_state,
        statistics,
    )
    from gradveil.federated.messages import LOG
    from gradveil.federated.mods import unpack
    from gradveil.federated.recorded import (
        audit_folder,
        audit_round,
        foresee_audit,
        foreseen_audits,
    )
    from gradveil.federated.server import Learner, Round
    from gradveil.search.ray import connect, disconnect

FEDERATING = "training into"  # for who finds the folder held
STATES = "clients"  # the folder of what clients' defenses keep between rounds
PARTS = (*job_folder.PARTS, f"{SPY}/*/.*.part")  # files that a killed run was writing
QUICK = 1_000  # test images that the accuracy of a round is measured on

Serve = Callable[[Grid, Callable[[], bool]], None]
Engine = Callable[[Plan, Serve], None]
"""Runs the clients of a plan, and calls a server with their grid and a function that tells whether
they have ended."""


@dataclass(frozen=True)
class FederationResult:
    """What a federated training gave, and where it is.

    `audits` are those of spied rounds, `notes` say how an attacker took a round's updates, and
    `not_attacked` why it could not: that is no sign of safety.
    """

    out: Path
    checkpoint: Path
    accuracy: float
    history: tuple[Mapping[str, float], ...]
    model: nn.Module = field(repr=False, compare=False)
    audits: Mapping[int, AuditResult] = field(default_factory=dict, repr=False)
    notes: Mapping[int, str] = field(default_factory=dict)
    not_attacked: Mapping[int, str] = field(default_factory=dict)


@public
def federate(
    job: FederationJob,
    out: Path | str,
    *,
    root: Path | str | None = None,
    device: str = "auto",
    progress: bool = True,
    engine: Callable[..., None] | None = None,
) -> FederationResult:
    """Train into the folder `out`, on Flower's simulation engine, and audit what was spied.

    A training that was stopped goes on after its last whole round; one that is done is read back.
    The clients train on the processor; `device` is that of the audits. `engine` runs the clients in
    another way than Flower's simulation.
    """
    out, root = Path(out), None if root is None else Path(root)
    FEDERATION.refuse_other(out, job.settings())
    refuse_held(out, FEDERATING)
    splits = job.splits(root)
    train, test = splits
    model = make_first_model(job, train)
    shares = make_shares(job, train)  # a division that cannot be is refused before anything starts
    _foretell(job, out, shares, splits)
    try_defense(job.training, model, train)
    with alone(out, FEDERATING):
        FEDERATION.refuse_other(out, job.settings())
        claim(out, job.settings(), PARTS)
        try:
            if not (out / FINAL).is_file():
                _train(job, out, root, model, test, progress, engine or simulate)
            _clear(out)  # also where a run was killed just before
        except RAISED:
            remove_empty(out / STATES)
            if not any((out / name).exists() for name in (RESUME, SPY, STATES)):
                (out / SETTINGS).unlink(missing_ok=True)
                remove_empty(out)
            raise
        load_checkpoint(out / FINAL, model)
        facts = read_settings(out / FINAL, ("test_accuracy", "history"))
        if job.graph is None:  # else it is the mean of many models
            check_accuracy(out / FINAL, facts["test_accuracy"], model, test, job.seed)
        audits, notes, refused = _audit(job, out, splits, device, progress)
    return FederationResult(
        out,
        out / FINAL,
        facts["test_accuracy"],
        tuple(facts["history"]),
        model,
        audits,
        notes,
        refused,
    )


def _foretell(
    job: FederationJob, out: Path, shares: Sequence[Tensor], splits: tuple[Images, Images]
) -> None:
    """Say before the training what of the spied rounds cannot be attacked after it.

    Where that is all of them it is an error, unless the training has begun. So is an attack that
    was tuned on a victim.
    """
    train, _ = splits
    said: dict[str, list[int]] = {}
    attacked = False
    for number in sorted(job.spy_rounds) if job.attacks or job.auto else ():
        try:
            victims = foresee_audit(job, number, out, shares, splits)
        except GradveilError as error:
            said.setdefault(str(error).removeprefix(f"round {number}: "), []).append(number)
            continue
        attacked = True
        if victims.left_out:
            said.setdefault(victims.left_out, []).append(number)
        refuse_tuned_on(
            job.attacks,
            train,
            torch.cat(victims.numbers),
            f"a client has it in round {number}: tune on images that no client has, with gradveil "
            "tune --public, or spy on other rounds",
        )
    reasons = [
        f"round{'s' * (len(rounds) > 1)} {', '.join(map(str, rounds))}: {why}"
        for why, rounds in said.items()
    ]
    if said and not attacked and not (out / SETTINGS).is_file():
        more = "" if len(reasons) == 1 else f" (and {len(reasons) - 1} more reasons)"
        raise GradveilError(
            f"nothing could be attacked after the training: {reasons[0]}{more}; change that, or "
            "leave the attacks out"
        )
    for reason in () if (out / FINAL).is_file() else reasons:
        warnings.warn(reason, GradveilWarning, stacklevel=3)


def _audit(
    job: FederationJob, out: Path, splits: tuple[Images, Images], device: str, progress: bool
) -> tuple[dict[int, AuditResult], dict[int, str], dict[int, str]]:
    audits: dict[int, AuditResult] = {}
    notes: dict[int, str] = {}
    refused: dict[int, str] = {}
    numbers = sorted(job.spy_rounds) if job.attacks or job.auto else []
    left = [number for number in numbers if not (audit_folder(out, number) / SETTINGS).exists()]
    if progress and len(left) > 1:  # a single audit says by itself how long it takes
        seconds = foreseen_audits(job, left, out, splits, device)
        if seconds > LONG:
            said = foretold(seconds, {})
            Bar(progress).say(f"the audits of rounds {', '.join(map(str, left))}: {said}")
    for number in numbers:
        try:
            audits[number] = audit_round(
                job, number, out, splits=splits, device=device, progress=progress
            )
        except GradveilError as error:
            # One that has begun can be attacked; what is wrong then is not the round.
            if isinstance(error, WriteError) or (audit_folder(out, number) / SETTINGS).exists():
                raise
            refused[number] = str(error)
            continue
        (case,) = audits[number].cases
        notes |= {number: case.note} if case.note else {}
    return audits, notes, refused


def _train(
    job: FederationJob,
    out: Path,
    root: Path | None,
    model: nn.Module,
    test: Images,
    progress: bool,
    engine: Engine,
) -> None:
    """Go through the rounds that are left, and write the final weights."""
    count = 1 if job.graph is None else job.clients
    learners = [
        Learner(make_model(job, test) if each else model, job.recipe) for each in range(count)
    ]
    for learner in learners[1:]:
        learner.model.load_state_dict(model.state_dict())
    history = restore(out / RESUME, learners, job.rounds)
    check_states(out / STATES, job.on_update)
    bar = Bar(progress, counted=True)

    def serve(grid: Grid, stopped: Callable[[], bool]) -> None:
        rounds = Round(job, learners, grid, out / SPY, stopped)
        bar.start("round", job.rounds, len(history))
        for number in range(len(history) + 1, job.rounds + 1):
            started = time.perf_counter()
            clients = rounds.go(number)
            last = number == job.rounds
            accuracy = _accuracy(learners, test, None if last else QUICK, job.seed)
            seconds = time.perf_counter() - started
            history.append(
                {"round": number, "test_accuracy": accuracy, "clients": clients, "seconds": seconds}
            )
            _keep(out / RESUME, learners, history)
            bar.update(number, news=f"accuracy {accuracy:.1%}")
            left = job.rounds - number
            if number == 2 and left * seconds > LONG:  # the first has what is done but once
                fewer = max(job.rounds // 10, 1)
                said = foretold(left * seconds, {f"--rounds {fewer}": fewer * seconds})
                bar.say(f"the other rounds: {said}")
            if rounds.lost_process and number < job.rounds:
                LOG.warning(
                    "gradveil: round %d went on without clients whose process ended; all processes "
                    "are started again",
                    number,
                )
                return

    try:
        plan = Plan(job, root, out / STATES, tuple(statistics(model)))
        while (done := len(history)) < job.rounds:
            engine(plan, serve)
            stop_if_signaled()
            if len(history) == done:
                raise GradveilError(
                    f"Flower ended after round {done} of {job.rounds}; run it again"
                )
    finally:
        bar.stop()
    save_checkpoint(out / FINAL, model, _facts(job, history))


def _facts(job: FederationJob, history: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return what is saved with the final weights."""
    return {
        "model": job.training.model_name,
        "data": job.settings()["data"],
        "defense": str(job.defense),
        "augment": True,
        "seed": job.seed,
        "step": job.rounds,
        "test_accuracy": history[-1]["test_accuracy"],
        "history": list(history),
        **({} if job.start is None else {"start": str(job.start)}),
    }


def _clear(out: Path) -> None:
    """Remove what a training goes on from: it is done."""
    (out / RESUME).unlink(missing_ok=True)
    for path in (out / STATES).glob("*.state"):
        path.unlink(missing_ok=True)
    remove_empty(out / STATES)


def _accuracy(learners: list[Learner], test: Images, most: int | None, seed: int) -> float:
    """Return the mean accuracy of the models there are."""
    found = [
        measure_accuracy(learner.model, test, **({} if most is None else {"most": most}), seed=seed)
        for learner in learners
    ]
    return sum(accuracy for accuracy, _ in found) / len(found)


def _keep(path: Path, learners: list[Learner], history: list[dict[str, float]]) -> None:
    """Write the point to go on from, whole or not at all."""
    tensors = {
        f"{number}.{name}": value.detach().clone().contiguous()
        for number, learner in enumerate(learners)
        for name, value in learner.tensors().items()
    }
    write_bytes(path, save(tensors, metadata={"gradveil": json.dumps(history)}))


def restore(path: Path, learners: list[Learner], rounds: int) -> list[dict[str, float]]:
    """Put learners back to where they were, and return the rounds so far, of `rounds`."""
    if not path.is_file():
        return []
    try:
        tensors, metadata = read_safetensors(path)
        rows = parse_json(metadata.get("gradveil", "").encode(), list[FederatedRound], path)
        numbers = [row.round for row in rows]
        if numbers != [*range(1, len(rows) + 1)] or len(rows) > rounds:
            raise GradveilError(f"rounds {numbers}, expected 1 to {rounds} at most")
        for number, learner in enumerate(learners):
            start = f"{number}."
            learner.restore(
                {
                    name.removeprefix(start): value
                    for name, value in tensors.items()
                    if name.startswith(start)
                }
            )
    except GradveilError as error:
        raise GradveilError(
            f"{shown(path)} is damaged ({shown(error)}): delete it, and the training starts again"
        ) from error
    return [to_builtins(row) for row in rows]


def check_states(folder: Path, defense: Defense) -> None:
    """Refuse a damaged file: a client that meets one could take part in no round."""
    for path in Memory(folder).files().values():
        try:
            unpack(defense, read_state(path), path)
        except Exception as error:  # also of the defense, which may be the user's
            said = error if isinstance(error, GradveilError) else one_line(error)
            raise GradveilError(
                f"{shown(path)} is damaged ({shown(said)}): delete it and {RESUME}, and the "
                "training starts again"
            ) from error


def simulate(plan: Plan, serve: Serve) -> None:
    """Run the clients on Flower's simulation engine: processes of Ray on this machine."""
    from ray import cloudpickle

    server, ended = ServerApp(), Event()

    @server.main()
    def main(grid: Grid, _: Context) -> None:
        with suppress(Stopped):  # a bar raises it in this thread too, which would print it
            serve(grid, lambda: ended.is_set() or signaled())

    with (
        tempfile.TemporaryDirectory(prefix="gradveil-federate-") as folder,
        _quiet(),
        redirect_stdout(sys.stderr),  # Ray prints what happens to its processes
    ):
        # Flower sends the app with every message, so that it must be small.
        path = Path(folder) / "job"
        root = None if plan.root is None else plan.root.absolute()
        path.write_bytes(cloudpickle.dumps((plan.job, root)))  # type: ignore[no-untyped-call]
        app = make_client_app(
            replace(plan, states=plan.states.absolute()), partial(load_workshop, str(path))
        )
        started = connect("local")
        try:
            # `flwr run` is what Flower recommends instead; it needs an app's folder, and leaves a
            # SuperLink behind.
            run_simulation(
                server,
                app,
                num_supernodes=plan.job.clients,
                backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
            )
        finally:
            ended.set()  # or the server's thread would wait for replies, and keep the program
            if started:
                disconnect()


@lru_cache(maxsize=1)
def load_workshop(path: str) -> Workshop:
    """Return what this process needs to be a client; made once in each process."""
    from ray import cloudpickle

    torch.set_num_threads(1)
    job, root = cloudpickle.loads(Path(path).read_bytes())
    return Workshop.of(job, root)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let Flower log its warnings alone, and not that its function is to be replaced.

    Nor how its workers end after a signal, which comes to them too.
    """
    logger = logging.getLogger("flwr")
    level = logger.level

    def wanted(record: logging.LogRecord) -> bool:
        dull = str(record.msg).startswith(("DEPRECATED FEATURE", "fraction_evaluate is set to 0.0"))
        return not (dull or signaled())

    logger.setLevel(logging.WARNING)
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
        logger.setLevel(level)
