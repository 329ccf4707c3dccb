"""A progress bar on the error stream: trials done, the best so far, the pace, the time left."""

from collections import Counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

CALM = 60.0  # seconds of speed that the pace and the time left are reckoned from


class _Pace(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.2f}/s")


class Bar:
    """Silent unless `shown`."""

    def __init__(self, shown: bool, objective: str) -> None:
        self._shown, self._objective = shown, objective
        self._console = Console(stderr=True)
        columns = (
            TextColumn("search"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            _Pace(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(
            *columns, console=self._console, disable=not shown, speed_estimate_period=CALM
        )
        self._task = self._progress.add_task("", total=None)

    def update(self, states: Counter[str], best: float | None, target: int) -> None:
        """How many trials ended in each state, and the lowest mean so far."""
        done = sum(states.values())
        if not self._progress.live.is_started:
            if done >= target:  # nothing to do, and an empty bar would be a line of its own
                return
            self._progress.reset(self._task, total=target, completed=done)
            self._progress.start()
        parts = [f"best {self._objective} {best:.4g}"] if best is not None else []
        parts += [f"{states[name]} {name}" for name in ("inaccurate", "dropped") if states[name]]
        self._progress.update(
            self._task, completed=done, total=target, description=", ".join(parts)
        )

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._shown:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def stop(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
