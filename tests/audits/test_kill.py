"""Killed and started again, an audit ends with the records of one that was never stopped."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from gradveil.attacks import find
from gradveil.audits import AuditJob, AuditResult, Case, read_records, run_audit
from gradveil.core.errors import GradveilError
from gradveil.core.locks import alone
from gradveil.defenses import parse

AUDIT = """
from gradveil.audits import run_audit

os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
run_audit(*arguments)
"""
Start = Callable[..., BaseProcess]

JOB = AuditJob(
    "lenet",
    "fashion-mnist-mini",
    {"adam-cosine": find("adam-cosine")},
    cases=(Case(parse("3-1-7")), Case(parse("prune:0.5"))),
    images=4,
    victims_at_once=2,
    steps=8,
    positive=False,
    sham=False,
    seed=5,
)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    return run_audit(JOB, tmp_path_factory.mktemp("unbroken") / "run", progress=False)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def stopped(start: Start, out: Path, records: Path, stop: signal.Signals, after: int) -> int:
    """Audit in another process, stop it when `records` has more than `after` lines; its status."""
    process = start(AUDIT, JOB, out, warned="ignore")
    until = time.monotonic() + 120
    while lines(records) <= after and process.is_alive() and time.monotonic() < until:
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, stop)
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize(("stop", "case"), [(signal.SIGKILL, 1), (signal.SIGINT, 0)])
def test_a_stopped_audit_goes_on_and_loses_and_repeats_nothing(
    stop: signal.Signals,
    case: int,
    unbroken: AuditResult,
    tmp_path: Path,
    without_times: Callable[[Any], list[Any]],
    start_process: Start,
) -> None:
    out = tmp_path / "stopped"
    folders = [out / one.folder for one in JOB.cases]
    records = folders[case] / "records.jsonl"
    assert stopped(start_process, out, records, stop, after=9) != 0
    kept = read_records(records)
    assert 0 < len(kept) < len(unbroken.cases[case].records)
    assert [folder.exists() for folder in folders] == [True, case == 1]
    assert len(AuditResult.read(out).cases) == case + 1  # what there is can be looked at
    again = run_audit(JOB, out, progress=False)
    for ours, theirs in zip(again.cases, unbroken.cases, strict=True):
        assert without_times(ours.records) == without_times(theirs.records)
        names = [{path.name for path in (one.out / "images").iterdir()} for one in (ours, theirs)]
        assert names[0] == names[1]
    half = len(kept) // 2
    assert again.cases[case].records[:half] == tuple(kept[:half])  # the same seconds: not repeated


@pytest.mark.parametrize("case", [0, 1])
def test_two_processes_do_not_audit_into_one_folder(unbroken: AuditResult, case: int) -> None:
    busy = unbroken.cases[case].out
    with (
        alone(busy, "auditing into"),
        pytest.raises(
            GradveilError, match=f"process {os.getpid()} on .* is auditing into {busy}: wait for"
        ),
    ):
        run_audit(JOB, unbroken.out, progress=False)
    assert run_audit(JOB, unbroken.out, progress=False) == unbroken
