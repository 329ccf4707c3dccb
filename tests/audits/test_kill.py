"""Killed in the middle and started again, an audit ends with the records of one that was never stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradveil.audits import AuditJob, AuditResult, audit, read_records
from gradveil.audits.folders import alone
from gradveil.core import GradveilError
from gradveil.transforms import Policy

SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from gradveil.audits import AuditJob, audit
from gradveil.transforms import Policy
job = AuditJob("fashion-mnist-mini", "lenet", ("adam-cosine",), 6, policy=Policy.parse("3-1-7"), victims_at_once=2, steps=40, seed=5)
audit(job, Path(sys.argv[1]))
"""


JOB = AuditJob(
    "fashion-mnist-mini",
    "lenet",
    ("adam-cosine",),
    6,
    policy=Policy.parse("3-1-7"),
    victims_at_once=2,
    steps=40,
    seed=5,
)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    return audit(JOB, tmp_path_factory.mktemp("unbroken") / "run", progress=False)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def start(out: Path, stop: signal.Signals, after: int) -> subprocess.Popen[bytes]:
    """A process of its own, stopped once it has written more than `after` records."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out)],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    until = time.monotonic() + 120
    while (
        lines(out / "records.jsonl") <= after
        and process.poll() is None
        and time.monotonic() < until
    ):
        time.sleep(0.002)
    process.send_signal(stop)
    process.wait(60)
    return process


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_audit_goes_on_and_loses_and_repeats_nothing(
    stop: signal.Signals,
    unbroken: AuditResult,
    tmp_path: Path,
    without_times: Callable[[Any], list[Any]],
) -> None:
    out = tmp_path / "stopped"
    assert start(out, stop, after=10).returncode != 0
    kept = read_records(out / "records.jsonl")
    assert 0 < len(kept) < len(unbroken.records)
    again = audit(JOB, out, progress=False)
    assert without_times(again.records) == without_times(unbroken.records)
    assert again.records[: len(kept) // 2] == tuple(
        kept[: len(kept) // 2]
    )  # kept, not made again: the same seconds
    assert {path.name for path in (out / "images").iterdir()} == {
        path.name for path in (unbroken.out / "images").iterdir()
    }


def test_two_processes_do_not_audit_into_one_folder(unbroken: AuditResult) -> None:
    with alone(unbroken.out), pytest.raises(GradveilError, match="another process is auditing"):
        audit(JOB, unbroken.out, progress=False)
    assert audit(JOB, unbroken.out, progress=False) == unbroken
