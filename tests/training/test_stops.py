"""A run that is stopped goes on after its last whole epoch, to the same result, bit for bit."""

import csv
import errno
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradveil.core import files as core_files
from gradveil.core.errors import GradveilError
from gradveil.defenses import parse
from gradveil.training import Recipe, TrainingJob, TrainingResult, train
from gradveil.training import lightning as callbacks

Start = Callable[..., BaseProcess]
StopAt = Callable[..., None]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def metrics(out: Path) -> list[dict[str, str]]:
    """Without the time each epoch took."""
    with (out / "metrics.csv").open(newline="") as text:
        return [
            {key: value for key, value in row.items() if key != "seconds"}
            for row in csv.DictReader(text)
        ]


def assert_same(found: Path, expected: Path) -> None:
    files = sorted(path.relative_to(expected) for path in expected.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(found) for path in found.rglob("*.safetensors"))
    for file in files:
        ours, theirs = load_file(found / file), load_file(expected / file)
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[key], theirs[key]) for key in ours
        )
    assert metrics(found) == metrics(expected)
    assert not [*found.rglob("*.part"), *found.rglob("resume.ckpt")]


@pytest.fixture(scope="module")
def whole(job: TrainingJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same job, never stopped."""
    return train(job, tmp_path_factory.mktemp("whole") / "run", progress=False).out


@pytest.fixture
def stop_at(nets: str) -> Iterator[StopAt]:
    """Let the model do this in the pass of that step, counted from now; never where it is None."""
    stop = importlib.import_module(nets).stop
    yield lambda step, act=interrupt: stop.update(at=step, act=act)
    stop.update(at=None, act=None)


@pytest.mark.parametrize("act", [interrupt, terminate])
@pytest.mark.parametrize("step", [0, 6, 19])
def test_after_an_interrupt_the_same_job_goes_on_to_the_same_result(
    job: TrainingJob,
    tmp_path: Path,
    whole: Path,
    stop_at: StopAt,
    step: int,
    act: Callable[[], None],
) -> None:
    handlers = [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)]
    stop_at(step, act)
    with pytest.raises(KeyboardInterrupt):
        train(job, tmp_path / "run", progress=False)
    assert [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (tmp_path / "run" / "resume.ckpt").exists() == (step >= 5)
    stop_at(None)
    train(job, tmp_path / "run", progress=False)
    assert_same(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("defense", "passes"),
    [
        ("prune-feedback:0.9", 10),
        ("prune-feedback:0.9,then,gaussian:0.01", 13),
        ("laplacian:0.01", 10),
        ("dp:norm=1,multiplier=0.5", 60),
        ("soteria:0.5", 20),
        ("3-1-7,then,precode:k=4", 9),
        ("dropout:0.5,position=0", 9),
    ],
)
def test_under_a_defense_too_a_stopped_run_goes_on_to_the_same_result(
    job: TrainingJob, tmp_path: Path, stop_at: StopAt, defense: str, passes: int
) -> None:
    """It keeps and draws the same then. Some pass through the model more than once in a step."""
    defended = replace(job, recipe=replace(job.recipe, epochs=3), defense=parse(defense))
    train(defended, tmp_path / "whole", progress=False)
    stop_at(passes)
    with pytest.raises(KeyboardInterrupt):
        train(defended, tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "resume.ckpt").exists()
    stop_at(None)
    train(defended, tmp_path / "run", progress=False)
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_going_on_repeats_no_whole_epoch(job: TrainingJob, tmp_path: Path, stop_at: StopAt) -> None:
    stop_at(12)  # two whole epochs of five steps, and two more steps
    with pytest.raises(KeyboardInterrupt):
        train(job, tmp_path, progress=False)
    stop_at(10, raising(RuntimeError("an eleventh step")))
    assert train(job, tmp_path, progress=False).steps == 20


def test_a_failing_model_is_told_in_a_line_and_frees_the_folder(
    job: TrainingJob, tmp_path: Path, stop_at: StopAt
) -> None:
    for error in (RuntimeError("no\nway"), SystemExit(0)):
        stop_at(2, raising(error))
        with pytest.raises(
            GradveilError,
            match=r"^model 'own_training_nets:dropout' (failed|ended the program) while training",
        ):
            train(replace(job, save_at=()), tmp_path / "run", progress=False)
        assert not (tmp_path / "run").exists()


def test_a_failure_keeps_weights_that_were_asked_for(
    job: TrainingJob, tmp_path: Path, stop_at: StopAt
) -> None:
    stop_at(2, raising(RuntimeError("late")))
    with pytest.raises(GradveilError, match="late"):
        train(job, tmp_path, progress=False)
    assert len(list(tmp_path.glob("steps/*.safetensors"))) == 2


def full_disk(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, after: int) -> None:
    """The disk is full when this module writes its file of that name for another time."""
    left = [after]

    @contextmanager
    def replacing(path: Path) -> Iterator[Path]:
        with core_files.replacing(path) as temporary:
            yield temporary
            left[0] -= path.name == name
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "replacing", replacing)


@pytest.mark.parametrize("epochs", [1, 3])
def test_after_a_full_disk_the_run_goes_on_to_the_same_result(
    job: TrainingJob, tmp_path: Path, whole: Path, epochs: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        full_disk(patch, callbacks, "resume.ckpt", epochs)
        with pytest.raises(
            GradveilError, match=r"^no space left on the disk while writing .*resume\.ckpt"
        ):
            train(job, tmp_path / "run", progress=False)
    assert not list(tmp_path.rglob("*.part"))
    train(job, tmp_path / "run", progress=False)
    assert_same(tmp_path / "run", whole)


def test_a_full_disk_in_the_first_epoch_frees_the_folder(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, callbacks, "resume.ckpt", 0)
    with pytest.raises(GradveilError, match="no space left"):
        train(replace(job, save_at=()), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_at_the_first_weights_frees_the_folder(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their settings, which were written before them, are no reason to keep it."""
    checkpoints = importlib.import_module("gradveil.models.checkpoints")
    full_disk(monkeypatch, checkpoints, "step-000000.safetensors", 0)
    with pytest.raises(GradveilError, match="no space left"):
        train(job, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_at_the_very_end_costs_no_epoch(
    job: TrainingJob, tmp_path: Path, whole: Path, stop_at: StopAt
) -> None:
    done = train(job, whole, progress=False)
    with pytest.MonkeyPatch.context() as patch:
        full_disk(
            patch, importlib.import_module("gradveil.models.checkpoints"), "model.safetensors", 0
        )
        with pytest.raises(
            GradveilError, match=r"no space left on the disk while writing .*model\.safetensors"
        ):
            train(job, tmp_path / "run", progress=False)
    stop_at(0, raising(RuntimeError("another step")))
    again = train(job, tmp_path / "run", progress=False)
    assert (again.accuracy, again.steps) == (done.accuracy, done.steps)
    assert_same(tmp_path / "run", whole)


def test_a_full_disk_under_the_tensorboard_log_is_told(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lightning.pytorch.loggers.TensorBoardLogger.log_metrics", full)
    with pytest.raises(
        GradveilError,
        match=r"^cannot write into .*run: No space left on device; mend that and run again$",
    ):
        train(replace(job, save_at=()), tmp_path / "run", progress=False)


def test_a_run_that_was_killed_after_its_last_write_is_read_back_and_swept(
    job: TrainingJob, tmp_path: Path
) -> None:
    done = train(job, tmp_path, progress=False)
    (tmp_path / "resume.ckpt").touch()
    assert train(job, tmp_path, progress=False).accuracy == done.accuracy
    assert not (tmp_path / "resume.ckpt").exists()


def test_what_a_killed_run_was_writing_is_swept_away(job: TrainingJob, tmp_path: Path) -> None:
    train(job, tmp_path, progress=False)
    (tmp_path / "model.safetensors").unlink()
    for folder in (tmp_path, tmp_path / "steps"):
        (folder / ".resume.ckpt.abc.part").touch()
    train(job, tmp_path, progress=False)
    assert not list(tmp_path.rglob("*.part"))


def test_a_damaged_point_to_go_on_from_is_told(
    job: TrainingJob, tmp_path: Path, stop_at: StopAt
) -> None:
    stop_at(7)
    with pytest.raises(KeyboardInterrupt):
        train(job, tmp_path, progress=False)
    stop_at(None)
    whole = (tmp_path / "resume.ckpt").read_bytes()
    for damage in (b"", b"text", whole[: len(whole) // 2]):
        (tmp_path / "resume.ckpt").write_bytes(damage)
        with pytest.raises(GradveilError, match=r"resume\.ckpt is damaged .*delete it"):
            train(job, tmp_path, progress=False)
    assert (tmp_path / "resume.ckpt").exists()


FED_BACK = "prune-feedback:0.99,then,gaussian:1e-3"
ARGUMENTS = (
    "train --data fashion-mnist-mini --model lenet --epochs 16 --lr 0.02 --fraction 0.2 "
    f"--batch-size 50 --seed 5 --save-at 0,30 --device cpu --json --defense {FED_BACK}"
)


def stopped(start: Start, folder: Path, how: signal.Signals) -> tuple[int, str, str]:
    """Run the command until another epoch's line is in metrics.csv, then send the signal."""
    table, log = folder / "run" / "metrics.csv", folder / "log"
    before = len(metrics(table.parent)) if table.exists() else 0
    code = "import breaking\nbreaking.run(*arguments)"
    process = start(code, "whole", 0, [*ARGUMENTS.split(), "--out", "run"], log, folder)
    deadline = time.monotonic() + 60
    while not table.exists() or len(metrics(table.parent)) <= before:
        assert process.is_alive() and time.monotonic() < deadline, (
            "it ended, or never came to an epoch"
        )
        time.sleep(0.005)
    assert process.pid is not None
    os.kill(process.pid, how)
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode, (log / "out").read_text(), (log / "err").read_text()


def test_killed_and_interrupted_while_it_feeds_back_it_gives_the_weights_and_metrics_of_one_run(
    tmp_path: Path, start_process: Start
) -> None:
    recipe = Recipe(epochs=16, lr=0.02, batch_size=50)
    job = TrainingJob(
        "fashion-mnist-mini",
        "lenet",
        recipe,
        fraction=0.2,
        save_at=(0, 30),
        seed=5,
        defense=parse(FED_BACK),
    )
    whole: TrainingResult = train(job, tmp_path / "whole", device="cpu", progress=False)

    status, shown, _ = stopped(start_process, tmp_path, signal.SIGKILL)
    assert status == -signal.SIGKILL and not shown
    status, shown, said = stopped(start_process, tmp_path, signal.SIGINT)
    assert status == 130 and not shown
    assert [line for line in said.splitlines() if not line.startswith("training ")] == [
        "error: stopped; run the same command again to go on"
    ]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    again = train(job, tmp_path / "run", device="cpu", progress=False)
    assert again.accuracy == whole.accuracy
    assert_same(tmp_path / "run", tmp_path / "whole")
