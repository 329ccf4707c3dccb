"""Small models that a user might bring, attacks that cost nothing, and a quick job."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator

from gradveil.attacks import Attack, find
from gradveil.attacks.base import Progress
from gradveil.audits import AuditJob, AuditResult, Case, CaseResult, Record, run_audit
from gradveil.core.types import Observation, Reconstruction
from gradveil.defenses import parse

SOURCE = """
import torch
from torch import nn


def linear(classes, size, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))


class Sometimes(nn.Module):
    def __init__(self, classes, size):
        super().__init__()
        self.layer = nn.Linear(size * size, classes)

    def forward(self, images):
        flat = images.flatten(1)
        return self.layer(flat) * (flat.mean(1, keepdim=True) > 0.2)


def sometimes(classes, size):
    return Sometimes(classes, size)


def dead(classes, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, classes), nn.Threshold(1e9, 0.0))


def diverged(classes, size):
    model = linear(classes, size, 1)
    model[1].weight.data[0, 0] = float("nan")
    return model


def wide(classes, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, classes + 1))


def norm(classes):
    features = nn.Conv2d(1, 4, 3, 4), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(196, classes))


def headless(classes, size):
    return nn.Sequential(nn.Conv2d(1, classes, size), nn.Flatten())
"""


@dataclass(frozen=True)
class Guess(Attack):
    """Noise from its generator; `fails` of the victims get no image, or one that is not finite."""

    fails: tuple[int, ...] = ()
    breaks: tuple[int, ...] = ()

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        found = []
        for number, one in enumerate(seen):
            images = torch.rand(one.size, *one.image_shape, generator=rng)
            images = images * float("nan") if number in self.breaks else images
            status = "failed: every restart diverged" if number in self.fails else "ok"
            found.append(Reconstruction(images, one.knowledge.labels, 0.5, status))
        progress(1, 1)
        return found


@pytest.fixture(scope="session")
def guess() -> type[Guess]:
    return Guess


@pytest.fixture(scope="session")
def nets_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_audit_nets.py").write_text(SOURCE)
    return folder


@pytest.fixture(scope="session")
def nets(nets_folder: Path) -> Iterator[str]:
    """The name of the module with these models, importable while the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(nets_folder)
        yield "own_audit_nets"


@pytest.fixture(scope="session")
def job(nets: str) -> AuditJob:
    """Two attacks and five images in chunks of two, with a policy: every source of randomness."""
    return AuditJob(
        f"{nets}:linear",
        "fashion-mnist-mini",
        {"guess": Guess(), "closed-form": find("closed-form")},
        cases=(Case(parse("3-1-7+43-18-18")),),
        images=5,
        first=0,
        victims_at_once=2,
        seed=3,
    )


@pytest.fixture(scope="session")
def whole(job: AuditJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that job, done."""
    return run_audit(job, tmp_path_factory.mktemp("whole") / "run", progress=False).out


@pytest.fixture
def done(whole: Path, tmp_path: Path) -> AuditResult:
    """The same in a folder that the test may change."""
    shutil.copytree(whole, tmp_path / "run")
    return AuditResult.read(tmp_path / "run")


@pytest.fixture
def result(done: AuditResult) -> CaseResult:
    """The only case of that audit."""
    return done.cases[0]


def plain(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in vars(record).items() if key != "seconds"}
        for record in records
    ]


@pytest.fixture
def without_times() -> object:
    return plain
