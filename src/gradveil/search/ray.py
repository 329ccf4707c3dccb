"""The work of a search on a Ray cluster: one worker for each GPU, or for each core where there is none."""

import contextlib
import gc
import logging
import os
import re
import signal
import socket
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.audits import AuditJob, audit
from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.scores.scorer import Scorer
from gradveil.search.engine import Engine
from gradveil.transforms import Policy

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(
    [0, 0, 0, 4, 0, 0, 0, 0, 0]
)  # how HTTP/2 begins, which Ray speaks
SETTINGS = b"\x04"  # the kind of frame that answers it
PATIENCE = 5.0  # seconds for a cluster to answer
LONGEST = 200  # letters of Ray's own words

_handlers: list[Any] = []  # of SIGTERM, as they were before Ray


def check(address: str | None) -> str | None:
    """The address, or what $RAY_ADDRESS says without one: Ray is installed, and a cluster answers where one is named."""
    address = address or os.environ.get("RAY_ADDRESS")
    if find_spec("ray") is None:
        raise GradveilError("engine ray needs Ray: pip install gradveil[cluster]")
    if address not in (None, "local", "auto"):
        _knock(str(address))
    return address


def connect(address: str | None) -> bool:
    """To a Ray cluster, or to a new one of this machine's own where none is named. False where this process had one already."""
    address = check(address)
    import ray

    if ray.is_initialized():
        return False
    _handlers.append(signal.getsignal(signal.SIGTERM))
    quiet: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if address in (None, "local"):
        quiet |= {"include_dashboard": False}
    with (
        warnings.catch_warnings()
    ):  # of what later versions will do, and of files that Ray leaves open
        warnings.simplefilter("ignore")
        try:
            ray.init(address=address or "local", **quiet)
            gc.collect()
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            _restore_handler()
            raise GradveilError(
                f"ray address {address or 'local'!r}: no cluster to work on ({one_line(error, LONGEST)})"
            ) from None
    return True


def disconnect() -> None:
    """From the cluster; one that `connect` started ends."""
    import ray

    with warnings.catch_warnings():  # Ray ends its processes, but does not ask after them
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        gc.collect()
    _restore_handler()


def _restore_handler() -> None:
    """Ray takes SIGTERM over, to end its processes, and keeps it when they have ended."""
    if _handlers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _handlers.pop())


def _knock(address: str) -> None:
    """Ray itself would try for long."""
    parts = re.fullmatch(r"(?:ray://)?\[?([^/\[\]]+?)\]?:(\d{1,5})", address)
    if not parts or int(parts[2]) > 65535:
        raise GradveilError(
            f"ray address {address!r}: write host:6379, ray://host:10001, or auto for a cluster on this machine"
        )
    try:
        with socket.create_connection((parts[1], int(parts[2])), timeout=PATIENCE) as connection:
            if "RAY_USE_TLS" not in os.environ:
                connection.settimeout(PATIENCE)
                connection.sendall(GREETING)
                if connection.recv(9)[3:4] != SETTINGS:
                    raise ConnectionError("what answers there is no Ray")
    except OSError as error:
        raise GradveilError(
            f"ray address {address!r}: no cluster answers ({error}); start a cluster with `ray start --head`, or give no address"
        ) from None


LOSSES = 3  # of workers on the same piece of work, after which it is to blame
START = 120.0  # seconds for the first worker to be there


class WorkerPool:
    """`make` gives an actor with the methods `ready` and `work`."""

    def __init__(self, make: Callable[[], Any], size: int) -> None:
        self._make = make
        self._idle: list[Any] = []
        self._running: dict[
            Any, tuple[Any, int | None]
        ] = {}  # by the reference of a result: the actor, and which piece it is at
        self._lost: Counter[int | None] = Counter()
        for _ in range(size):
            self._add()

    def run(self, work: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`actor.work(*piece)` for each piece, in their order. After an error the pool can only be closed."""
        import ray

        todo = deque(range(len(work)))
        results: dict[int, Any] = {}
        self._lost.clear()
        while len(results) < len(work):
            while todo and self._idle:
                actor, piece = self._idle.pop(), todo.popleft()
                self._running[actor.work.remote(*work[piece])] = actor, piece
            for reference in self._wait():
                actor, done = self._running.pop(reference)
                try:
                    found = ray.get(reference)
                except ray.exceptions.RayError as error:
                    self._replace(done, error)
                    todo.extendleft([] if done is None else [done])
                    continue
                self._idle.append(actor)
                if done is not None:
                    results[done] = found
        return [results[piece] for piece in range(len(work))]

    def close(self) -> None:
        import ray

        for actor in [*self._idle, *(actor for actor, _ in self._running.values())]:
            ray.kill(actor)
        self._idle, self._running = [], {}

    def _add(self) -> None:
        actor = self._make()
        self._running[actor.ready.remote()] = actor, None

    def _wait(self) -> list[Any]:
        """What is done, at least one."""
        import ray

        starting = all(piece is None for _, piece in self._running.values()) and not self._idle
        done, _ = ray.wait(list(self._running), timeout=START if starting else None)
        if not done:
            raise GradveilError(
                f"no worker of the Ray cluster started within {START:.0f} s: its GPUs or cores are taken by others"
            )
        return list(done)

    def _replace(self, piece: int | None, error: Exception) -> None:
        """A lost worker by another; an error of the work itself is raised."""
        if not is_loss(error):
            raise own_error(error) from None
        self._lost[piece] += 1
        if self._lost[piece] > LOSSES:
            raise own_error(error) from None
        warnings.warn(
            "a worker of the Ray cluster was lost: its work is done again by another",
            GradveilWarning,
            stacklevel=3,
        )
        self._add()


def is_loss(error: Exception) -> bool:
    """Whether a process or machine went away, rather than the work or the start of a worker failing by itself."""
    import ray

    gone = (
        ray.exceptions.RayActorError,
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.ObjectLostError,
    )
    return isinstance(error, gone) and not getattr(error, "actor_init_failed", False)


def own_error(error: Exception) -> Exception:
    """What the work itself raised, as it was raised there; else Ray's error as one line."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        return error.cause if isinstance(error.cause, GradveilError) else error
    return GradveilError(f"the Ray cluster failed: {one_line(error, LONGEST)}")


class RayEngine(Engine):
    """Workers that are lost are replaced, and what they were at is done again, with the same result.

    Without an address: the cluster that $RAY_ADDRESS names, else one of this machine's own, which ends with the engine. A Ray
    that this process is connected to already is used as it is, and left as it is. The machines need gradveil installed; audits
    write to their folders from where they run, so the machines must share the file system that these lie on.
    """

    def __init__(self, scorers: Mapping[str, Scorer], address: str | None = None) -> None:
        super().__init__(scorers)
        self._pool: WorkerPool | None = None
        self._started = connect(address)
        import ray

        there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        self._gpus = int(there.get("GPU", 0))
        self._workers = self._gpus or int(there.get("CPU", 0))
        if not self._workers:
            self.close()
            raise GradveilError(
                "the Ray cluster has neither GPUs nor cores for workers: give its nodes --num-cpus or --num-gpus"
            )

    @property
    def workers(self) -> int:
        return self._workers

    def score_units(
        self, which: str, units: Sequence[Sequence[Policy]], block: int
    ) -> list[Mapping[str, Tensor]]:
        import ray

        if self._pool is None:
            kind = ray.remote(Worker).options(**self._needs(bool(self._gpus)))
            scorers = ray.put(self.scorers)
            self._pool = WorkerPool(lambda: kind.remote(scorers, bool(self._gpus)), self._workers)
        try:
            return self._pool.run([(which, list(unit), block) for unit in units])
        except BaseException:
            self._release()  # what is still under way is of no use any more
            raise

    def audits(
        self,
        work: Sequence[tuple[AuditJob, Path]],
        root: Path | None,
        device: str,
        progress: bool = False,
    ) -> None:
        """Side by side, one to a GPU or core, and silent. Relative paths are taken from this process's folder, on whichever machine."""
        import ray

        self._release()  # the workers hold all GPUs or cores
        on_gpu = bool(self._gpus) and device != "cpu"
        task = ray.remote(run_audit).options(max_retries=LOSSES, **self._needs(on_gpu))
        waiting = [task.remote(job, out, root, device, Path.cwd(), on_gpu) for job, out in work]
        try:
            while waiting:
                done, waiting = ray.wait(waiting)
                ray.get(done)
        except ray.exceptions.RayError as error:
            raise own_error(error) from None
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)

    def close(self) -> None:
        if self._started:
            self._started = False
            self._pool = None
            disconnect()
        else:
            self._release()

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def _needs(self, gpu: bool) -> dict[str, int]:
        return {"num_gpus": 1, "num_cpus": 0} if gpu else {"num_cpus": 1}


class Worker:
    """What runs in a process of the cluster."""

    def __init__(self, scorers: Mapping[str, Scorer], gpu: bool) -> None:
        self._scorers = scorers
        if not gpu:
            torch.set_num_threads(1)

    def ready(self) -> None:
        """Answers once the process is there."""

    def work(self, which: str, policies: Sequence[Policy], block: int) -> Mapping[str, Tensor]:
        return self._scorers[which].score(policies, block)


def run_audit(
    job: AuditJob, out: Path, root: Path | None, device: str, folder: Path, gpu: bool
) -> None:
    """As a task of the cluster. One that is run again goes on where the lost one stopped."""
    if not gpu:
        torch.set_num_threads(1)
    if not folder.is_dir():
        raise GradveilError(
            f"{folder} is not on {socket.gethostname()}: audits on a cluster need a file system that its machines share"
        )
    with contextlib.chdir(folder):
        audit(job, out, root=root, device=device, progress=False)
