"""A whole audit of batches: what does not depend on the pictures wins 1 of N line-ups."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack
from gradveil.attacks.base import Progress
from gradveil.audits import AuditResult, audit
from gradveil.core.types import Observation, Reconstruction
from gradveil.data import load

BATCH, IMAGES = 4, 2_000
CONTROLS = 7  # blind guesses, and the bar that knows the draws too


@cache
def pictures(split: str) -> tuple[Tensor, Tensor]:
    """Return embedded pictures at 12 pixels, in [0, 1], and their labels."""
    images = load("fashion-mnist-mini", split)
    small = torch.nn.functional.interpolate(images.images.float(), size=12, mode="area")
    return small.round() / 255, images.labels


@dataclass(frozen=True)
class OthersOfTheClass(Attack):
    """For each label of a batch, another picture of that class: it looks at no gradient."""

    needs = ("labels",)

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        return [self._one(victim, rng) for victim in seen]

    def _one(self, victim: Observation, rng: Generator) -> Reconstruction:
        (public, classes), labels = pictures("test"), victim.knowledge.labels
        assert labels is not None
        chosen = []
        for label in labels:
            members = (classes == label).nonzero().flatten()
            chosen.append(members[torch.randint(len(members), (), generator=rng)])
        return Reconstruction(public[torch.stack(chosen)], labels, 0.5, "ok")


@pytest.fixture(scope="module", params=["policy:none", "3-1-7+43-18-18"])
def audited(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AuditResult:
    """2,000 pictures at 12 pixels in updates of four."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 10))
    return audit(
        model,
        *pictures("train"),
        public=pictures("test"),
        defenses=[request.param],
        attacks=[("others", OthersOfTheClass())],
        victims=IMAGES,
        batch_size=BATCH,
        sham=False,
        control=False,
        out=Path(tmp_path_factory.mktemp("chance")) / "run",
        device="cpu",
        progress=False,
    )


def test_guesses_bars_and_other_pictures_of_the_class_win_one_line_up_in_n(
    audited: AuditResult,
) -> None:
    """Sixteen tests at 1 in 1,000 each; a line-up that nobody can win would fail them too."""
    (case,) = audited.cases
    size = case.settings["candidates"]
    rows = [
        row for row in case.rows if row.truth == "used" and row.kind in ("attack", "blind", "bar")
    ]
    assert size >= 20 and len(rows) == 1 + CONTROLS
    for row in rows:
        assert row.n == IMAGES
        p = binomtest(row.identified, row.n, 1 / size).pvalue
        assert p > 1e-3, f"{row.attack}: {row.identified} of {row.n}"
