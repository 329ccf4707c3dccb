"""What searches and tunings work with: Optuna, a storage, an engine, a folder; checked early."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError, unknown
from gradveil.core.files import shown
from gradveil.core.importing import RAISED
from gradveil.core.job_folder import SETTINGS, Kind, claim, remove_empty
from gradveil.core.locks import held
from gradveil.scores.scorer import Scorer
from gradveil.search.engine import Engine, LocalEngine
from gradveil.search.ray import RayEngine, check_cluster

ENGINES = ("local", "ray")
PARTS = ".*.part"
JOURNAL = "study.journal"  # in the job's folder, where no other storage is given
CALM = 60.0  # seconds of speed that the time left is reckoned from: groups of trials end together


def check_engine(engine: str, ray_address: str | None) -> None:
    """Refuse an engine that does not exist, and an address that it has no use for."""
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    if ray_address and engine != "ray":
        raise GradveilError(
            f"ray address {shown(ray_address)}: engine {engine} has no use for it; "
            "choose engine ray"
        )


def check_optuna(job: str) -> None:
    """Refuse to begin without Optuna, which studies need and scores, probes and results do not."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise GradveilError(f"a {job} needs Optuna: pip install gradveil[search]") from None


def check_services(storage: str | None, engine: str, ray_address: str | None) -> None:
    """Refuse a database or cluster that cannot be reached, before any work is done."""
    if storage is not None:
        from gradveil.search.storage import open_storage

        open_storage(storage).close()
    if engine == "ray":
        check_cluster(ray_address)


def make_engine(name: str, scorers: Mapping[str, Scorer], address: str | None) -> Engine:
    """Return the engine of this name; `address` is that of a Ray cluster."""
    return LocalEngine(scorers) if name == "local" else RayEngine(scorers, address)


@contextmanager
def claimed(kind: Kind, out: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """Hold the folder as this job's. One that fails before it has results gives it back."""
    kind.refuse_other(out, settings)
    new = False
    if not (out / SETTINGS).is_file():
        with held(out, lambda _: None):
            kind.refuse_other(out, settings)  # another process may have been faster
            new = claim(out, settings, parts=(PARTS,))
    try:
        yield
    except RAISED:
        if new and {entry.name for entry in out.iterdir()} == {SETTINGS}:
            (out / SETTINGS).unlink(missing_ok=True)
            remove_empty(out)
        raise
