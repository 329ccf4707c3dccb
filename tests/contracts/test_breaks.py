"""Every job that is killed, or meets a full disk, at any of its writes goes on to the same result.

The quick tests take a few writes of each job, the slow ones all of them. Of a search, which has
hundreds, they take the first, the middle and the last of each kind: of a step in writing a file.
Federated trainings call their clients in the same process here, so that they break at the clients'
writes too; tests/federated/test_stops.py kills those that run on Flower's engine.
"""

import json
import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from breaking import Spots, content
from gradveil.models import build
from gradveil.models.checkpoints import save_checkpoint

Start = Callable[..., BaseProcess]
RUN = "import breaking\nbreaking.run(*arguments)"
COMMON = "--data fashion-mnist-mini --model breaking:linear --device cpu --json"
ATTACK = "--attack closed-form"  # which costs nothing
NEED_NO_SPACE = ("to be named", "named")  # boundaries of which a full disk makes nothing
COMMANDS = {
    "train": f"train {COMMON} --epochs 2 --lr 0.02 --fraction 0.05 --batch-size 50 --save-at 0,1",
    "audit": f"audit {COMMON} {ATTACK} --images 2 --victims-at-once 1",
    "several": f"audit {COMMON} {ATTACK} --images 2 --defense none --defense prune:0.5",
    "search": f"search {COMMON} {ATTACK} --trials 4 --keep 2 --images 2 --audit-images 2 "
    "--threshold -1e9 --checkpoint CHECKPOINT",
    "federate": f"federate {COMMON} --clients 2 --rounds 2 --batch-size 1 --lr 0.02 --spy-rounds 1 "
    "--defense prune-feedback:0.9",
    "spied": f"federate {COMMON} {ATTACK} --clients 2 --rounds 1 --batch-size 1 --spy-rounds 1",
    "reproduce": "reproduce small --device cpu --json --records run/records "
    "--archive run/records.tar.gz",
    "tune": f"tune {COMMON} --images 2 --held-out 2 --trials 3 --work 42",
    "assess": f"assess {COMMON} --images 2 --epochs 1 --defense prune:0.5 --budget 10",
}


@dataclass
class Broken:
    """A run that was broken: its status, its last words, and the boundaries that it passed."""

    status: int
    said: list[str]
    passed: list[str]


@dataclass
class Runner:
    """Runs commands in processes of their own."""

    start: Start
    folder: Path

    def begin(self, name: str, out: Path, how: str, at: int | Spots, log: Path) -> BaseProcess:
        words = COMMANDS[name].replace("CHECKPOINT", str(self.checkpoint)).split()
        words = [*words, "--out", out.name]  # records hold a digest of such paths
        warned = "default" if words[0] == "federate" else "error"  # a spy warns of its files
        out.parent.mkdir(exist_ok=True)
        return self.start(RUN, how, at, words, log, out.parent, warned=warned)

    def __call__(self, name: str, out: Path, how: str = "whole", at: int | Spots = 0) -> Broken:
        log = self.folder / "log"
        shutil.rmtree(log, ignore_errors=True)
        process = self.begin(name, out, how, at, log)
        process.join(300)
        assert process.exitcode is not None
        said = [line for line in (log / "err").read_text().splitlines() if line.strip()]
        return Broken(process.exitcode, said, (log / "boundaries").read_text().splitlines())

    @property
    def checkpoint(self) -> Path:
        path = self.folder / "weights.safetensors"
        if not path.exists():
            model = build("breaking:linear", channels=1, size=28, classes=10, seed=9)
            save_checkpoint(path, model, {"test_accuracy": 0.125})
        return path

    @cache  # noqa: B019  # the fixture lives as long as the session
    def unbroken(self, name: str) -> tuple[Path, list[str]]:
        """The folder of a run that nothing broke, and its boundaries."""
        out = self.folder / name / "run"
        done = self(name, out)
        assert done.status == 0, done.said
        return out, done.passed

    __hash__ = object.__hash__


@pytest.fixture(scope="session")
def runner(start_process: Start, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(start_process, tmp_path_factory.mktemp("breaks"))


def check(runner: Runner, name: str, how: str, at: int, out: Path) -> None:
    """Break a run at this boundary, go on, and compare with a run that nothing broke."""
    check_end(runner(name, out, how, at), how, out, f"boundary {at}")
    check_same(runner, name, out, f"boundary {at}")


def check_end(broken: Broken, how: str, out: Path, where: str) -> None:
    if how == "kill":
        assert broken.status == -signal.SIGKILL, f"{where}: {broken.said}"
    elif broken.status:  # else nothing was left to be written
        errors = [line for line in broken.said if line.startswith("error:")]
        assert broken.status == 2 and len(errors) == 1, f"{where}: {broken.said}"
        assert errors == broken.said[-1:] and "o space left on" in errors[0], where
        assert not [*out.rglob("*.part"), *out.rglob(".lock")], where


def check_same(runner: Runner, name: str, out: Path, where: str) -> None:
    """Go on, and compare with a run that nothing broke."""
    again = runner(name, out)
    assert again.status == 0, f"{where}: {again.said}"
    ours, theirs = content(out), content(runner.unbroken(name)[0])
    assert ours.keys() ^ theirs.keys() == set(), where
    assert [file for file in ours if ours[file] != theirs[file]] == [], where
    shutil.rmtree(out)


@pytest.mark.parametrize(
    ("name", "how"),
    [("train", "full"), ("audit", "kill"), ("federate", "full")],
)
def test_broken_at_one_of_its_writes_a_job_goes_on_to_the_same_result(
    runner: Runner, name: str, how: str, tmp_path: Path
) -> None:
    count = len(runner.unbroken(name)[1])
    check(runner, name, how, random.Random(f"{name} {how}").randrange(count), tmp_path / "run")


@pytest.mark.parametrize("name", ["train", "audit"])
def test_of_two_processes_in_one_folder_the_second_is_refused_and_told_of_the_first(
    runner: Runner, name: str, tmp_path: Path
) -> None:
    whole, _ = runner.unbroken(name)
    out = tmp_path / "run"
    first = runner.begin(name, out, "whole", 0, tmp_path / "log")
    until = time.monotonic() + 120
    while not ((out / ".lock").is_file() and (out / ".lock").read_bytes()):
        assert first.is_alive() and time.monotonic() < until
        time.sleep(0.001)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)  # it holds the folder as long as the test needs
    try:
        second = runner(name, out)
        assert second.status == 2 and not second.passed
        doing = "training" if name == "train" else "auditing"
        assert second.said == [
            f"error: process {first.pid} on {socket.gethostname()} is {doing} into run: wait for "
            "it, or choose another --out"
        ]
    finally:
        os.kill(first.pid, signal.SIGCONT)
    first.join(300)
    assert first.exitcode == 0 and content(out) == content(whole)


@pytest.mark.slow
def test_two_processes_work_through_one_reproduction_to_the_same_records(
    runner: Runner, tmp_path: Path
) -> None:
    whole, _ = runner.unbroken("reproduce")
    out = tmp_path / "run"
    both = [runner.begin("reproduce", out, "whole", 0, tmp_path / name) for name in ("a", "b")]
    for process in both:
        process.join(300)
        assert process.exitcode == 0
    found = [json.loads((tmp_path / name / "out").read_text()) for name in ("a", "b")]
    assert sum(len(each["done"]) for each in found) == 3 and not any(e["failed"] for e in found)
    assert content(out) == content(whole)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "full"])
@pytest.mark.parametrize("name", ["train", "audit", "federate", "reproduce"])
def test_broken_at_any_of_its_writes_a_job_goes_on_to_the_same_result(
    runner: Runner, name: str, how: str, tmp_path: Path
) -> None:
    for at, kind in enumerate(runner.unbroken(name)[1]):
        if how == "kill" or not kind.startswith(NEED_NO_SPACE):
            check(runner, name, how, at, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "full"])
@pytest.mark.parametrize("name", ["several", "search", "spied", "tune"])
def test_broken_at_write_after_write_a_long_job_goes_on_to_the_same_result(
    runner: Runner, name: str, how: str, tmp_path: Path
) -> None:
    """One run, which each time goes on to the next boundary: whole runs would take an hour."""
    out, counts = tmp_path / "run", Counter(runner.unbroken(name)[1])
    left = {
        kind: {*range(count)} if name == "several" else {0, count // 2, count - 1}
        for kind, count in counts.items()
        if how == "kill" or not kind.startswith(NEED_NO_SPACE)
    }
    passed: Counter[str] = Counter()
    while any(left.values()):
        spots = {kind: [n - passed[kind] for n in numbers] for kind, numbers in left.items()}
        broken = runner(name, out, how, spots)
        check_end(broken, how, out, f"{left}")
        assert broken.status, f"never came to {left}"
        for kind in broken.passed:
            left.get(kind, set()).discard(passed[kind])
            passed[kind] += 1
    check_same(runner, name, out, how)


@pytest.mark.slow
def test_an_assessment_killed_in_each_of_its_parts_goes_on_to_the_same_result(
    runner: Runner, tmp_path: Path
) -> None:
    """One run, which each time goes on to the next part: a run takes ten seconds."""
    out = tmp_path / "run"
    parts = {
        "named settings.json": 0,
        "written doctor.json": 0,
        "named resume.ckpt": 0,  # a training is at its end
        "named metrics.csv": 0,
        "half written records.jsonl": 4,
        "written records.jsonl": 8,
        "to be named index.html": 0,
        "written assessment.json": 0,
    }
    for kind, number in parts.items():
        broken = runner("assess", out, "kill", {kind: [number]})
        check_end(broken, "kill", out, kind)
    check_same(runner, "assess", out, "each of its parts")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_ten_random_moments_a_job_goes_on_to_the_same_result(
    runner: Runner, name: str, tmp_path: Path
) -> None:
    """Five runs, each killed twice."""
    whole, _ = runner.unbroken(name)
    began = time.monotonic()
    assert runner(name, tmp_path / "again" / "run").status == 0
    seconds, rng = time.monotonic() - began, random.Random(name)
    for number in range(5):
        out, kills = tmp_path / str(number) / "run", 0
        while kills < 2:
            process = runner.begin(name, out, "whole", 0, tmp_path / "log")
            process.join(rng.uniform(0, seconds))
            process.kill()
            process.join(60)
            if process.exitcode == 0:  # it was faster than before: once more
                shutil.rmtree(out)
            kills += process.exitcode == -signal.SIGKILL
        assert runner(name, out).status == 0
        assert content(out) == content(whole)
