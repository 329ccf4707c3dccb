"""Every job that is killed, or meets a full disk, at any of its writes goes on to the same result.

The quick tests take a few writes of each job, the slow ones all of them.
"""

import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from breaking import content
from gradveil.models import build
from gradveil.models.checkpoints import save_checkpoint

Start = Callable[..., BaseProcess]
QUICK = 4  # boundaries of the quick tests
RUN = "import breaking\nbreaking.run(*arguments)"
COMMON = "--data fashion-mnist-mini --model mlp --device cpu --json"
ATTACK = "--attack closed-form"  # which costs nothing
COMMANDS = {
    "train": f"train {COMMON} --epochs 2 --lr 0.02 --fraction 0.05 --batch-size 50 --save-at 0,1",
    "audit": f"audit {COMMON} {ATTACK} --images 2 --victims-at-once 1",
    "several": f"audit {COMMON} {ATTACK} --images 2 --defense none --defense prune:0.5",
    "search": f"search {COMMON} {ATTACK} --trials 4 --keep 2 --images 2 --audit-images 2 "
    "--threshold -1000 --checkpoint CHECKPOINT",
}


@dataclass
class Broken:
    """A run that was broken: its status, its last words, and the boundaries that it passed."""

    status: int
    said: list[str]
    passed: int


@dataclass
class Runner:
    """Runs commands in processes of their own."""

    start: Start
    folder: Path

    def __call__(self, name: str, out: Path, how: str = "whole", at: int = 0) -> Broken:
        command = COMMANDS[name].replace("CHECKPOINT", str(self.checkpoint))
        log = self.folder / "log"
        shutil.rmtree(log, ignore_errors=True)
        process = self.start(RUN, how, at, [*command.split(), "--out", str(out)], log)
        process.join(300)
        assert process.exitcode is not None
        said = [line for line in (log / "err").read_text().splitlines() if line.strip()]
        return Broken(process.exitcode, said, int((log / "count").read_text()))

    @property
    def checkpoint(self) -> Path:
        path = self.folder / "weights.safetensors"
        if not path.exists():
            model = build("mlp", channels=1, size=28, classes=10, seed=9)
            save_checkpoint(path, model, {"test_accuracy": 0.125})
        return path

    @cache  # noqa: B019  # the fixture lives as long as the session
    def unbroken(self, name: str) -> tuple[Path, int]:
        """The folder of a run that nothing broke, and its boundaries."""
        out = self.folder / name
        done = self(name, out)
        assert done.status == 0, done.said
        return out, done.passed

    __hash__ = object.__hash__


@pytest.fixture(scope="session")
def runner(start_process: Start, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(start_process, tmp_path_factory.mktemp("breaks"))


def check(runner: Runner, name: str, how: str, at: int, out: Path) -> None:
    """Break a run at this boundary, go on, and compare with a run that nothing broke."""
    whole, _ = runner.unbroken(name)
    broken = runner(name, out, how, at)
    if how == "kill":
        assert broken.status == -signal.SIGKILL, f"boundary {at}: {broken.said}"
    elif broken.status:  # else nothing was left to be written
        errors = [line for line in broken.said if line.startswith("error:")]
        assert broken.status == 2 and len(errors) == 1, f"boundary {at}: {broken.said}"
        assert errors == broken.said[-1:] and "o space left on" in errors[0], f"boundary {at}"
        assert not [*out.rglob("*.part"), *out.rglob(".lock")], f"boundary {at}"
    again = runner(name, out)
    assert again.status == 0, f"boundary {at}: {again.said}"
    ours, theirs = content(out), content(whole)
    assert ours.keys() == theirs.keys(), f"boundary {at}"
    assert [file for file in ours if ours[file] != theirs[file]] == [], f"boundary {at}"
    shutil.rmtree(out)


@pytest.mark.parametrize("how", ["kill", "full"])
@pytest.mark.parametrize("name", ["train", "several"])
def test_broken_at_some_of_its_writes_a_job_goes_on_to_the_same_result(
    runner: Runner, name: str, how: str, tmp_path: Path
) -> None:
    _, boundaries = runner.unbroken(name)
    for at in random.Random(f"{name} {how}").sample(range(boundaries), QUICK // 2):
        check(runner, name, how, at, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "full"])
@pytest.mark.parametrize("name", COMMANDS)
def test_broken_at_any_of_its_writes_a_job_goes_on_to_the_same_result(
    runner: Runner, name: str, how: str, tmp_path: Path
) -> None:
    for at in range(runner.unbroken(name)[1]):
        check(runner, name, how, at, tmp_path / "run")
