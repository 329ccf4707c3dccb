"""Trainings on Flower's engine, in processes: killed, stopped by signals, and two in one folder."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from breaking import content
from gradveil.core.stopping import STOPPED
from gradveil.federated.job import RESUME
from gradveil.search.ray import ORPHANED

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
ROUNDS = 40
COMMAND = (
    "federate --data fashion-mnist-mini --model breaking:linear --clients 2 --batch-size 1 "
    f"--rounds {ROUNDS} --lr 0.02 --defense prune-feedback:0.9 --spy-rounds 1,{ROUNDS} "
    "--attack closed-form --audited 2 --device cpu --json --out run"
)
MARK = "GRADVEIL_TESTED_RUN"  # in the environment of all processes of a run
SECONDS = 500.0  # for a machine that does other work too
# After a kill Ray's agents search for a server for ORPHANED seconds, and those that were just
# starting for 5 more: 10 to 17 s in all after 6 kills, on two cores at loads of 4 to 5.
LEFT = 2.0 * (ORPHANED + 5)


@dataclass
class Run:
    """A training in a process group, which works in the folder `run` of another."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.began = time.time()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradveil", *COMMAND.split()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, MARK: self.mark},
        )

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def wait_until(self, done: Callable[[], bool]) -> bool:
        """Wait for something, and tell whether it came before the process ended."""
        until = time.monotonic() + SECONDS
        while self.process.poll() is None:
            if done():
                return True
            assert time.monotonic() < until
            time.sleep(0.01)
        return False

    def in_a_round(self) -> bool:
        """Tell whether this process has made a round, so that it is in another."""
        try:
            return (self.out / RESUME).stat().st_mtime > self.began
        except FileNotFoundError:
            return False

    def in_a_round_or_after(self, moment: float) -> bool:
        return time.time() > moment or self.in_a_round()

    def end(self) -> tuple[int, list[str]]:
        """Return the status and what was said; nothing of the run may go on after a while."""
        _, said = self.process.communicate(timeout=SECONDS)
        until = time.monotonic() + LEFT
        while left := self.processes():
            assert time.monotonic() < until, left
            time.sleep(0.1)
        return self.process.returncode, said.splitlines()

    def processes(self) -> dict[int, str]:
        """Return the processes of the run, Flower's and Ray's too, wherever they hang.

        They are of its session, or have its mark, which Ray's agents wipe out with a new title.
        """
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                if (marked or int(session) == self.process.pid) and state != "Z":
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has ended, or is somebody else's
                continue
        return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nobody stopped."""
    run = Run(tmp_path_factory.mktemp("whole"))
    status, said = run.end()
    assert status == 0, said
    return run.out


def check_same(folder: Path, whole: Path) -> None:
    """Go on to the end, and compare with a training that nobody stopped."""
    run = Run(folder)
    status, said = run.end()
    assert status == 0, said
    ours, theirs = content(run.out), content(whole)
    assert ours.keys() == theirs.keys()
    assert [file for file in ours if ours[file] != theirs[file]] == []


def test_killed_at_ten_random_moments_it_goes_on_to_the_same_result(
    whole: Path, tmp_path: Path
) -> None:
    """Half of them in a round, half at any time before; the whole group, or its first process."""
    rng, kills = random.Random(0), 0
    while kills < 10:
        run = Run(tmp_path)
        if kills % 2:
            run.wait_until(run.in_a_round)
            time.sleep(rng.uniform(0, 0.3))
        else:  # however fast it is: each kill takes a few rounds at most
            run.wait_until(partial(run.in_a_round_or_after, run.began + rng.uniform(0, 20)))
        if run.process.poll() is None:
            (os.kill if kills % 5 == 0 else os.killpg)(run.process.pid, signal.SIGKILL)
        status, said = run.end()
        assert status == -signal.SIGKILL, said  # the rounds are enough for all kills
        kills += 1
    check_same(tmp_path, whole)


def test_a_signal_in_a_round_is_one_line_and_its_status_and_it_goes_on(
    whole: Path, tmp_path: Path
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for send in (os.kill, os.killpg):  # as `kill` does, and as a terminal
            run = Run(tmp_path)
            assert run.wait_until(run.in_a_round), run.end()
            send(run.process.pid, number)
            status, said = run.end()
            assert status == 128 + number and said[-1] == STOPPED, (number, send, said)
            assert sum("error:" in line for line in said) == 1, said
            assert not any("Traceback" in line for line in said), said
            assert not [*run.out.rglob("*.part"), *run.out.rglob(".lock")]
    check_same(tmp_path, whole)


def test_of_two_processes_in_one_folder_the_second_is_refused(whole: Path, tmp_path: Path) -> None:
    first = Run(tmp_path)
    lock = first.out / ".lock"
    assert first.wait_until(lambda: lock.is_file() and bool(lock.read_bytes()))
    second = Run(tmp_path)
    status, said = second.end()
    assert status == 2 and said == [
        f"error: process {first.process.pid} on {socket.gethostname()} is training into run: wait "
        "for it, or choose another --out"
    ]
    assert first.end()[0] == 0 and content(first.out) == content(whole)
