"""The positive control of many audits in one process is made once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Generator

import toys
from gradveil.attacks import Attack
from gradveil.attacks.base import Progress
from gradveil.audits import case_run
from gradveil.audits.case_run import MOST_REMEMBERED, remembered
from gradveil.clients import Client
from gradveil.core.seeds import generator
from gradveil.core.types import Observation, Reconstruction

MADE: list[str] = []


@dataclass(frozen=True)
class Counted(Attack):
    """Find noise, and count it."""

    name: str = "first"

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        MADE.append(self.name)
        return [
            Reconstruction(torch.rand(each.size, *each.image_shape, generator=rng), None, 0.0)
            for each in seen
        ]


@pytest.fixture(autouse=True)
def nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_run, "_REMEMBERED", {})
    MADE.clear()


def observed(seed: int = 0) -> list[Observation]:
    rng = generator(seed, "pictures")
    images, labels = torch.rand(2, 3, 8, 8, generator=rng), torch.tensor([1, 2])
    client = Client(toys.built("lenet").float(), classes=toys.CLASSES)
    return [shared.seen for shared in client.share_each(images, labels, 0)]


def test_an_equal_attack_on_the_same_observations_is_made_once() -> None:
    first, _ = remembered(Counted(), observed(), generator(0, "a"))
    again, _ = remembered(Counted(), observed(), generator(0, "a"))
    assert MADE == ["first"]
    for mine, theirs in zip(first, again, strict=True):
        assert torch.equal(mine.images, theirs.images)


def test_another_attack_seed_picture_or_knowledge_is_made_anew() -> None:
    remembered(Counted(), observed(), generator(0, "a"))
    remembered(Counted("second"), observed(), generator(0, "a"))
    remembered(Counted("second"), observed(), generator(1, "a"))
    remembered(Counted("second"), observed(seed=1), generator(1, "a"))
    told = [
        replace(each, knowledge=replace(each.knowledge, means=torch.zeros(10, 3, 8, 8)))
        for each in observed(seed=1)
    ]
    remembered(Counted("second"), told, generator(1, "a"))
    assert ["first", *["second"] * 4] == MADE


def test_few_are_kept() -> None:
    for seed in range(MOST_REMEMBERED + 2):
        remembered(Counted(), observed(), generator(seed, "a"))
    assert len(case_run._REMEMBERED) == MOST_REMEMBERED
