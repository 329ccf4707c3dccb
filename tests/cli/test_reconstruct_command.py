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
        ("--attack masked", "needs to know the pruned (whether zeros were cut off)"),
        (
            "--attack transform-known --defense 3-1-7",
            "draws included): a single update does not show it; an audit",
        ),
        ("--defense magic", "unknown defense 'magic'"),
        ("--loss nowhere_at_all:mine", "there is no module 'nowhere_at_all'"),
        ("--loss torch.nn.functional:nothing", "has no 'nothing'"),
        ("--loss torch.nn:Linear", "expected a function"),
        ("--loss torch.nn.functional:cross_entropy", 'as with reduction="none"'),
        ("--truth nowhere", "there is no nowhere"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    gradveil: Any, update: tuple[Path, Path], tmp_path: Path, line: str, words: str
) -> None:
    files = f"--before {update[0]} --after {update[1]} --out {tmp_path / 'o'}"
    assert words in gradveil(f"reconstruct {files} {MINI} {line}").error
    assert not (tmp_path / "o").exists()


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    folder = tmp_path / "truth"
    folder.mkdir()
    image = load("fashion-mnist-mini", "test").images[0, 0].numpy()
    Image.fromarray(image).save(folder / "a.png")
    return folder


def test_given_images_score_what_was_found(
    gradveil: Any, update: tuple[Path, Path], truth: Path, tmp_path: Path
) -> None:
    files = f"--before {update[0]} --after {update[1]} --out {tmp_path / 'o'} --truth {truth}"
    found = gradveil(f"reconstruct {files} {MINI} --steps 10 --json").result
    assert found["scores"]["psnr"][0] > 15 and found["scores"]["ssim"][0] > 0.5
    shown = gradveil(f"reconstruct {files} {MINI} --steps 1").shown
    assert "PSNR" in shown and "SSIM" in shown
    assert shown.startswith("the search has ended: gradient distance ")
    more = gradveil(f"reconstruct {files} {MINI} --steps 1 --batch-size 2").error
    assert "has 1 image(s), and the update is of 2" in more


def test_auto_tries_the_defenses_breakers_and_compares_those_that_measure_alike(
    gradveil: Any, update: tuple[Path, Path], tmp_path: Path
) -> None:
    files = f"--before {update[0]} --after {update[1]} --out {tmp_path / 'o'}"
    line = f"reconstruct {files} {MINI} --attack auto --defense prune:0.5 --steps 1"
    found = gradveil(f"{line} --json").result
    assert {"adam-cosine", "raced", "masked"} <= found["attacks"].keys()
    assert "first layer" in found["left_out"]["closed-form"]
    kinds = {each["measured_by"]: each for each in found["nearest"]}
    assert set(kinds["Cosine()"]["among"]) == {"adam-cosine", "raced"}
    assert "masked" in kinds["Cosine(nonzero=True)"]["among"]
    best = kinds["Cosine()"]["attack"]
    assert found["attacks"][best]["distance"] == min(
        found["attacks"][name]["distance"] for name in kinds["Cosine()"]["among"]
    )
    assert (tmp_path / "o" / "masked" / "image-0.png").is_file()


def test_the_loss_and_the_mode_are_the_clients(
    gradveil: Any, update: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "own_losses.py").write_text(
        "from torch.nn.functional import cross_entropy\n\n\n"
        "def half(logits, labels):\n"
        "    return cross_entropy(logits, labels, reduction='none') / 2\n"
    )
    files = f"--before {update[0]} --after {update[1]} --out {tmp_path / 'o'}"
    line = f"reconstruct {files} {MINI} --steps 3 --train-mode --json"
    right = gradveil(f"{line} --loss own_losses:half --local-lr 0.02").result
    plain = gradveil(line).result
    assert right["distance"] == pytest.approx(plain["distance"] / 4, rel=0.05)


def test_each_client_of_a_spy_is_scored_by_its_own_images(gradveil: Any, tmp_path: Path) -> None:
    from gradveil.federated.spied import Update, save_update

    split = load("fashion-mnist-mini", "test")
    model = build("mlp", channels=1, size=28, classes=10, mean=split.mean, std=split.std)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for client in range(2):
        model.zero_grad()
        answers = model(split.images[[client]].float() / 255)
        cross_entropy(answers, split.labels[[client]]).mean().backward()
        sent = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        save_update(tmp_path / "spy", Update(str(client), 1, before, sent, True, 1.0))
        folder = tmp_path / "truth" / str(client) / "whatever"
        folder.mkdir(parents=True)
        Image.fromarray(split.images[client, 0].numpy()).save(folder / "0.png")
    line = f"reconstruct --spy spy --round 1 {MINI.replace('lenet', 'mlp')} --attack closed-form"
    found = gradveil(f"{line} --truth truth --json --out o").result
    assert list(found) == ["client-0", "client-1"]
    assert all(each["scores"]["psnr"][0] > 30 for each in found.values())
    assert (tmp_path / "o" / "client-1" / "image-0.png").is_file()
    (tmp_path / "truth" / "1" / "whatever" / "0.png").rename(tmp_path / "0.png")
    (tmp_path / "truth" / "1" / "whatever").rmdir()
    (tmp_path / "truth" / "1").rmdir()
    assert "has no images of client 1" in gradveil(f"{line} --truth truth --out p").error
    assert "unknown client of round 1 '7'" in gradveil(f"{line} --client 7 --out p").error
