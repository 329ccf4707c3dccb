"""A progress bar on the error stream: attack iterations over all chunks, with the time left."""

from collections.abc import Iterable

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gradveil.attacks import Attack
from gradveil.audits.records import Key

CALM = 30.0  # seconds of speed that the time left is reckoned from


class Bar:
    """Counts the work of each part in iterations times images, so that parts of any size move it alike. Silent unless `shown`."""

    def __init__(self, shown: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
        )
        console = Console(stderr=True)
        self._progress = Progress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            disable=not shown,
            speed_estimate_period=CALM,
        )
        self._done = 0.0

    def start(self, parts: Iterable[tuple[Attack, int]]) -> None:
        """`parts` are those to be done, each an attack and its images."""
        total = sum(work(attack, images) for attack, images in parts)
        if total:  # else it would print an empty line
            self._task = self._progress.add_task("audit", total=total)
            self._progress.start()

    def begin(self, key: Key) -> None:
        kind, name, chunk = key
        self._progress.update(
            self._task,
            description=f"positive control {name}"
            if kind == "positive"
            else f"{name}, chunk {chunk + 1}",
        )

    def step(self, attack: Attack, images: int, done: int, of: int) -> None:
        self._progress.update(
            self._task, completed=self._done + work(attack, images) * done / max(of, 1)
        )

    def finish(self, attack: Attack, images: int) -> None:
        self._done += work(attack, images)
        self._progress.update(self._task, completed=self._done)

    def stop(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()


def work(attack: Attack, images: int) -> float:
    return float(getattr(attack, "steps", 1) * getattr(attack, "restarts", 1) * images)
