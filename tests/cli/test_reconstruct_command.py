"""gradveil reconstruct: two checkpoint files in, pictures out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from gradveil.data import load
from gradveil.engine.gradients import cross_entropy
from gradveil.models import build

MINI = "--data fashion-mnist-mini --model lenet --device cpu"


@pytest.fixture
def update(tmp_path: Path) -> tuple[Path, Path]:
    """What a client with one picture got and sent back, by plain SGD."""
    split = load("fashion-mnist-mini", "test")
    model = build("lenet", channels=1, size=28, classes=10, mean=split.mean, std=split.std)
    before, after = tmp_path / "before.safetensors", tmp_path / "after.npz"
    save_file(model.state_dict(), before)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    cross_entropy(model(split.images[:1].float() / 255), split.labels[:1]).mean().backward()
    optimizer.step()
    np.savez(after, **{name: value.numpy() for name, value in model.state_dict().items()})
    return before, after


def test_a_clients_picture_comes_back_from_two_files(
    gradveil: Any, update: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "found"
    files = f"--before {update[0]} --after {update[1]} --out {out}"
    outcome = gradveil(f"reconstruct {files} {MINI} --steps 10 --json")
    assert outcome.status == 0
    assert outcome.result["labels"] == [load("fashion-mnist-mini", "test").classes[0]]
    found = np.array(Image.open(out / "image-0.png")).astype(float)
    truth = load("fashion-mnist-mini", "test").images[0, 0].numpy().astype(float)
    assert np.abs(found - truth).mean() < 10


def test_two_equal_files_are_refused(
    gradveil: Any, update: tuple[Path, Path], tmp_path: Path
) -> None:
    files = f"--before {update[0]} --after {update[0]} --out {tmp_path / 'o'}"
    assert "hold the same weights" in gradveil(f"reconstruct {files} {MINI}").error
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--attack magic", "unknown attack 'magic'"),
        ("--attack nowhere_at_all:MINE", "there is no module 'nowhere_at_all'"),
        ("--attack closed-form --steps 3", "has no iterations: leave the steps out"),
        ("--steps 0", "--steps"),
        ("--size 0", "--size"),
        ("--local-lr 0", "local learning rate 0.0"),
        ("--model nonet", "unknown model 'nonet'"),
        ("--data cats", "unknown dataset 'cats'"),
        ("--device tpu", "unknown device 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    gradveil: Any, update: tuple[Path, Path], tmp_path: Path, line: str, words: str
) -> None:
    files = f"--before {update[0]} --after {update[1]} --out {tmp_path / 'o'}"
    assert words in gradveil(f"reconstruct {files} {MINI} {line}").error
    assert not (tmp_path / "o").exists()
