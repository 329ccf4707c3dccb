"""Small models of a user's own, and a quick job on the embedded images."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradveil.training import Recipe, TrainingJob

SOURCE = """
from torch import nn

stop = {"at": None, "act": None}


class Stopping(nn.Sequential):
    def forward(self, images):
        if self.training and stop["at"] is not None:
            if stop["at"] == 0:
                stop["act"]()
            stop["at"] -= 1
        return super().forward(images)


def small(classes, size):
    first, last = nn.Linear(size * size, 64), nn.Linear(64, classes)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)


def norm(classes):
    features = nn.Conv2d(1, 4, 3, 4), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(196, classes))


def dropout(classes, size):
    return Stopping(nn.Flatten(), nn.Dropout(), nn.Linear(size * size, classes))


class Shared(nn.Module):
    # One dropout layer at two places of different widths.

    def __init__(self, inputs, classes):
        super().__init__()
        self.first, self.head = nn.Linear(inputs, 32), nn.Linear(32, classes)
        self.drop = nn.Dropout()

    def forward(self, images):
        return self.head(self.drop(self.first(self.drop(images.flatten(1)))))


def shared(classes, size):
    return Shared(size * size, classes)


def wide(classes, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, classes + 1))


def frozen(classes, size):
    return small(classes, size).requires_grad_(False)


def picky():
    return nn.Linear(5, 10)
"""


@pytest.fixture(scope="session")
def nets_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_training_nets.py").write_text(SOURCE)
    return folder


@pytest.fixture(scope="session")
def nets(nets_folder: Path) -> Iterator[str]:
    """The name of the module with these models, importable while the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(nets_folder)
        yield "own_training_nets"


@pytest.fixture(scope="session")
def job(nets: str) -> TrainingJob:
    """Four epochs of five steps, with every source of randomness: order, crop, flip, dropout."""
    recipe = Recipe(epochs=4, lr=0.05, batch_size=40)
    return TrainingJob(
        "fashion-mnist-mini", f"{nets}:dropout", recipe, fraction=0.09, save_at=(0, 1, 7), seed=3
    )
