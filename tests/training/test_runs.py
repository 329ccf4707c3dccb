"""What a run leaves in its folder, what it refuses, and what a second run of it does."""

import csv
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import toys
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.defenses import parse
from gradveil.models.checkpoints import read_settings
from gradveil.training import Recipe, TrainingJob, lightning, train


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tf_records(data: bytes) -> Iterator[bytes]:
    """TFRecord framing: length, its checksum, the record, its checksum."""
    place = 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        yield data[place + 12 : place + 12 + length]
        place += 12 + length + 4


def test_a_run_leaves_weights_settings_metrics_and_logs_and_nothing_else(
    job: TrainingJob, tmp_path: Path
) -> None:
    trained = train(job, tmp_path / "run", progress=False)
    assert names(tmp_path / "run") == [
        "metrics.csv",
        "model.json",
        "model.safetensors",
        "settings.json",
        "steps",
        "tensorboard",
    ]
    assert names(tmp_path / "run" / "steps") == [
        f"step-00000{step}.{kind}" for step in (0, 1, 7) for kind in ("json", "safetensors")
    ]
    assert trained.checkpoint == tmp_path / "run" / "model.safetensors" and (
        trained.epochs,
        trained.steps,
    ) == (4, 20)


def test_metrics_have_a_line_for_each_epoch(job: TrainingJob, tmp_path: Path) -> None:
    trained = train(job, tmp_path, progress=False)
    with (tmp_path / "metrics.csv").open(newline="") as text:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(text)]
    assert rows == [dict(row) for row in trained.history]
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 5), (2, 10), (3, 15), (4, 20)]
    assert [row["lr"] for row in rows] == pytest.approx([0.05, 0.05, 0.005, 0.0005])
    assert all(
        0 <= row["train_accuracy"] <= 1 and row["seconds"] > 0 and math.isfinite(row["train_loss"])
        for row in rows
    )
    assert rows[-1]["test_accuracy"] == trained.accuracy


def test_settings_are_saved_with_the_weights_and_say_everything(
    job: TrainingJob, tmp_path: Path
) -> None:
    trained = train(replace(job, defense=parse("3-1-7")), tmp_path, progress=False)
    settings = read_settings(trained.checkpoint)
    assert settings == json.loads((tmp_path / "model.json").read_text())
    expected = {
        "defense": "3-1-7",
        "trained_under": "3-1-7",
        "seed": 3,
        "fraction": 0.09,
        "lr": 0.05,
        "loss_scale": 1.0,
        "step": 20,
        "images": 180,
        "classes": 10,
    }
    assert settings.items() >= expected.items()
    assert (
        settings["versions"]["torch"] == torch.__version__
        and settings["test_accuracy"] == trained.accuracy
    )
    assert read_settings(tmp_path / "steps" / "step-000007.safetensors")["step"] == 7


def test_the_tensorboard_log_has_every_figure_of_every_epoch(
    job: TrainingJob, tmp_path: Path
) -> None:
    train(job, tmp_path, progress=False)
    (log,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    records = list(tf_records(log.read_bytes()))
    for tag in (b"train_loss", b"train_accuracy", b"test_accuracy", b"lr"):
        assert sum(tag in record for record in records) == 4


def test_one_seed_gives_one_result_and_another_seed_another(
    job: TrainingJob, tmp_path: Path
) -> None:
    data = [
        train(j, tmp_path / n, progress=False).checkpoint.read_bytes()[-500:]
        for n, j in (("a", job), ("b", job), ("c", replace(job, seed=4)))
    ]
    assert data[0] == data[1] != data[2]


def test_training_leaves_the_global_generator_alone(job: TrainingJob, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train(job, tmp_path, progress=False)
    assert torch.equal(before, torch.get_rng_state())


def test_a_second_run_of_a_finished_job_trains_nothing_and_gives_the_same(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(job, tmp_path, progress=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.delattr(lightning, "fit")
    assert train(job, tmp_path, progress=False) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_no_epochs_give_the_untrained_model_and_its_accuracy(
    job: TrainingJob, tmp_path: Path
) -> None:
    trained = train(replace(job, recipe=Recipe(epochs=0), save_at=(0,)), tmp_path, progress=False)
    assert (trained.epochs, trained.steps, trained.history) == (0, 0, ())
    assert 0 <= trained.accuracy <= 0.4
    weights = [
        path.read_bytes()[-500:]
        for path in (trained.checkpoint, tmp_path / "steps" / "step-000000.safetensors")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": "nonsense"}, "unknown dataset 'nonsense': choose from"),
        ({"data": "folder:nowhere"}, "no folder nowhere"),
        ({"model": "nonsense"}, "unknown model 'nonsense': choose from"),
        ({"model": "os:getcwd"}, "model 'os:getcwd' gave a text"),
        ({"model": "torch.nn:Identity"}, "has no parameters to train"),
        ({"model": "own_training_nets:frozen"}, "has no parameters to train"),
        (
            {"model": "own_training_nets:wide"},
            r"gives \(2, 11\) for images of shape \(2, 1, 28, 28\): expected \(2, 10\)",
        ),
        (
            {"model": "own_training_nets:picky"},
            r"fails on images of shape \(2, 1, 28, 28\): RuntimeError",
        ),
        ({"fraction": 0.0}, "fraction 0.0 is out of range"),
        ({"fraction": 2.0}, "fraction 2.0 is out of range"),
        ({"fraction": math.nan}, "fraction nan is out of range"),
        ({"image_size": 0}, "image size 0 is out of range"),
        ({"save_at": (0, 21)}, "save-at 21: this training has 20 steps"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_anything_is_written(
    job: TrainingJob, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(GradveilError, match=says):
        train(replace(job, **changes), tmp_path / "run", progress=False)  # type: ignore[arg-type]
    assert not names(tmp_path)


def test_bad_values_are_refused_by_the_job_itself() -> None:
    with pytest.raises(
        GradveilError, match=r"^unknown precision '16': choose from auto, 32, bf16$"
    ):
        TrainingJob("fashion-mnist-mini", "mlp", precision="16")
    with pytest.raises(GradveilError, match=r"^save-at -1: steps are counted from 0"):
        TrainingJob("fashion-mnist-mini", "mlp", save_at=(3, -1))


def test_a_folder_with_other_settings_is_refused_and_left_alone(
    job: TrainingJob, tmp_path: Path
) -> None:
    train(job, tmp_path, progress=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(
        GradveilError,
        match=r"other settings \(lr 0\.05 there, 0\.1 here, seed 3 there, 4 here\): "
        "choose another --out$",
    ):
        train(replace(job, recipe=replace(job.recipe, lr=0.1), seed=4), tmp_path, progress=False)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_folder_with_other_things_in_it_is_refused(job: TrainingJob, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(GradveilError, match="is not empty and holds no training run"):
        train(job, tmp_path, progress=False)
    assert names(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
def test_settings_that_are_no_json_object_are_told(
    job: TrainingJob, tmp_path: Path, text: str
) -> None:
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(GradveilError, match="is no JSON object of settings"):
        train(job, tmp_path, progress=False)


def test_a_file_where_the_folder_should_be_is_refused(job: TrainingJob, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(GradveilError, match="is a file: choose another --out"):
        train(job, tmp_path / "file", progress=False)
    assert (tmp_path / "file").read_text() == "mine"


def test_after_divergence_the_folder_is_free_for_a_lower_rate(
    job: TrainingJob, tmp_path: Path
) -> None:
    wild = replace(job, recipe=replace(job.recipe, lr=1e38), save_at=())
    with pytest.raises(
        GradveilError, match=r"^training diverged in epoch 1: the loss is (nan|inf); lower --lr$"
    ):
        train(wild, tmp_path / "run", progress=False)
    assert not names(tmp_path)
    train(replace(job, save_at=()), tmp_path / "run", progress=False)


def test_weights_that_only_the_last_step_spoiled_are_divergence_too(
    job: TrainingJob, tmp_path: Path
) -> None:
    with pytest.raises(
        GradveilError, match=r"^training diverged in epoch 1: weights are not finite; lower --lr$"
    ):
        train(
            replace(
                job, recipe=Recipe(epochs=1, lr=1e38, batch_size=1_000, loss_scale=1e10), save_at=()
            ),
            tmp_path / "run",
            progress=False,
        )


def test_bf16_trains_to_other_weights_than_float32(job: TrainingJob, tmp_path: Path) -> None:
    history = [
        train(replace(job, precision=p), tmp_path / p, progress=False).history[-1]["train_loss"]
        for p in ("32", "bf16", "auto")
    ]
    assert history[0] == history[2] != history[1] == pytest.approx(history[0], rel=0.05)


def test_each_epoch_has_as_many_threads_as_cores_are_free_when_it_begins(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = lightning.Training.training_step
    seen: dict[int, set[int]] = {}

    def watched(module: lightning.Training, batch: Batch, index: int) -> None:
        seen.setdefault(module.current_epoch, set()).add(torch.get_num_threads())
        if module.current_epoch == 2:
            raise GradveilError("stopped")
        plain(module, batch, index)

    monkeypatch.setattr(lightning.Training, "training_step", watched)
    with toys.two_cores(monkeypatch, [1.0, 0.0, 1.0]):
        with pytest.raises(GradveilError, match=r"^stopped$"):
            train(job, tmp_path / "run", progress=False)
        assert seen == {0: {1}, 1: {2}, 2: {1}} and torch.get_num_threads() == 2
