"""Real processes that end in the middle of a training on Flower's simulation engine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.core.tensor_files import read_safetensors

pytestmark = pytest.mark.slow
ROUNDS = 40


class Running:
    """A `gradveil federate` in a process, and the processes that it started, by their ids."""

    def __init__(self, out: Path) -> None:
        self.out, self.started = out, set[int]()
        words = "federate --data fashion-mnist-mini --model lenet --clients 3 --lr 0.05"
        words += f" --rounds {ROUNDS} --batch-size 1 --defense prune:0.5 --spy-rounds 1"
        words += f" --json --out {out}"
        self.log = out.parent / f"{out.name}-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "gradveil", *words.split()],
                env=os.environ | {"PYTHONWARNINGS": "ignore"},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_for(self, done: Callable[[], Any]) -> Any:
        """Wait until a function gives something, and remember all processes until then."""
        end = time.monotonic() + 240
        while time.monotonic() < end and self.process.poll() is None:
            self.started |= descendants(self.process.pid)
            if found := done():
                return found
            time.sleep(0.2)
        raise AssertionError(f"it ended with {self.process.poll()}: {self.said()}")

    def rounds(self) -> int:
        """Count the rounds that can be gone on from."""
        try:
            _, metadata = read_safetensors(self.out / "resume.safetensors")
        except Exception:
            return 0
        return len(json.loads(metadata["gradveil"]))

    def end(self) -> dict[str, Any]:
        """Wait for the end, and return what it wrote."""
        self.wait_for(lambda: (self.out / "model.safetensors").is_file())
        text, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, self.said()
        found: dict[str, Any] = json.loads(text)
        return found

    def said(self) -> str:
        return self.log.read_text()[-2_000:]

    def assert_gone(self) -> None:
        """Check that no process which it started is left, a while after its end."""
        end = time.monotonic() + 60
        while (left := self.started & alive()) and time.monotonic() < end:
            time.sleep(0.5)
        assert not left, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]


def table() -> list[tuple[int, int, str, str]]:
    lines = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    rows = [line.split(None, 3) for line in lines]
    return [(int(pid), int(parent), state, args) for pid, parent, state, args in rows]


def alive() -> set[int]:
    return {pid for pid, _, state, _ in table() if not state.startswith("Z")}


def descendants(pid: int, named: str = "") -> set[int]:
    rows, found = table(), {pid}
    while more := {row[0] for row in rows if row[1] in found} - found:
        found |= more
    return {row[0] for row in rows if row[0] in found - {pid} and named in row[3]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a training that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    running = Running(out)
    found = running.end()
    assert [row["clients"] for row in found["history"]] == [3] * ROUNDS
    running.assert_gone()
    return read_safetensors(out / "model.safetensors")[0]


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"


def assert_same(out: Path, wanted: dict[str, torch.Tensor]) -> None:
    found, _ = read_safetensors(out / "model.safetensors")
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_a_training_that_was_told_to_end_in_a_round_goes_on_to_the_same_result(
    out: Path, whole: dict[str, torch.Tensor]
) -> None:
    running = Running(out)
    running.wait_for(lambda: running.rounds() >= 2)
    running.process.send_signal(signal.SIGTERM)
    running.process.communicate(timeout=120)
    assert running.process.returncode not in (0, None), running.said()
    assert "Traceback" not in running.said()
    running.assert_gone()
    assert (out / "resume.safetensors").is_file()
    again = Running(out)
    assert [row["round"] for row in again.end()["history"]] == [*range(1, ROUNDS + 1)]
    again.assert_gone()
    assert_same(out, whole)


def test_a_server_that_was_killed_leaves_no_process_and_goes_on_to_the_same_result(
    out: Path, whole: dict[str, torch.Tensor]
) -> None:
    running = Running(out)
    running.wait_for(lambda: running.rounds() >= 2)
    running.process.kill()
    running.process.communicate(timeout=120)
    running.assert_gone()
    again = Running(out)
    again.end()
    again.assert_gone()
    assert_same(out, whole)


def test_rounds_go_on_when_the_process_of_a_client_is_killed(out: Path) -> None:
    running = Running(out)
    running.wait_for(lambda: running.rounds() >= 1)
    victims = running.wait_for(lambda: descendants(running.process.pid, "ray::ClientAppActor"))
    os.kill(min(victims), signal.SIGKILL)
    found = running.end()
    assert [row["round"] for row in found["history"]] == [*range(1, ROUNDS + 1)]
    clients = [row["clients"] for row in found["history"]]
    assert clients[-1] == 3 and sum(count < 3 for count in clients) <= 1, clients
    assert "all processes are started again" in running.log.read_text() or min(clients) == 3
    weights, _ = read_safetensors(out / "model.safetensors")
    assert all(bool(value.isfinite().all()) for value in weights.values())
    running.assert_gone()
