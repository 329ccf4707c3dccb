"""Several processes, one study: nothing is lost, nothing done twice, and a killed one's trials are taken up."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from gradveil.search import storage as owners
from gradveil.search.space import draw, policy_of
from gradveil.search.storage import SILENCE, lives, started, this_process

SCRIPT = Path(__file__).with_name("searching.py")
AT_ONCE, TARGET = 4, 30
COUNT = itertools.count()


@pytest.fixture(params=["journal", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "journal":
        return str(tmp_path / "study.log")
    url: str = request.getfixturevalue("postgres")
    import psycopg2

    name = f"shared{next(COUNT)}"
    connection = psycopg2.connect(url)
    connection.autocommit = True
    connection.cursor().execute(f"CREATE DATABASE {name}")
    connection.close()
    return url.replace("/postgres", f"/{name}")


def start(
    storage: str, log: Path, sampler: str = "random", seconds: float = 0.01, at_once: int = AT_ONCE
) -> subprocess.Popen[bytes]:
    arguments = [storage, sampler, str(at_once), str(TARGET), str(log), str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(SCRIPT), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def evaluations(log: Path) -> list[tuple[int, int]]:
    """The process and the number of each, as they came."""
    text = log.read_text() if log.is_file() else ""
    return [
        (int(line.split()[0]), int(line.split()[1]))
        for line in text.splitlines(keepends=True)
        if line.endswith("\n")
    ]


def wait_until_evaluated(log: Path, process: subprocess.Popen[bytes], count: int) -> None:
    until = time.monotonic() + 60
    while sum(pid == process.pid for pid, _ in evaluations(log)) < count:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.002)


def check_all_finished(searching: ModuleType, storage: str, sampler: str = "random") -> None:
    study = searching.join(searching.place(storage), sampler)
    finished = study.finished(TARGET)
    assert [trial.number for trial in finished] == list(range(TARGET))
    for trial in finished:
        assert trial.policy == policy_of(draw(searching.SEED, trial.number))
        assert trial.values == {
            name: tuple(values) for name, values in searching.toy(trial.policy).items()
        }
        assert trial.state == searching.state(trial)
    assert study.claim(AT_ONCE, TARGET) == [] and study.busy(TARGET) == 0
    study.close()


def test_two_processes_share_a_study_and_each_trial_is_evaluated_once(
    searching: ModuleType, tmp_path: Path
) -> None:
    """From the start, when both make the tables. The next test shows the same for the other storages."""
    storage, log = f"sqlite:///{tmp_path / 'study.db'}", tmp_path / "log"
    processes = [start(storage, log), start(storage, log)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert sorted(number for _, number in evaluations(log)) == list(range(TARGET))
    assert {pid for pid, _ in evaluations(log)} == {process.pid for process in processes}
    check_all_finished(searching, storage)


def test_two_share_the_trials_and_when_one_is_killed_the_other_finishes_all(
    storage: str, searching: ModuleType, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    killed = start(storage, log, seconds=0.05)
    other = start(storage, log, seconds=0.05)
    wait_until_evaluated(log, killed, AT_ONCE + 2)
    killed.send_signal(signal.SIGKILL)
    assert other.wait(60) == 0 and killed.wait() == -signal.SIGKILL
    counts = Counter(number for _, number in evaluations(log))
    assert sorted(counts) == list(range(TARGET))
    twice = {number for number, times in counts.items() if times > 1}
    begun = [number for pid, number in evaluations(log) if pid == killed.pid]
    assert len({pid for pid, _ in evaluations(log)}) == 2
    assert (
        0 < len(twice) <= AT_ONCE and twice <= set(begun[-AT_ONCE:]) and max(counts.values()) == 2
    )
    check_all_finished(searching, storage)


def test_a_search_that_is_killed_and_resumed_tries_what_an_unbroken_one_tries(
    searching: ModuleType, tmp_path: Path
) -> None:
    sampler = "tpe"  # whose every question depends on all answers before
    unbroken = searching.join(tmp_path / "unbroken.log", sampler)
    searching.search(unbroken, AT_ONCE, TARGET, tmp_path / "unbroken", 0.0)
    log, storage = tmp_path / "log", str(tmp_path / "killed.log")
    for after in (2, 9):
        process = start(storage, log, sampler, seconds=0.01)
        wait_until_evaluated(log, process, after)
        process.send_signal(signal.SIGKILL)
        process.wait()
    resumed = searching.join(Path(storage), sampler)
    assert 0 < len(resumed.finished(TARGET)) < TARGET
    searching.search(resumed, AT_ONCE, TARGET, log, 0.0)
    assert resumed.finished(TARGET) == unbroken.finished(TARGET)
    for study in (resumed, unbroken):
        study.close()


def test_a_process_killed_while_it_claims_holds_up_nobody(
    storage: str, searching: ModuleType
) -> None:
    code = "import sys, time; sys.path.insert(0, sys.argv[1]); import searching as s\n"
    code += "study = s.join(s.place(sys.argv[2]))\nwith study._place.alone(): print('in', flush=True); time.sleep(60)"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(SCRIPT.parent), storage], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"in\n"
    waiting = start(storage, Path(os.devnull), seconds=0.0)
    time.sleep(3)
    assert waiting.poll() is None
    holder.send_signal(signal.SIGKILL)
    assert waiting.wait(30) == 0
    holder.communicate()
    check_all_finished(searching, storage)


def test_an_owner_is_dead_when_its_process_is_gone_or_it_was_silent_for_long() -> None:
    me = this_process()
    now = time.time()
    assert lives(me.entry(now))
    assert not lives(None) and not lives(me.entry(None)) and not lives(me.entry(now - SILENCE - 1))
    assert not lives({**me.entry(now), "start": "1"})  # another process with the same number
    elsewhere = {**me.entry(now), "host": "elsewhere", "pid": 2**22 + 1}
    assert lives(elsewhere) and not lives({**elsewhere, "beat": now - SILENCE - 1})


def test_a_killed_process_is_gone_before_its_parent_asks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert started(child.pid) is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert started(child.pid) is None
    child.communicate()
    assert started(child.pid) is None


def test_without_a_process_table_a_process_is_asked_by_a_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(owners, "PROCESSES", tmp_path)
    assert started(os.getpid()) == "running"
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert started(child.pid) is None
