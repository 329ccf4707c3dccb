"""gradveil doctor: findings for people and programs, its status, and bad input in one line."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.checks import CHECKS
from gradveil.checks.doctor import self_check
from gradveil.data import load
from gradveil.models import build, zoo
from gradveil.models.checkpoints import save_checkpoint

MINI = "doctor --data fashion-mnist-mini --device cpu"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the self-check with a step alone, which is enough then, and a perceptron narrow.

    The whole takes seconds; tests/checks/test_diagnosis.py makes it.
    """
    monkeypatch.setattr("gradveil.checks.doctor.ENOUGH", 0.0)
    monkeypatch.setattr("gradveil.checks.doctor.self_check", partial(self_check, steps=1))
    monkeypatch.setattr(zoo, "MLP_WIDTH", zoo.MLP_WIDTH // 8)


def saved(path: Path, **settings: Any) -> Path:
    split = load("fashion-mnist-mini", "test")
    save_checkpoint(
        path,
        build("lenet", channels=1, size=28, classes=10, mean=split.mean, std=split.std),
        settings,
    )
    return path


def test_programs_get_every_finding_and_what_was_silent(gradveil: Any) -> None:
    outcome = gradveil(f"{MINI} --model lenet --steps 0 --json")
    assert outcome.status == 0 and outcome.result["errors"] == 0
    found = outcome.result["findings"]
    assert [(one["level"], one["name"]) for one in found] == [
        ("note", "accuracy"),
        ("note", "self-check"),
    ]
    assert {*found[0]} == {"level", "name", "means", "do"}
    assert len(outcome.result["silent"]) == len(CHECKS) - 2 and outcome.result["skipped"] == [
        "attack above blind"
    ]  # no attack was run


def test_people_get_two_lines_for_each_finding_the_worst_first_and_the_self_check_last(
    gradveil: Any,
) -> None:
    outcome = gradveil(
        f"{MINI} --model mlp --steps 0 --defense dropout:0.5 --labels inferred --batch-size 2"
    )
    lines = outcome.shown.splitlines()
    levels = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert (
        outcome.status == 0
        and levels[-3:] == ["well", "skipped", "note"]
        and levels[:-3] == sorted(levels[:-3], reverse=True)
    )
    assert (
        "dropout" in outcome.shown
        and "random shares" in outcome.shown
        and "self-check" in lines[-2]
    )


def test_a_checkpoint_at_chance_trained_with_a_scaled_loss_is_told_twice(
    gradveil: Any, tmp_path: Path
) -> None:
    path = saved(tmp_path / "model.safetensors", loss_scale=0.5)
    found = gradveil(f"{MINI} --model lenet --steps 0 --json --checkpoint {path}").result[
        "findings"
    ]
    warned = {one["name"]: one["means"] for one in found if one["level"] == "warning"}
    assert set(warned) == {"loss", "accuracy"} and "0.5 times" in warned["loss"]


def test_an_attack_above_blind_is_silent(gradveil: Any) -> None:
    assert (
        "attack above blind"
        in gradveil(f"{MINI} --model mlp --attack closed-form --json").result["silent"]
    )


def test_an_error_among_the_findings_gives_status_1(gradveil: Any, tmp_path: Path) -> None:
    (tmp_path / "too_narrow_net.py").write_text(
        "from torch import nn\ndef make(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(9, classes))\n"
    )
    outcome = gradveil(f"{MINI} --model too_narrow_net:make --steps 0 --json")
    assert (
        outcome.status == 1
        and outcome.result["errors"] == 1
        and "attack above blind" in outcome.result["skipped"]
    )
    assert [one["name"] for one in outcome.result["findings"]] == ["model and images", "self-check"]


def test_an_attack_of_ones_own_is_tried(gradveil: Any, tmp_path: Path) -> None:
    (tmp_path / "own_attack_of_the_doctor.py").write_text(
        "from gradveil.attacks import closed_form\nMINE = closed_form\n"
    )
    outcome = gradveil(f"{MINI} --model mlp --attack own_attack_of_the_doctor:MINE --json")
    assert "attack above blind" in outcome.result["silent"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--data cats --model lenet", "unknown dataset 'cats'"),
        ("--model nonet", "unknown model 'nonet'"),
        ("--model lenet --defense shield", "unknown defense 'shield'"),
        ("--model lenet --defense prune:1.5", "1.5"),
        ("--model lenet --attack magic", "unknown attack 'magic'"),
        ("--model lenet --attack nowhere_at_all:MINE", "there is no module 'nowhere_at_all'"),
        ("--model lenet --labels guessed", "guessed"),
        ("--model lenet --batch-size 0", "batch size 0"),
        ("--model lenet --batch-size 501", "501"),
        ("--model lenet --checkpoint none.safetensors", "no checkpoint at none.safetensors"),
        ("--model lenet --local-steps 0", "local steps 0"),
        ("--model lenet --steps -1", "-1"),
        ("--model lenet --device tpu", "unknown device 'tpu'"),
    ],
)
def test_bad_input_is_one_line(gradveil: Any, line: str, words: str) -> None:
    assert words in gradveil(f"{MINI} {line}").error


def test_weights_of_another_model_are_refused(gradveil: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors")
    assert "does not fit" in gradveil(f"{MINI} --model mlp --checkpoint {path}").error
    broken = build("lenet", channels=1, size=28, classes=10)
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    save_checkpoint(path, broken, {})
    assert "not finite" in gradveil(f"{MINI} --model lenet --checkpoint {path}").error
