"""The command line, called in this process: its status and what it printed on both streams."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # typer 0.20 imports names that click 8.5 means to remove
    warnings.simplefilter("ignore", DeprecationWarning)
    from gradveil.cli import run


@dataclass(frozen=True)
class Outcome:
    status: int
    shown: str
    said: str

    @property
    def result(self) -> dict[str, Any]:
        """The one JSON object on the standard output."""
        found = json.loads(self.shown)
        assert isinstance(found, dict) and self.shown.count("\n") == 1
        return found

    @property
    def error(self) -> str:
        """The one line that says what is wrong; progress bars aside, there is nothing else."""
        lines = [line for line in self.said.splitlines() if not line.startswith("training ")]
        assert (
            self.status == 2
            and not self.shown
            and len(lines) == 1
            and lines[0].startswith("error: ")
        ), self
        return lines[0].removeprefix("error: ")


Command = Callable[..., Outcome]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let audits write empty pictures: to draw them takes most of the time of a quick command."""

    def touch(_: object, __: str, path: Path) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return True

    for name in ("draw_grid", "draw_frames"):
        monkeypatch.setattr(f"gradveil.report.pictures.{name}", touch)


@pytest.fixture
def gradveil(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Command:
    """In an empty current folder, without data sets from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "no-data"))

    def call(line: str, *more: str) -> Outcome:
        capsys.readouterr()
        status = run([*line.split(), *more])
        return Outcome(status, *capsys.readouterr())

    return call
