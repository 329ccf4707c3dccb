"""The work of a search on a Ray cluster: a worker for each GPU, or for each core without GPUs."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.scores.scorer import Scorer
from gradveil.search.engine import Engine, Task

PATIENCE = 5.0  # seconds for a cluster to answer
START = 120.0  # seconds for the first worker to start
LOSSES = 3  # workers lost at the same piece of work, after which the work is to blame
LONGEST = 200  # letters of a message of Ray's
SEARCH = "RAY_gcs_rpc_server_reconnect_timeout_s"  # Ray's variable for the seconds of a search
ORPHANED = 10  # seconds that Ray's processes search for their server, which a kill took from them


def check_cluster(address: str | None) -> str | None:
    """Return the address, by default $RAY_ADDRESS; refuse it where no cluster answers."""
    address = address or os.environ.get("RAY_ADDRESS")
    if find_spec("ray") is None:
        raise GradveilError("engine ray needs Ray: pip install gradveil[cluster]")
    if address not in (None, "local", "auto"):
        _knock(str(address))
    return address


def connect(address: str | None) -> bool:
    """Connect to a Ray cluster, or start one on this machine where no address is given.

    Return False where this process was connected already.
    """
    address = check_cluster(address)
    import ray

    if ray.is_initialized():
        return False
    handler = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if address in (None, "local"):
        quiet |= {"include_dashboard": False}
    with warnings.catch_warnings():
        # Ray warns of its later versions, and leaves files open, which Python warns of
        warnings.simplefilter("ignore")
        try:
            with _soon_ended() if address in (None, "local") else contextlib.nullcontext():
                ray.init(address=address or "local", **quiet)
            gc.collect()
        except Exception as error:  # also a bare one, as where the machine is too busy to start it
            raise GradveilError(
                f"ray address {address or 'local'!r}: no cluster to work on "
                f"({one_line(error, LONGEST)})"
            ) from None
        except SystemExit as stop:  # of Ray's handler of SIGTERM, since it was set
            _restore(handler)
            if stop.code == signal.SIGTERM:
                signal.raise_signal(signal.SIGTERM)
            raise
        finally:
            _restore(handler)
    return True


@contextlib.contextmanager
def _soon_ended() -> Iterator[None]:
    """Let the processes that Ray starts here end soon after this one is killed.

    The kernel kills Ray's servers with it. But the two agents, of dashboard and runtime
    environments, then want to report that to Ray's GCS server, and search for it before they give
    up: for 60 s by default.
    """
    before = os.environ.get(SEARCH)
    os.environ[SEARCH] = before or str(ORPHANED)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SEARCH, None)


def _restore(handler: Any) -> None:
    """Undo what Ray does to SIGTERM: it would end this program with status 15, without a word."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends."""
    import ray

    with warnings.catch_warnings():  # Ray ends its processes, but does not wait for them
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        gc.collect()


def _knock(address: str) -> None:
    """Refuse an address where no cluster answers within seconds.

    Ray itself tries for minutes, also where something else listens. So greet it as HTTP/2 begins,
    which Ray speaks, and expect a frame of settings in return; through TLS, only connect.
    """
    greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    settings = b"\x04"  # the fourth byte of such a frame
    parts = re.fullmatch(r"(?:ray://)?\[?([^/\[\]]+?)\]?:(\d{1,5})", address)
    if not parts or int(parts[2]) > 65535:
        raise GradveilError(
            f"ray address {address!r}: write host:6379, ray://host:10001, or auto for a cluster on "
            "this machine"
        )
    try:
        with socket.create_connection((parts[1], int(parts[2])), timeout=PATIENCE) as connection:
            if "RAY_USE_TLS" not in os.environ:
                connection.settimeout(PATIENCE)
                connection.sendall(greeting)
                if connection.recv(9)[3:4] != settings:
                    raise ConnectionError("what answers there is no Ray")
    except OSError as error:
        raise GradveilError(
            f"ray address {address!r}: no cluster answers ({error}); start a cluster with "
            "`ray start --head`, or give no address"
        ) from None


class WorkerPool:
    """Share work among Ray actors; `make` starts an actor with the methods `ready` and `work`."""

    def __init__(self, make: Callable[[], Any], size: int) -> None:
        self._make = make
        self._idle: list[Any] = []
        # by the reference of a result: the actor, and the index of its work; None while it starts
        self._running: dict[Any, tuple[Any, int | None]] = {}
        self._lost: Counter[int | None] = Counter()
        for _ in range(size):
            self._add()

    def run(self, work: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return `actor.work(*piece)` for each piece, in order.

        After an error the pool can only be closed.
        """
        import ray

        todo = deque(range(len(work)))
        results: dict[int, Any] = {}
        self._lost.clear()
        while len(results) < len(work):
            while todo and self._idle:
                actor, index = self._idle.pop(), todo.popleft()
                self._running[actor.work.remote(*work[index])] = actor, index
            for reference in self._wait():
                actor, done = self._running.pop(reference)
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayError as error:
                    self._replace(done, error)
                    todo.extendleft([] if done is None else [done])
                    continue
                self._idle.append(actor)
                if done is not None:
                    results[done] = result
        return [results[index] for index in range(len(work))]

    def close(self) -> None:
        import ray

        for actor in [*self._idle, *(actor for actor, _ in self._running.values())]:
            ray.kill(actor)
        self._idle, self._running = [], {}

    def _add(self) -> None:
        actor = self._make()
        self._running[actor.ready.remote()] = actor, None

    def _wait(self) -> list[Any]:
        """Wait until a reference is ready, and return those that are."""
        import ray

        starting = all(index is None for _, index in self._running.values()) and not self._idle
        done, _ = ray.wait(list(self._running), timeout=START if starting else None)
        if not done:
            raise GradveilError(
                f"no worker of the Ray cluster started within {START:.0f} s: its GPUs or cores are "
                "taken by others"
            )
        return list(done)

    def _replace(self, index: int | None, error: Exception) -> None:
        """Replace a lost worker by another; raise an error of the work itself."""
        if not is_loss(error):
            raise work_error(error) from None
        self._lost[index] += 1
        if self._lost[index] > LOSSES:
            raise work_error(error) from None
        warnings.warn(
            "a worker of the Ray cluster was lost: its work is done again by another",
            GradveilWarning,
            stacklevel=3,
        )
        self._add()


def is_loss(error: Exception) -> bool:
    """Tell whether a process or machine went away, rather than the work failing by itself."""
    import ray

    gone = (
        ray.exceptions.RayActorError,
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.ObjectLostError,
    )
    return isinstance(error, gone) and not getattr(error, "actor_init_failed", False)


def work_error(error: Exception) -> Exception:
    """Return the error that the work raised, as it was raised there; else Ray's as one line."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        return error.cause if isinstance(error.cause, GradveilError) else error
    return GradveilError(f"the Ray cluster failed: {one_line(error, LONGEST)}")


class RayEngine(Engine):
    """Work on a Ray cluster. Lost workers are replaced, and their work is done again.

    Without an address it is the cluster that $RAY_ADDRESS names, else one on this machine, which
    ends with the engine. A Ray that this process is connected to already is used and left as it is.
    The machines need gradveil installed; tasks write to their folders from where they run, so the
    machines must share the file system of these.
    """

    def __init__(self, scorers: Mapping[str, Scorer], address: str | None = None) -> None:
        super().__init__(scorers)
        self._pool: WorkerPool | None = None
        self._started = connect(address)
        import ray

        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        self._gpus = int(resources.get("GPU", 0))
        self._workers = self._gpus or int(resources.get("CPU", 0))
        if not self._workers:
            self.close()
            raise GradveilError(
                "the Ray cluster has neither GPUs nor cores for workers: give its nodes "
                "--num-cpus or --num-gpus"
            )

    @property
    def workers(self) -> int:
        return self._workers

    def score_units(
        self, which: str, units: Sequence[Sequence[Any]], block: int
    ) -> list[Mapping[str, Tensor]]:
        import ray

        if self._pool is None:
            kind = ray.remote(Worker).options(**_needs(bool(self._gpus)))
            scorers = ray.put(self.scorers)
            self._pool = WorkerPool(lambda: kind.remote(scorers, bool(self._gpus)), self._workers)
        try:
            return self._pool.run([(which, list(unit), block) for unit in units])
        except BaseException:
            self._release()  # the results still under way are of no use any more
            raise

    def run(self, tasks: Sequence[Task], device: str, progress: bool = False) -> None:
        """Run tasks side by side, each on a GPU or core, and silently.

        Relative paths start from this process's folder, on whichever machine.
        """
        import ray

        self._release()  # the workers hold all GPUs or cores
        on_gpu = bool(self._gpus) and device != "cpu"
        remote = ray.remote(run_task).options(max_retries=LOSSES, **_needs(on_gpu))
        waiting = [remote.remote(task, Path.cwd(), on_gpu) for task in tasks]
        try:
            while waiting:
                done, waiting = ray.wait(waiting)
                ray.get(done)
        except ray.exceptions.RayError as error:
            raise work_error(error) from None
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


def _needs(gpu: bool) -> dict[str, int]:
    return {"num_gpus": 1, "num_cpus": 0} if gpu else {"num_cpus": 1}


class Worker:
    """The actor that runs in a process of the cluster."""

    def __init__(self, scorers: Mapping[str, Scorer], gpu: bool) -> None:
        self._scorers = scorers
        if not gpu:
            torch.set_num_threads(1)

    def ready(self) -> None:
        """Answer once the process has started."""

    def work(self, which: str, policies: Sequence[Any], block: int) -> Mapping[str, Tensor]:
        return self._scorers[which].score(policies, block)


def run_task(task: Task, folder: Path, gpu: bool) -> None:
    """Run a task in a process of the cluster; after a loss it is run again there."""
    if not gpu:
        torch.set_num_threads(1)
    if not folder.is_dir():
        raise GradveilError(
            f"{folder} is not on {socket.gethostname()}: audits on a cluster need a file system "
            "that its machines share"
        )
    with contextlib.chdir(folder):
        task(False)
