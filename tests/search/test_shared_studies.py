"""Several processes, one study: nothing is lost or done twice, and a killed one is replaced."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy.exc import OperationalError

from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.search import owners
from gradveil.search.owners import SILENCE, OwnerEntry, lives, this_process
from gradveil.search.space import Trial, draw, policy_of
from gradveil.transforms import Policy

FOLDER = Path(__file__).parent
Start = Callable[..., BaseProcess]
AT_ONCE, TARGET = 4, 26
COUNT = itertools.count()


@pytest.fixture(params=["journal", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "journal":
        return str(tmp_path / "study.log")
    return new_database(request.getfixturevalue("postgres").url)


def new_database(url: str) -> str:
    import psycopg2

    name = f"shared{next(COUNT)}"
    connection = psycopg2.connect(url)
    connection.autocommit = True
    connection.cursor().execute(f"CREATE DATABASE {name}")
    connection.close()
    return url.replace("/postgres", f"/{name}")


@pytest.fixture
def start(start_process: Callable[..., BaseProcess]) -> Callable[..., BaseProcess]:
    """Start a process that searches."""
    code = f"sys.path.insert(0, {str(FOLDER)!r})\nimport searching\nsearching.work(*arguments)"

    def start(
        storage: str,
        log: Path,
        sampler: str = "random",
        seconds: float = 0.01,
        at_once: int = AT_ONCE,
        warned: str = "error",
    ) -> BaseProcess:
        return start_process(code, storage, sampler, at_once, TARGET, log, seconds, warned=warned)

    return start


def status(process: BaseProcess, seconds: float = 60.0) -> int | None:
    """Wait for the end of a process; None where it has not ended in time."""
    process.join(seconds)
    return process.exitcode


def evaluations(log: Path) -> list[tuple[int, int]]:
    """The process and the number of each, as they came."""
    text = log.read_text() if log.is_file() else ""
    return [
        (int(line.split()[0]), int(line.split()[1]))
        for line in text.splitlines(keepends=True)
        if line.endswith("\n")
    ]


def wait_until_evaluated(log: Path, process: BaseProcess, count: int) -> None:
    until = time.monotonic() + 60
    while sum(pid == process.pid for pid, _ in evaluations(log)) < count:
        assert process.is_alive() and time.monotonic() < until
        time.sleep(0.002)


def check_all_finished(searching: ModuleType, storage: str, sampler: str = "random") -> None:
    study = searching.join(searching.place(storage), sampler)
    finished = study.finished(TARGET)
    assert [trial.number for trial in finished] == list(range(TARGET))
    for trial in finished:
        assert trial.tried == policy_of(draw(searching.SEED, trial.number))
        assert trial.values == {
            name: tuple(values) for name, values in searching.toy(trial.tried).items()
        }
        assert trial.state == searching.state(trial)
    assert study.claim(AT_ONCE, TARGET) == [] and study.busy(TARGET) == 0
    study.close()


def test_two_processes_share_a_study_and_each_trial_is_evaluated_once(
    searching: ModuleType, tmp_path: Path, start: Start
) -> None:
    """From the start, when both make the tables; the next test is for the other storages."""
    storage, log = f"sqlite:///{tmp_path / 'study.db'}", tmp_path / "log"
    processes = [start(storage, log), start(storage, log)]
    assert [status(process) for process in processes] == [0, 0]
    assert sorted(number for _, number in evaluations(log)) == list(range(TARGET))
    assert {pid for pid, _ in evaluations(log)} == {process.pid for process in processes}
    check_all_finished(searching, storage)


def test_two_share_the_trials_and_when_one_is_killed_the_other_finishes_all(
    storage: str, searching: ModuleType, tmp_path: Path, start: Start
) -> None:
    log = tmp_path / "log"
    killed = start(storage, log, seconds=0.05)
    other = start(storage, log, seconds=0.05)
    wait_until_evaluated(log, killed, AT_ONCE + 2)
    killed.kill()
    assert status(other) == 0 and status(killed) == -signal.SIGKILL
    counts = Counter(number for _, number in evaluations(log))
    assert sorted(counts) == list(range(TARGET))
    twice = {number for number, times in counts.items() if times > 1}
    begun = [number for pid, number in evaluations(log) if pid == killed.pid]
    assert len({pid for pid, _ in evaluations(log)}) == 2
    assert (
        0 < len(twice) <= AT_ONCE and twice <= set(begun[-AT_ONCE:]) and max(counts.values()) == 2
    )
    check_all_finished(searching, storage)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_two_that_lose_their_database_go_on_when_it_is_back(
    postgres: Any, searching: ModuleType, tmp_path: Path, start: Start, how: signal.Signals
) -> None:
    storage, log = new_database(postgres.url), tmp_path / "log"
    processes = [start(storage, log, seconds=0.05, warned="ignore") for _ in range(2)]
    for process in processes:
        wait_until_evaluated(log, process, 2)
    postgres.stop(how)
    before = len(evaluations(log))
    time.sleep(1)
    assert all(process.is_alive() for process in processes)
    postgres.start()
    assert [status(process) for process in processes] == [0, 0]
    counts = Counter(number for _, number in evaluations(log))
    assert sorted(counts) == list(range(TARGET)) and before < TARGET
    check_all_finished(searching, storage)


def test_a_database_that_stays_away_is_told_in_one_line_without_its_password(
    postgres: Any, searching: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = searching.join(new_database(postgres.url))
    study.claim(1, 4)
    monkeypatch.setattr("gradveil.search.storage.AWAY", 1.0)
    postgres.stop(signal.SIGQUIT)
    try:
        with (
            pytest.warns(GradveilWarning, match="does not answer .*: trying again for 1 s"),
            pytest.raises(GradveilError, match="cannot be used: ") as caught,
        ):
            study.claim(1, 4)
    finally:
        postgres.start()
    assert "\n" not in str(caught.value) and "secret-word" not in str(caught.value)
    assert [trial.number for trial in study.claim(1, 4)] == [1]
    study.close()


def test_a_claim_that_was_never_answered_is_given_out_by_the_next(
    searching: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was lost after the trials were made."""
    study = searching.join(f"sqlite:///{tmp_path / 'study.db'}")
    assert [trial.number for trial in study.claim(2, 8)] == [0, 1]
    make, made = study._create, []

    def lost(number: int) -> object:
        made.append(make(number))
        raise OperationalError("SELECT 1", None, Exception("the server closed the connection"))

    with monkeypatch.context() as patch:
        patch.setattr(study, "_create", lost)
        with pytest.raises(GradveilError, match="the server closed the connection"):
            study.claim(2, 8)
    assert [trial.number for trial in made] == [2]
    assert [trial.number for trial in study.claim(2, 8)] == [2, 3]
    assert [trial.number for trial in study.claim(2, 8)] == [4, 5]
    study.close()


def test_a_claim_that_lost_its_lock_gives_each_trial_the_policy_of_its_number(
    postgres: Any, searching: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections break after the trials were counted; another process claims before us."""
    import psycopg2

    storage = new_database(postgres.url)
    study, other = searching.join(storage), searching.join(storage)
    create = study._storage.create_new_trial
    theirs: list[Trial[Policy]] = []

    def late(*arguments: Any) -> int:
        if not theirs:
            with psycopg2.connect(postgres.url) as connection:
                connection.cursor().execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                    (storage.rpartition("/")[2],),
                )
            connection.close()
            theirs.extend(other.claim(2, 8))
        return int(create(*arguments))

    with monkeypatch.context() as patch, pytest.warns(GradveilWarning, match="trying again"):
        patch.setattr(study._storage, "create_new_trial", late)
        ours = study.claim(2, 8)
    assert [trial.number for trial in theirs] == [0, 1]
    assert [trial.number for trial in ours] == [2, 3]
    for trial in (*theirs, *ours):
        assert trial.tried == policy_of(draw(searching.SEED, trial.number))
        study.finish(trial, searching.state(trial), searching.toy(trial.tried))
    assert [trial.tried for trial in other.finished(8)] == [t.tried for t in (*theirs, *ours)]
    for joined in (study, other):
        joined.close()


def test_a_search_that_is_killed_and_resumed_tries_what_an_unbroken_one_tries(
    searching: ModuleType, tmp_path: Path, start: Start
) -> None:
    sampler = "tpe"  # whose every question depends on all answers before
    unbroken = searching.join(tmp_path / "unbroken.log", sampler)
    searching.search(unbroken, AT_ONCE, TARGET, tmp_path / "unbroken", 0.0)
    log, storage = tmp_path / "log", str(tmp_path / "killed.log")
    for after in (2, 9):
        process = start(storage, log, sampler, seconds=0.01)
        wait_until_evaluated(log, process, after)
        process.kill()
        assert status(process) == -signal.SIGKILL
    resumed = searching.join(Path(storage), sampler)
    assert 0 < len(resumed.finished(TARGET)) < TARGET
    searching.search(resumed, AT_ONCE, TARGET, log, 0.0)
    assert resumed.finished(TARGET) == unbroken.finished(TARGET)
    for study in (resumed, unbroken):
        study.close()


def test_a_process_killed_while_it_claims_holds_up_nobody(
    storage: str, searching: ModuleType, tmp_path: Path, start: Start, start_process: Start
) -> None:
    code = (
        f"sys.path.insert(0, {str(FOLDER)!r})\nimport searching, time\n"
        "study = searching.join(searching.place(arguments[0]))\n"
        "with study._opened.lock():\n    open(arguments[1], 'w').close()\n    time.sleep(60)\n"
    )
    holder = start_process(code, storage, tmp_path / "held")
    until = time.monotonic() + 60
    while not (tmp_path / "held").exists():
        assert holder.is_alive() and time.monotonic() < until
        time.sleep(0.01)
    log = tmp_path / "log"
    waiting = start(storage, log, seconds=0.0)
    assert status(waiting, 1.5) is None and not evaluations(log)
    holder.kill()
    assert status(waiting, 30) == 0 and status(holder) == -signal.SIGKILL
    check_all_finished(searching, storage)


def test_an_owner_is_dead_when_its_process_is_gone_or_it_was_silent_for_long() -> None:
    me = this_process()
    now = time.time()
    assert lives(me.entry(now))
    assert not lives(me.entry(None)) and not lives(me.entry(now - SILENCE - 1))
    assert not lives(replace(me.entry(now), start="1"))  # another process with the same number
    elsewhere = replace(me.entry(now), host="elsewhere", pid=2**22 + 1)
    assert lives(elsewhere) and not lives(replace(elsewhere, beat=now - SILENCE - 1))


def owner_of(pid: int) -> OwnerEntry:
    """What a study would know of this process, had it joined a moment ago."""
    me, start = this_process(), owners._started(pid)
    return replace(me.entry(time.time()), pid=pid, start=start)


def test_a_killed_process_is_dead_before_its_parent_asks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = owner_of(child.pid)
    assert lives(owner)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    os.kill(child.pid, 0)  # which still takes signals
    assert not lives(owner)
    child.communicate()
    assert not lives(owner)


def test_without_a_process_table_a_process_is_asked_by_a_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(owners, "PROCESSES", tmp_path)
    assert lives(owner_of(os.getpid())) and owner_of(os.getpid()).start == "running"
    child = subprocess.Popen([sys.executable, "-c", ""])
    owner = owner_of(child.pid)
    child.wait()
    assert not lives(owner)
