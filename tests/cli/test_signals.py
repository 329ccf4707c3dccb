"""Signals end every command alike: one line, the status of the signal; a second ends it at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradveil.core.progress import Bar
from gradveil.core.stopping import STOPPED, Stopped, exit_status, stop_on_signals, tell

SLOW_CLEANUP = """
import time
try:
    print("working", flush=True)  # the signal may come before this returns
    time.sleep(60)
finally:
    print("cleaning up", flush=True)
    time.sleep(60)
"""
COMMON = "--data fashion-mnist-mini --model mlp --device cpu"
JOBS = {  # what each does for long, and a file that tells that it has begun
    "train": (f"train {COMMON} --epochs 5000 --fraction 0.05", "metrics.csv"),
    "audit": (f"audit {COMMON} --attack dlg --steps 100000 --images 1", "none/model.json"),
    "search": (
        f"search {COMMON} --attack dlg --trials 5000 --images 2 --checkpoint WEIGHTS",
        "study.journal",
    ),
}


def start(*arguments: str, path: str | None = None) -> "subprocess.Popen[str]":
    # A shell starts its background jobs with SIGINT ignored, which a child would inherit.
    return subprocess.Popen(
        [sys.executable, "-m", "gradveil", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), None)[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": path} if path else {}),
    )


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_at_once_in_one_line(tmp_path: Path, second: signal.Signals) -> None:
    """A module that takes long to clean up stands in for torch."""
    (tmp_path / "torch.py").write_text(SLOW_CLEANUP)
    given = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    with start("policy", "show", "3", path=os.pathsep.join(given)) as process:
        assert process.stdout is not None and process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "cleaning up\n"
        process.send_signal(second)
        began = time.monotonic()
        _, said = process.communicate(timeout=100)
    assert time.monotonic() - began < 50  # the module's time is not up
    assert said == f"{STOPPED}\n" and process.returncode == 128 + second


def test_a_signal_whose_error_was_caught_ends_the_job_at_its_next_step() -> None:
    tell()  # as a command does that was interrupted in this process before
    bar = Bar(shown=False)
    with stop_on_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Stopped:
            """As a library might."""
        with pytest.raises(Stopped):
            bar.update(1)
        assert exit_status() == 128 + signal.SIGTERM
    bar.update(1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("name", JOBS)
def test_a_signal_during_the_work_is_one_line_and_its_status(
    tmp_path: Path, name: str, number: signal.Signals
) -> None:
    from gradveil.models import build
    from gradveil.models.checkpoints import save_checkpoint

    weights, out = tmp_path / "weights.safetensors", tmp_path / "out"
    save_checkpoint(weights, build("mlp", channels=1, size=28, classes=10, seed=9), {})
    command, sign = JOBS[name]
    with start(*command.replace("WEIGHTS", str(weights)).split(), "--out", str(out)) as process:
        until = time.monotonic() + 300
        while not (out / sign).is_file():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number and said.splitlines()[-1] == STOPPED
    assert said.count("error:") == 1 and not [*out.rglob("*.part"), *out.rglob(".lock")]
