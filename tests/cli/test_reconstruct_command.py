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
    options = f"--before {update[0]} --after {update[1]} --data fashion-mnist-mini --model lenet --steps 25 --out {out} --json"
    outcome = gradveil(f"reconstruct {options}")
    assert outcome.status == 0
    assert outcome.result["labels"] == [load("fashion-mnist-mini", "test").classes[0]]
    found = np.array(Image.open(out / "image-0.png")).astype(float)
    truth = load("fashion-mnist-mini", "test").images[0, 0].numpy().astype(float)
    assert np.abs(found - truth).mean() < 10


def test_two_equal_files_are_refused(
    gradveil: Any, update: tuple[Path, Path], tmp_path: Path
) -> None:
    outcome = gradveil(
        f"reconstruct --before {update[0]} --after {update[0]} --data fashion-mnist-mini --model lenet --out {tmp_path / 'o'}"
    )
    assert outcome.status == 2
    assert outcome.said.count("error: ") == 1
    assert not (tmp_path / "o").exists()
