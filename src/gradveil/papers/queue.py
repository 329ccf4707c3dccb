"""The queue: working through the cells of a plan until the time is up.

Several processes may work through the same queue: each holds the training or the cell that it works
on, so that a model is trained once and its cells are shared out, and nothing is done twice.
"""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from gradveil.core.cell_files import CELL
from gradveil.core.errors import GradveilError, OtherSettingsError, one_line
from gradveil.core.files import (
    MissingFileError,
    check_writable,
    read_bytes,
    refuse_ways_out,
    shown,
    write_text,
)
from gradveil.core.importing import RAISED
from gradveil.core.locks import clear_lock, held
from gradveil.core.stopping import signaled, stop_if_signaled
from gradveil.core.streams import print_line
from gradveil.papers.cells import Cell, Training, Workspace
from gradveil.papers.plan import Group, Plan, training_left
from gradveil.papers.records import Records
from gradveil.training.job import FINAL, RESUME

HELD = "held"  # the folder of locks, one for each training and each cell
LONGEST = 10_000  # bytes of a note on why a cell failed
POLL = 0.5  # seconds between two looks at a model that another process trains
BESIDE = 0.5  # how much longer a process takes for each that shares its GPU, until it is measured
EXPECTED = 30.0  # estimated seconds, for each of the others, that this counts as

Say = Callable[[str], None]


@dataclass
class Outcome:
    """What a run did: cells by key, those that failed with the reason, and those left for later."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


class _Busy(Exception):  # noqa: N818  # no error: another process does it
    """Another process holds a training or a cell."""


@dataclass
class Clock:
    """The time left, and how this machine compares with the estimates, which are an H200's.

    The estimates are of a process alone; of `at_once` that share a GPU each takes longer.
    """

    minutes: float | None
    at_once: int = 1
    began: float = field(default_factory=time.monotonic)
    estimated: float = 0.0
    taken: float = 0.0

    @property
    def pace(self) -> float:
        """How many times longer than estimated things took so far; at least 1."""
        others = self.at_once - 1
        estimated = self.estimated + EXPECTED * others
        taken = self.taken + EXPECTED * others * (1 + BESIDE * others)
        return max(1.0, taken / estimated) if estimated else 1.0

    @property
    def left(self) -> float:
        """Seconds until the time is up."""
        if self.minutes is None:
            return float("inf")
        return self.minutes * 60 - (time.monotonic() - self.began)

    def fits(self, seconds: float) -> bool:
        """Tell whether work of so many estimated seconds is likely to end in time."""
        return seconds * self.pace <= self.left

    def learn(self, estimated: float, taken: float) -> None:
        """Note how long something took."""
        self.estimated += estimated
        self.taken += taken


def work_through(
    groups: Sequence[Group],
    records: Records,
    workspace: Workspace,
    *,
    minutes: float | None = None,
    archive: Path | None = None,
    at_once: int = 1,
    say: Say | None = None,
) -> Outcome:
    """Do the groups until all are done or the time is up, as one of `at_once` processes.

    Cells of models that were trained come before another training, since weights may be lost
    afterwards; then groups that are likely to end in time by one process, by all, and parts of
    others. While other processes train all models that are left, it waits. A cell that fails is
    told of and left; the others go on. Each cell's records are written as it ends.
    """
    clock, outcome = Clock(minutes, at_once, time.monotonic()), Outcome()
    _clear(workspace.work)
    job = _Job(groups, records, workspace, clock, outcome, archive, say or _to_stderr)
    while job.step() or job.waits:
        if job.waits:
            time.sleep(POLL)
    every = [cell.key for group in groups for cell in group.cells]
    outcome.left = [key for key in every if key not in {*outcome.done, *outcome.failed}]
    return outcome


def _refuse(holder: str) -> None:
    raise _Busy(holder)


@dataclass
class _Job:
    """The work of one process on the queue."""

    groups: Sequence[Group]
    records: Records
    workspace: Workspace
    clock: Clock
    outcome: Outcome
    archive: Path | None
    tell: Say
    waits: bool = False
    """Whether the last step found nothing to do but for a model that another process trains."""

    def step(self) -> bool:
        """Do the next training or cell, and tell whether there was one."""
        self.waits = False
        found = (self._open(group) for group in self.groups)
        ready = sorted((group for group in found if self._begins(group)), key=self._order)
        done = any(map(self._claim, ready))
        self.waits = self.waits and not done
        return done

    def _open(self, group: Group) -> Group:
        """Return the group with the cells that are neither done nor failed."""
        return replace(group, cells=tuple(cell for cell in group.cells if not self._over(cell)))

    def _begins(self, group: Group, training: float = 0.0) -> bool:
        """Tell whether the shortest cell is likely to end in time, after so long a training."""
        times = [cell.left(self.workspace) for cell in group.cells]
        return bool(times) and self.clock.fits(training + min(times))

    def _order(self, group: Group) -> tuple[bool, bool, bool]:
        """Sort models that were trained first, then groups that end in time by one process."""
        trained = bool(group.training.epochs) and group.training.there(self.workspace)
        return not trained, not self._ends(group, 1), not self._ends(group, self.clock.at_once)

    def _ends(self, group: Group, processes: int) -> bool:
        """Tell whether so many processes are likely to end the group in time."""
        training = training_left(group.training, self.workspace)
        cells = [cell.left(self.workspace) for cell in group.cells]
        return self.clock.fits(training + max(sum(cells) / processes, *cells))

    def _claim(self, group: Group) -> bool:
        """Train the model, or do a cell, unless other processes do; tell whether it did.

        A model that another process trains is waited for, however long a training takes: that one
        may be nearly over. Several processes begin with the longest cell of a group that ends in
        time, so that none is left with it. Else they take the cells as the plan has them.
        """
        if not group.training.there(self.workspace):
            try:
                with self._held(group.training.key):
                    if not self._begins(group, training_left(group.training, self.workspace)):
                        return False
                    self._train(group.training, group.cells)
                    return True
            except _Busy:
                self.waits = True
                return False
        cells = group.cells
        if self.clock.at_once > 1 and self._ends(group, self.clock.at_once):
            cells = tuple(sorted(cells, key=lambda cell: (cell.seconds > 0, -cell.seconds)))
        return any(map(self._measures, cells))

    def _measures(self, cell: Cell) -> bool:
        """Do a cell that ends in time, unless another process does; tell whether it did."""
        if not self.clock.fits(cell.left(self.workspace)):
            return False
        with suppress(_Busy), self._held(cell.key):
            if not self._over(cell):
                self._measure(cell)
                return True
        return False

    def _held(self, key: str) -> AbstractContextManager[None]:
        return held(self.workspace.work / HELD / key, _refuse)

    def _over(self, cell: Cell) -> bool:
        """Tell whether a cell is done, or was tried and failed, in this process or another."""
        return self.records.done(cell) or _read_note(self.workspace, cell.key) is not None

    def _train(self, training: Training, cells: Sequence[Cell]) -> None:
        """Train, unless another process did just now."""
        began = time.monotonic()
        new = not self.workspace.weights(training).exists()
        if all(map(self._over, cells)) or training.there(self.workspace):
            return

        def train() -> None:
            training.run(self.workspace)
            if (path := training.checkpoint(self.workspace)) and not path.is_file():
                raise GradveilError(
                    f"{shown(path)} is not there although its training has ended: remove the "
                    "folder, and it is trained again"
                )

        if self._tried(train, training.key, cells):
            self._learn("trained", training.key, training.seconds if new else None, began)

    def _measure(self, cell: Cell) -> None:
        began = time.monotonic()
        new = not cell.begun(self.workspace)

        def measure() -> None:
            try:
                result = cell.measure(self.workspace)
            except OtherSettingsError:  # it was begun with weights that were lost since
                self.tell(f"begun anew: {cell.key}, whose model was trained again")
                cell.forget(self.workspace)
                result = cell.measure(self.workspace)
            self.records.write(cell, self.workspace, result, time.monotonic() - began)

        if not self._tried(measure, cell.key, [cell]):
            return
        _note(self.workspace, cell.key).unlink(missing_ok=True)
        self.outcome.done.append(cell.key)
        self._learn("done", cell.key, cell.seconds if new else None, began)
        _archive(self.records, self.workspace, self.archive)

    def _learn(self, word: str, name: str, estimated: float | None, began: float) -> None:
        """Tell how long something took; learn from it where all of it was done now."""
        taken = time.monotonic() - began
        if estimated is None:
            self.tell(f"{word} {name} in {taken:.0f} s more, begun by an earlier run")
            return
        self.clock.learn(estimated, taken)
        self.tell(f"{word} {name} in {taken:.0f} s, estimated {estimated:.0f} s")

    def _tried(self, work: Callable[[], None], name: str, cells: Sequence[Cell]) -> bool:
        """Do some work; tell of a failure, and note it for these cells."""
        stop_if_signaled()
        try:
            work()
        except RAISED as error:
            if signaled():
                raise
            told = isinstance(error, GradveilError)
            reason = " ".join(str(error).split()) if told else one_line(error, 300)
            self.tell(f"failed {name}: {reason}")
            for cell in cells:
                self.outcome.failed[cell.key] = reason
                write_text(_note(self.workspace, cell.key), f"{reason}\n")
            return False
        finally:
            if torch.cuda.is_available():
                gc.collect()
                torch.cuda.synchronize()  # of a GPU that is lost all other cells would fail too
                torch.cuda.empty_cache()
        return True


def _note(workspace: Workspace, key: str) -> Path:
    """Return the file that says why a cell failed, for the process that started this one."""
    return workspace.work / "failed" / f"{key}.txt"


def _read_note(workspace: Workspace, key: str) -> str | None:
    try:
        return shown(read_bytes(_note(workspace, key), LONGEST).decode(errors="replace").strip())
    except MissingFileError:
        return None


def _archive(records: Records, workspace: Workspace, path: Path | None) -> None:
    if path is not None:
        records.archive(path, workspace.work / HELD / "archive")


def _clear(work: Path) -> None:
    """Remove what processes left that were killed after their last write."""
    for folder in (HELD, "weights", "cells"):
        for each in work.glob(f"{folder}/*"):
            clear_lock(each)
    for path in work.glob(f"weights/*/{RESUME}"):
        if path.with_name(FINAL).is_file():
            path.unlink(missing_ok=True)


def _to_stderr(text: str) -> None:
    print_line(text, error=True)


def run_queue(
    plan: Plan,
    records: Records,
    workspace: Workspace,
    *,
    minutes: float | None = None,
    archive: Path | None = None,
    engine: str = "local",
    at_once: int = 1,
    ray_address: str | None = None,
    say: Say | None = None,
) -> Outcome:
    """Work through what is missing, here, in `at_once` processes, or on a Ray cluster.

    All processes need the folders of work and records, which a cluster's machines must share.
    """
    if at_once < 1:
        raise GradveilError(f"at once {at_once}: it must be at least 1")
    for folder in (workspace.work, records.folders[0]):
        if folder.is_dir():
            refuse_ways_out(folder)
    # Before the work, which may take hours, and not when the first of it is to be written.
    for path in (workspace.work / HELD / CELL, records.folders[0] / CELL, archive):
        if path is not None:
            check_writable(path)
    for group in plan.groups:
        for cell in group.cells:
            _note(workspace, cell.key).unlink(missing_ok=True)  # of an earlier run
    if engine == "local" and at_once == 1:
        outcome = work_through(
            plan.groups, records, workspace, minutes=minutes, archive=archive, say=say
        )
        if not outcome.done:  # a run that was killed may have left the archive behind
            _archive(records, workspace, archive)
        return outcome
    cells = sum(len(group.cells) for group in plan.groups)
    task = Worker(plan.groups, records, workspace, minutes, archive)
    if engine == "ray":
        from gradveil.search.ray import RayEngine

        with RayEngine({}, ray_address) as cluster:
            cluster.run([task] * min(cluster.workers, cells), workspace.device)
    elif cells:
        _side_by_side(task, min(at_once, cells))
    _archive(records, workspace, archive)
    every = {cell.key: cell for group in plan.groups for cell in group.cells}
    done = [key for key, cell in every.items() if records.done(cell)]
    notes = {key: _read_note(workspace, key) for key in every if key not in done}
    failed = {key: note for key, note in notes.items() if note is not None}
    return Outcome(done, failed, [key for key in notes if key not in failed])


@dataclass(frozen=True)
class Worker:
    """A process that works through the queue beside others; it can be pickled."""

    groups: tuple[Group, ...]
    records: Records
    workspace: Workspace
    minutes: float | None
    archive: Path | None
    at_once: int = 1
    threads: int | None = None
    """Processor threads of torch; None leaves them as they are."""
    began: float = field(default_factory=time.time)
    """When the minutes begin: a process takes some until it can work."""

    def __call__(self, progress: bool = False) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        passed = (time.time() - self.began) / 60
        work_through(
            self.groups,
            self.records,
            self.workspace,
            minutes=None if self.minutes is None else self.minutes - passed,
            archive=self.archive,
            at_once=self.at_once,
        )


def _side_by_side(task: Worker, count: int) -> None:
    """Run the task in so many processes, and end them all where this one is stopped.

    They share the processors: threads of several processes that wait for each other's cores make
    all of them many times slower.
    """
    import multiprocessing

    task = replace(task, at_once=count, threads=max(1, torch.get_num_threads() // count))

    context = multiprocessing.get_context("spawn")  # a fork may not use the GPU
    processes = [context.Process(target=task, daemon=False) for _ in range(count)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join()
    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise GradveilError(
            f"{len(failed)} of {count} processes ended with status {failed[0]}: run the same "
            "command again to go on"
        )
