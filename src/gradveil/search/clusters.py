"""The work of a search on a Ray cluster: one worker for each GPU, or for each core where there is none."""

import contextlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gradveil.audits import AuditJob, audit
from gradveil.core.errors import GradveilError
from gradveil.scores.scorers import Scorer
from gradveil.search.connections import connect, disconnect
from gradveil.search.engines import Engine
from gradveil.search.pools import LOSSES, Pool, own_error
from gradveil.transforms import Policy


class RayEngine(Engine):
    """Workers that are lost are replaced, and what they were at is done again, with the same result.

    Without an address: the cluster that $RAY_ADDRESS names, else one of this machine's own, which ends with the engine. A Ray
    that this process is connected to already is used as it is, and left as it is. The machines need gradveil installed; audits
    write to their folders from where they run, so the machines must share the file system that these lie on.
    """

    def __init__(self, scorers: Mapping[str, Scorer], address: str | None = None) -> None:
        super().__init__(scorers)
        self._pool: Pool | None = None
        self._started = connect(address)
        import ray

        there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        self._gpus = int(there.get("GPU", 0))
        self._workers = self._gpus or int(there.get("CPU", 0))
        if not self._workers:
            self.close()
            raise GradveilError("the Ray cluster has neither GPUs nor cores for workers: give its nodes --num-cpus or --num-gpus")

    @property
    def workers(self) -> int:
        return self._workers

    def score_units(self, which: str, units: Sequence[Sequence[Policy]], block: int) -> list[Mapping[str, Tensor]]:
        import ray

        if self._pool is None:
            kind = ray.remote(Worker).options(**self._needs(bool(self._gpus)))
            scorers = ray.put(self.scorers)
            self._pool = Pool(lambda: kind.remote(scorers, bool(self._gpus)), self._workers)
        try:
            return self._pool.run([(which, list(unit), block) for unit in units])
        except BaseException:
            self._release()  # what is still under way is of no use any more
            raise

    def audits(self, work: Sequence[tuple[AuditJob, Path]], root: Path | None, device: str, progress: bool = False) -> None:  # noqa: ARG002
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


def run_audit(job: AuditJob, out: Path, root: Path | None, device: str, folder: Path, gpu: bool) -> None:
    """As a task of the cluster. One that is run again goes on where the lost one stopped."""
    if not gpu:
        torch.set_num_threads(1)
    if not folder.is_dir():
        raise GradveilError(f"{folder} is not on {socket.gethostname()}: audits on a cluster need a file system that its machines share")
    with contextlib.chdir(folder):
        audit(job, out, root=root, device=device, progress=False)
