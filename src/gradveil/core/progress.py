"""The progress bar of every job, on the error stream: the task, how far, the time left."""

import time
from collections.abc import Mapping
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from gradveil.core.stopping import stop_if_signaled
from gradveil.core.text import SafeConsole

LONG = 60.0  # seconds from which on a job says beforehand how long it takes


def spoken(seconds: float) -> str:
    """Write a time as people say it: 40 s, 12 min, 3 h 40."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d}"


def foretold(seconds: float, cheaper: Mapping[str, float]) -> str:
    """Say how long a job takes, and what options would shorten it to how long."""
    others = [f"{option}: {spoken(each)}" for option, each in cheaper.items() if each < seconds]
    return "; ".join([f"about {spoken(seconds)} on this machine", *others])


class _TimeLeft(TimeRemainingColumn):
    """The seconds that the job says are left, or else what rich makes of the bar's speed."""

    def render(self, task: Task) -> Text:
        left: float | None = task.fields["left"]
        if left is None or task.finished:
            return super().render(task)
        minutes, seconds = divmod(round(left), 60)
        return Text(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}", style="progress.remaining")


class Bar:
    """Show how much of `total` is done; print nothing unless `shown`.

    `counted` shows "12/50" in place of a percentage. The time left is what the job says, or else
    reckoned from the speed of the last `calm` seconds.
    """

    def __init__(self, shown: bool, *, counted: bool = False, calm: float = 30.0) -> None:
        amount: ProgressColumn = MofNCompleteColumn() if counted else TaskProgressColumn()
        self.shown = shown
        self._console = SafeConsole(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            amount,
            TimeElapsedColumn(),
            TextColumn("left"),
            _TimeLeft(),
            TextColumn("{task.fields[news]}", markup=False),
            console=self._console,
            disable=not shown,
            speed_estimate_period=calm,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=None, news="", left=None)

    def start(self, title: str, total: float, done: float = 0) -> None:
        """Begin with `done` of `total`; where nothing is left to do, no bar is shown."""
        self._progress.reset(self._task, total=total, completed=int(done), description=title)
        if done < total and not self._progress.live.is_started:
            self._progress.start()

    def update(
        self,
        done: float | None = None,
        *,
        total: float | None = None,
        title: str | None = None,
        news: str | None = None,
        left: float | None = None,
    ) -> None:
        """Move the bar; arguments that are None change nothing. `news` stands at its end.

        `left` are the seconds that the job will still take.

        A job that moves its bar ends here after a signal, whoever may have caught its error.
        """
        stop_if_signaled()
        task = self._progress.tasks[0]
        said: dict[str, Any] = {
            "news": task.fields["news"] if news is None else news,
            "left": task.fields["left"] if left is None else left,
        }
        self._progress.update(self._task, completed=done, total=total, description=title, **said)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.shown:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the bar as it stands. Nothing is printed where it never started."""
        if self._progress.live.is_started:
            self._progress.stop()


class Iterations:
    """Follow the iterations of an attack: a bar, and once how long all of them take.

    It is called with (iterations done, iterations in all). `option` is what shortens the job.
    """

    TIMED = 3  # iterations, after the first, which has what is done but once

    def __init__(self, bar: Bar, title: str, option: str) -> None:
        self.bar, self.title, self.option = bar, title, option
        self.began: tuple[int, float] | None = None
        self.said = False

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self.began is None or done <= self.began[0]:  # the next attack begins
            self.began = done, now
            self.bar.start(self.title, total, done)
        first, since = self.began
        if not self.said and done >= first + self.TIMED:
            self.said = True
            whole = (now - since) / (done - first) * total
            fewer = total // 10
            if whole > LONG and fewer:
                self.bar.say(foretold(whole, {f"{self.option} {fewer}": whole * fewer / total}))
        self.bar.update(done)
