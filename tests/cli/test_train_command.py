"""gradveil train: one JSON object, progress beside it, and every kind of bad input."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

QUICK = "train --data fashion-mnist-mini --model lenet --lr 0.02 --fraction 0.02 --batch-size 20"


def below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_json_is_one_object_and_progress_goes_to_the_error_stream(
    gradveil: Any, tmp_path: Path
) -> None:
    outcome = gradveil(f"{QUICK} --epochs 2 --out run --save-at 0,1,4 --json")
    result = outcome.result
    assert (
        outcome.status == 0
        and result["steps"] == 4
        and result["epochs"] == 2
        and len(result["history"]) == 2
    )
    assert result["accuracy"] == result["history"][-1]["test_accuracy"]
    assert (
        Path(result["checkpoint"]).is_file()
        and (tmp_path / "run" / "steps" / "step-000004.safetensors").is_file()
    )
    assert outcome.said.startswith("training ") and "4/4" in outcome.said.replace("…", "4/4")


def test_people_get_the_accuracy_and_where_the_files_are(gradveil: Any) -> None:
    outcome = gradveil(f"{QUICK} --epochs 1 --out [run]")
    assert outcome.status == 0 and "test accuracy" in outcome.shown
    assert "after 1 epoch (" in outcome.shown
    for name in ("model.safetensors", "metrics.csv"):
        assert f"[run]/{name}" in outcome.shown and Path("[run]", name).is_file()


def test_a_second_run_says_the_same_and_trains_nothing(gradveil: Any) -> None:
    first, again = (gradveil(f"{QUICK} --epochs 1 --out run --json") for _ in range(2))
    assert first.result == again.result and first.said and not again.said


def test_the_folder_is_named_after_data_model_and_seed(gradveil: Any) -> None:
    assert (
        gradveil(f"{QUICK} --epochs 0 --seed 7 --json").result["out"]
        == "runs/train-fashion-mnist-mini-lenet-7"
    )


def test_no_epochs_give_the_untrained_model(gradveil: Any) -> None:
    outcome = gradveil(f"{QUICK} --epochs 0 --save-at 0 --out run")
    assert (
        outcome.status == 0
        and "after 0 epochs (0 steps)" in outcome.shown
        and "metrics" not in outcome.shown
    )


def test_the_defense_is_said_and_with_dp_sgd_epsilon(gradveil: Any) -> None:
    line = f"{QUICK} --epochs 1 --out run --defense dp:norm=1,multiplier=1.5 --delta 0.01"
    result = gradveil(f"{line} --json").result
    assert (
        result["defense"] == "dp:norm=1,multiplier=1.5"
        and result["delta"] == 0.01
        and 0.5 < result["epsilon"] < 5
    )
    assert (
        f"epsilon {result['epsilon']:.4g} at delta 0.01, by Opacus' accountant"
        in gradveil(line).shown
    )


def test_without_a_defense_there_is_no_epsilon(gradveil: Any) -> None:
    result = gradveil(f"{QUICK} --epochs 0 --out run --json").result
    assert (result["defense"], result["epsilon"], result["delta"]) == ("none", None, None)
    assert "defense" not in gradveil(f"{QUICK} --epochs 0 --out run").shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--epochs -1", "epochs -1: it must be at least 0"),
        ("--epochs 1e3", "Invalid value for '--epochs'"),
        ("--lr nan", "lr nan: it must be above 0 and finite as a float32"),
        ("--lr 0", "lr 0.0: it must be above 0 and finite as a float32"),
        ("--momentum nan", "momentum nan: it must be at least 0 and below 1"),
        ("--weight-decay inf", "weight decay inf: it must be at least 0 and finite as a float32"),
        ("--loss-scale 0", "loss scale 0.0: it must be above 0 and finite as a float32"),
        ("--batch-size 0", "batch size 0: it must be at least 1"),
        ("--fraction 0", "fraction 0.0 is out of range"),
        ("--fraction 2", "fraction 2.0 is out of range"),
        ("--image-size 0", "image size 0 is out of range"),
        ("--precision 16", "unknown precision '16': choose from auto, 32, bf16"),
        ("--device gpu", "unknown device 'gpu': choose from auto, cpu, cuda"),
        ("--save-at 999", "save-at 999: this training has 2 steps"),
        ("--save-at=-1", "save-at -1: steps are counted from 0"),
        ("--save-at 1,x", "save-at '1,x': write whole numbers with commas"),
        ("--policy 3-99", "transformation 99 is out of range: choose 0 to 49"),
        ("--policy \uff13-1-7", "defense '\uff13-1-7': write its digits as 0 to 9"),
        ("--defense nowhere:Class(4)", "there is no module 'nowhere'"),
        ("--defense os:getcwd", "os:getcwd is a builtin_function_or_method, but no subclass of"),
        ("--defense 3-99", "transformation 99 is out of range: choose 0 to 49"),
        (
            "--defense nonsense",
            "unknown defense 'nonsense': choose from none, policy, random, prune",
        ),
        (
            "--defense prune:1.5",
            "defense prune: share 1.5; it must be from 0 (nothing is cut) to below 1",
        ),
        (
            "--defense prune:0.9 --policy 3-1",
            "policy 3-1 and defense prune:0.9: give one; for a chain, --defense 3-1,then,prune:0.9",
        ),
        ("--defense prune:0.9,then,3-1", "3-1 changes the images, which come before the gradients"),
        (
            "--defense precode:position=nowhere",
            "unknown position of defense precode:position=nowhere: 'nowhere': choose from features",
        ),
        (
            "--defense dp:norm=1,multiplier=1 --model convnet",
            "features.1 is a BatchNorm2d, which mixes samples in training",
        ),
        ("--defense prune:0.9 --delta 0.1", "delta 0.1: it is for DP-SGD's epsilon"),
        ("--data nonsense", "unknown dataset 'nonsense': choose from"),
        ("--data folder:nowhere", "no folder nowhere"),
        ("--model nonsense", "unknown model 'nonsense': choose from"),
        ("--model os:getcwd", "model 'os:getcwd' gave a text"),
        ("--model nowhere:net", "there is no module 'nowhere'"),
        ("--model torch.nn:Identity", "has no parameters to train"),
        ("--model lenet --image-size 2", "lenet needs images of at least"),
        ("--lr 1e39", "lr 1e+39: it must be above 0 and finite as a float32"),
        ("--lr 1e38 --loss-scale 1e10", "training diverged in epoch 1"),
    ],
)
def test_bad_input_is_one_line_and_does_not_stand_in_the_way_of_the_right_command(
    gradveil: Any, tmp_path: Path, options: str, says: str
) -> None:
    assert says in gradveil(f"{QUICK} --epochs 1 --out run --json {options}").error
    assert not below(tmp_path)
    assert gradveil(f"{QUICK} --epochs 0 --out run").status == 0


def test_a_run_with_other_settings_is_not_overwritten(gradveil: Any, tmp_path: Path) -> None:
    gradveil(f"{QUICK} --epochs 0 --out run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert (
        gradveil(f"{QUICK} --epochs 1 --out run").error
        == "run holds a training with other settings (epochs 0 there, 1 here): choose another --out"
    )
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("file", "file is a file: choose another --out, a folder"),
        ("file/run", "a file stands where a folder should"),
        ("full", "full is not empty and holds no training run: choose another --out"),
    ],
)
def test_a_place_that_is_taken_is_told_and_left_alone(
    gradveil: Any, tmp_path: Path, out: str, says: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    assert says in gradveil(f"{QUICK} --epochs 1 --out {out}").error
    assert below(tmp_path) == ["file", "full", "full/notes"]


def test_a_folder_that_may_not_be_written_is_told(
    gradveil: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert (
        gradveil(f"{QUICK} --epochs 1 --out run").error
        == "cannot write run/settings.json: Permission denied; choose another folder"
    )
    assert below(tmp_path) in ([], ["run"])


OWN = """
from dataclasses import dataclass
from gradveil.defenses import Defense


@dataclass(frozen=True)
class Quantized(Defense):
    bits: int

    def protect_gradients(self, gradients, moment, state, rng):
        shared = {}
        for name, value in gradients.items():
            scale = value.abs().max().clamp_min(1e-12) / 2 ** (self.bits - 1)
            shared[name] = (value / scale).round() * scale
        return shared, state


@dataclass(frozen=True)
class Forgetful(Defense):
    def protect_gradients(self, gradients, moment, state, rng):
        return {}, state
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_command_defenses.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own_command_defenses", raising=False)
    return "own_command_defenses"


def test_a_class_in_the_current_folder_is_a_defense_alone_and_in_a_chain(
    gradveil: Any, own: str
) -> None:
    for number, around in enumerate(("{}", "3-1-7,then,{},then,prune:0.5")):
        line = f"{QUICK} --epochs 1 --out run{number}"
        spelled = around.format(f"{own}:Quantized(4)")
        result = gradveil(f"{line} --defense {spelled} --json").result
        assert result["defense"] == around.format(f"{own}:Quantized(bits=4)")
        assert gradveil(f"{line} --policy {spelled} --json").result == result


def test_a_class_that_shares_other_gradients_is_one_line_and_writes_nothing(
    gradveil: Any, own: str, tmp_path: Path
) -> None:
    error = gradveil(f"{QUICK} --epochs 1 --out run --defense {own}:Forgetful").error
    assert f"defense {own}:Forgetful: protect_gradients gave no gradient of" in error
    assert not (tmp_path / "run").exists()
