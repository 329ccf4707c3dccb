"""Checkpoints: what goes in comes out, and a file that does not fit is told in one line."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import toys
from gradveil import models
from gradveil.core.errors import GradveilError
from gradveil.models.checkpoints import (
    load_checkpoint,
    read_resume,
    read_settings,
    save_checkpoint,
)

SETTINGS = {
    "model": "lenet",
    "data": "fashion-mnist-mini",
    "step": 3,
    "lr": 0.1,
    "save_at": [0, 1],
    "image_size": None,
}


def lenet(classes: int = 10, seed: int = 0) -> nn.Module:
    return toys.lenet(1, 28, classes, seed=seed).float()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, lenet(), SETTINGS)
    return path


def refused(path: Path, model: nn.Module) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = toys.refused(load_checkpoint, path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert path.name in message
    return message


def test_weights_come_back_bit_for_bit(saved: Path) -> None:
    other = lenet(seed=1)
    assert load_checkpoint(saved, other) is other
    for name, value in lenet().state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_batch_norm_statistics_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    layer, other = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    layer(torch.rand(4, 2, 3, 3, generator=torch.Generator().manual_seed(0)))
    save_checkpoint(tmp_path / "bn.safetensors", layer, {})
    load_checkpoint(tmp_path / "bn.safetensors", other)
    assert torch.equal(other.state_dict()["running_mean"], layer.state_dict()["running_mean"])
    assert int(other.state_dict()["num_batches_tracked"]) == 1


def test_settings_lie_inside_the_file_and_in_json_beside_it(saved: Path) -> None:
    assert read_settings(saved) == SETTINGS
    assert json.loads(saved.with_suffix(".json").read_text()) == SETTINGS
    assert names(saved.parent) == ["model.json", "model.safetensors"]


def test_saving_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = model.weight.clone()
    save_checkpoint(tmp_path / "m.safetensors", model, {})
    assert torch.equal(model.weight, before) and model.weight.is_contiguous(
        memory_format=torch.channels_last
    )
    assert torch.equal(
        load_checkpoint(tmp_path / "m.safetensors", nn.Conv2d(3, 4, 3)).get_parameter("weight"),
        before,
    )


def test_tied_weights_can_be_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save_checkpoint(tmp_path / "tied.safetensors", model, {})
    again = load_checkpoint(
        tmp_path / "tied.safetensors", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    )
    assert torch.equal(again.get_parameter("1.weight"), model.get_parameter("0.weight"))


def test_a_checkpoint_for_another_model_says_what_differs_and_where_it_came_from(
    saved: Path,
) -> None:
    message = refused(saved, models.build("mlp", channels=1, size=28, classes=10))
    assert (
        "it has no 'features.1.weight'" in message
        and "saved from lenet on fashion-mnist-mini" in message
    )


def test_a_checkpoint_for_other_classes_says_both_shapes(saved: Path) -> None:
    assert "shape (10, 588), the model (7, 588)" in refused(saved, lenet(classes=7))


def test_a_checkpoint_with_more_than_the_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "more.safetensors"
    save_file(lenet().state_dict() | {"surplus": torch.ones(1)}, path)
    assert "the model has no 'surplus'" in refused(path, lenet())


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    broken = lenet()
    with torch.no_grad():
        next(broken.parameters()).flatten()[0] = float("nan")
    save_checkpoint(tmp_path / "nan.safetensors", broken, {})
    assert "not finite" in refused(tmp_path / "nan.safetensors", lenet())


def test_a_file_of_another_program_loads_and_has_no_settings(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    save_file(lenet(seed=2).state_dict(), path)
    assert read_settings(path) == {}
    load_checkpoint(path, lenet())


@pytest.mark.parametrize("text", ["not json", "[1, 2]"])
def test_settings_that_are_no_json_object_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.safetensors"
    save_file(lenet().state_dict(), path, metadata={"gradveil": text})
    with pytest.raises(GradveilError, match=r"the settings inside .*odd\.safetensors are"):
        read_settings(path)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("test_accuracy", "high", "test_accuracy: expected float, got str"),
        ("test_accuracy", 1.5, "test_accuracy: expected float <= 1.0"),
        ("step", -1, "step: expected int >= 0"),
        ("model", ["lenet"], "model: expected str, got array"),
        ("history", [{"epoch": None}], r"history\[0\]\[...\]: expected float, got null"),
    ],
)
def test_settings_of_the_wrong_type_are_told_by_file_and_field(
    tmp_path: Path, name: str, value: object, says: str
) -> None:
    path = tmp_path / "m.safetensors"
    save_checkpoint(path, lenet(), SETTINGS | {name: value})
    with pytest.raises(GradveilError, match=rf"^the settings inside {path}: {says}"):
        read_settings(path)


def test_a_setting_that_is_needed_and_absent_is_told(saved: Path) -> None:
    assert read_settings(saved, ("model", "step"))["step"] == 3
    with pytest.raises(GradveilError, match=r"model\.safetensors: history: missing"):
        read_settings(saved, ("model", "history"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_settings_that_json_cannot_hold_are_refused_before_anything_is_written(
    tmp_path: Path, value: float
) -> None:
    with pytest.raises(GradveilError, match="NaN or infinity"):
        save_checkpoint(tmp_path / "m.safetensors", lenet(), {"loss": value})
    assert not names(tmp_path)


STATE: dict[str, Any] = {
    "epoch": 0,
    "global_step": 0,
    "pytorch-lightning_version": "2.6.6",
    "state_dict": {"w": torch.ones(2)},
    "loops": {"fit_loop": {}},
    "callbacks": {},
    "optimizer_states": [{"state": {}, "param_groups": []}],
    "lr_schedulers": [],
    "history": [{"epoch": 1, "train_loss": 0.5, "test_accuracy": 0.1}],
    "defense": None,
}


def test_the_state_of_a_stopped_training_comes_back(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "resume.ckpt")
    assert read_resume(tmp_path / "resume.ckpt")["history"] == STATE["history"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"epoch": -1}, "epoch: expected int >= 0"),
        ({"history": "none"}, "history: expected array, got str"),
        ({"history": [{"epoch": "1"}]}, "history"),
        ({"state_dict": {"w": 3}}, "state_dict: expected names and tensors"),
        ({"state_dict": {"w": torch.ones(2, device="meta")}}, "state_dict"),
        ({"loops": [1]}, "loops: expected object, got array"),
        ({"pytorch-lightning_version": None}, "version: expected str"),
        ({3: 4}, "no dictionary of names"),
    ],
)
def test_a_state_of_another_shape_is_told(
    tmp_path: Path, change: dict[Any, Any], says: str
) -> None:
    path = tmp_path / "resume.ckpt"
    torch.save(STATE | change, path)
    with pytest.raises(GradveilError, match=rf"^{path} is damaged \(.*{says}.*\): delete it"):
        read_resume(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(saved: Path, share: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * share)])
    assert "no whole safetensors file" in refused(saved, lenet())


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.safetensors").write_text("these are notes, and no weights\n" * 20)
    assert "no whole safetensors file" in refused(tmp_path / "notes.safetensors", lenet())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no checkpoint at" in refused(tmp_path / "nowhere.safetensors", lenet())


class Trap:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.trace),)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Trap(tmp_path / "trace")))
    refused(path, lenet())
    assert not (tmp_path / "trace").exists()


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match=r"model\.pt: its name must end in \.safetensors"):
        save_checkpoint(tmp_path / "model.pt", lenet(), {})


def test_when_the_settings_cannot_be_written_the_weights_are_not_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise GradveilError(
            f"no space left on the disk while writing {path} of {len(text)} letters"
        )

    monkeypatch.setattr("gradveil.models.checkpoints.write_text", full)
    with pytest.raises(GradveilError, match="no space left"):
        save_checkpoint(tmp_path / "model.safetensors", lenet(), SETTINGS)
    assert not names(tmp_path)
