"""What a checkpoint says of its training is read with its crop and flip, and a measured accuracy is a function of the seed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.audits import AuditJob
from gradveil.audits.cases import canonical
from gradveil.audits.weights import Trained, measured, trained
from gradveil.core.seeds import following, generator
from gradveil.data import load
from gradveil.defenses import parse
from gradveil.models import build
from gradveil.models.checkpoints import save_checkpoint
from gradveil.training.job import TrainingJob


def told(folder: Path, **settings: Any) -> Trained:
    """What an audit reads in a checkpoint of such a training."""
    settings = TrainingJob("fashion-mnist-mini", "mlp", **settings).settings() | {
        "image_size": 28,
        "test_accuracy": 0.5,
        "step": 1,
    }
    save_checkpoint(
        folder / "model.safetensors", build("mlp", channels=1, size=28, classes=10), settings
    )
    job = AuditJob(
        "fashion-mnist-mini",
        "mlp",
        ("adam-cosine",),
        1,
        checkpoint=folder / "model.safetensors",
        defense="3-1-7",
    )
    found = trained(job, load("fashion-mnist-mini", "test"), torch.device("cpu"))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("defense", "without"),
    [
        ("3-1-7", "policy:3-1-7,augment=no"),
        ("3-1-7+43-18-18", "policy:3-1-7+43-18-18,augment=no"),
        ("random", "random:augment=no"),
        ("random:4,seed=2", "random:4,seed=2,augment=no"),
        ("3-1-7,then,prune:0.9", "policy:3-1-7,augment=no,then,prune:0.9"),
        ("prune:0.9", "prune:0.9"),
        ("none", "none"),
    ],
)
def test_a_training_without_crop_and_flip_was_under_the_policy_without_them(
    tmp_path: Path, defense: str, without: str
) -> None:
    assert told(tmp_path, defense=parse(defense)).under == defense
    assert told(tmp_path, defense=parse(defense), augment=False).under == without
    assert canonical([without]) == [without]  # as an audit of that defense calls it


def test_the_accuracy_of_a_model_that_draws_follows_from_the_seed_alone() -> None:
    test = load("fashion-mnist-mini", "test")
    plain = build("lenet", channels=1, size=28, classes=10, mean=test.mean, std=test.std, seed=5)
    model = parse("precode:k=8").protect_model(plain, (1, 28, 28))
    found = []
    for number, seed in enumerate((3, 3, 4)):
        torch.manual_seed(number)
        state = torch.random.get_rng_state()
        found.append(measured(model, test, 500, seed))
        assert torch.equal(torch.random.get_rng_state(), state)
    assert found[0] == found[1] != found[2]
    with torch.no_grad(), following(generator(3, "test")):
        right = model.eval()(test.images.float() / 255)[:, :10].argmax(1) == test.labels
    assert found[0] == (float(right.double().mean()), 500)
