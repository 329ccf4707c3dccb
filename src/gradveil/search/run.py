"""The search itself: into a folder, alone or with others at one study, or on from where it stopped."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gradveil.audits import AuditJob
from gradveil.core.errors import GradveilError, unknown
from gradveil.engine.device import find_device
from gradveil.models.checkpoints import load_checkpoint
from gradveil.scores.scorer import Scorer
from gradveil.search import confirm as confirmations
from gradveil.search.engine import Engine, LocalEngine
from gradveil.search.folders import JOURNAL, RESULT, SEARCH, alone, claimed
from gradveil.search.job import SearchJob
from gradveil.search.loop import Loop, on_front, qualified, saving
from gradveil.search.progress import Bar
from gradveil.search.ray import check
from gradveil.search.results import Found, SearchResult, notes, write_files
from gradveil.search.setup import Setup, find_checkpoint
from gradveil.search.space import Finished, make_hybrid
from gradveil.search.storage import open_place, storage_name
from gradveil.search.study import Study

ENGINES = ("local", "ray")


def search(
    job: SearchJob,
    out: Path,
    *,
    root: Path | None = None,
    device: str = "auto",
    storage: str | None = None,
    study: str = "gradveil",
    engine: str = "local",
    ray_address: str | None = None,
    progress: bool = True,
) -> SearchResult:
    """Search into `out`. A search that was stopped goes on; one that is done is read back.

    The study is a journal file in the folder, or lies in an Optuna storage (`storage`, a URL), where searches on several machines
    join it by its name; their semi-trained weights must be the same, so give all of them one checkpoint.
    """
    place = find_device(device)
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    if ray_address and engine != "ray":
        raise GradveilError(
            f"ray address {ray_address}: engine {engine} has no use for it; choose engine ray"
        )
    SEARCH.refuse_other(out, job.settings())
    if (out / RESULT).is_file():
        return _ended(out, storage)
    setup = Setup.of(job, root)
    if storage is not None:  # what cannot be reached is refused before anything is trained
        open_place(storage).leave()
    if engine == "ray":
        check(ray_address)
    with claimed(out, job.settings()):
        bar = Bar(progress, job.objective)
        checkpoint = find_checkpoint(job, out, root=root, device=device, bar=bar, progress=progress)
        model = load_checkpoint(checkpoint, setup.untrained())
        facts = {
            name: value for name, value in job.settings().items() if name != "checkpoint"
        } | setup.facts(model)
        scorers = setup.scorers(model, place)
        aims = (job.objective, "accuracy") if job.sampler == "nsga2" else (job.objective,)
        opened = Study.open(
            out / JOURNAL if storage is None else storage, study, facts, job.sampler, job.seed, aims
        )
        try:
            with make_engine(engine, scorers, ray_address) as made:
                try:
                    done = Loop(job, opened, made, scorers, bar).go()
                finally:
                    bar.stop()
                with alone(
                    out,
                    lambda: bar.say("another process makes the confirming audits: waiting for it"),
                ):
                    if not (out / RESULT).is_file():
                        run_audits = partial(
                            made.audits, root=root, device=device, progress=progress
                        )
                        conclude(
                            setup, out, done, facts, checkpoint, run_audits, (study, opened.url)
                        )
        finally:
            opened.close()
        return SearchResult.read(out)


def _ended(out: Path, storage: str | None) -> SearchResult:
    found = SearchResult.read(out)
    if storage is not None and storage_name(storage) != found.storage:
        raise GradveilError(
            f"the search in {out} has ended, with its study in {found.storage}: choose another --out for {storage_name(storage)}"
        )
    return found


def make_engine(name: str, scorers: Mapping[str, Scorer], address: str | None) -> Engine:
    if name == "local":
        return LocalEngine(scorers)
    from gradveil.search.ray import RayEngine

    return RayEngine(scorers, address)


def conclude(
    setup: Setup,
    out: Path,
    done: Sequence[Finished],
    facts: Mapping[str, Any],
    checkpoint: Path,
    run_audits: Callable[[Sequence[tuple[AuditJob, Path]]], None],
    study: tuple[str, str],
) -> None:
    """Keep the best, make the hybrid, confirm both, and write the files."""
    job = setup.job
    ranked = qualified(job, done)
    kept, order = ranked[: job.keep], [one.policy for one in ranked]
    hybrid, why = make_hybrid(order, job.hybrid, setup.test.channels)
    policies = confirmations.rows(job, kept[0].policy, hybrid)
    run_audits(confirmations.work(job, checkpoint, out, policies))
    confirmed = {
        model: {row: str(policy) for row, policy in policies.items()}
        for model in confirmations.MODELS
    }
    result = SearchResult(
        out,
        facts,
        tuple(Found.of(one) for one in done),
        tuple(Found.of(one) for one in kept),
        tuple(Found.of(one) for one in on_front(job, done)) if job.sampler == "nsga2" else (),
        hybrid,
        why,
        saving(job, done, len(setup.chosen.leak)) if job.race else None,
        notes(setup, checkpoint, done, order, len(kept), hybrid),
        *study,
        confirmed,
        tuple(confirmations.verdicts(confirmations.read(out, confirmed))),
    )
    write_files(result)
