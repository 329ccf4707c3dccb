"""Every scorer of policies keeps the promises that a search builds on."""

import importlib
import pickle
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradveil.scores
import gradveil.search
from gradveil.attacks import GradientMatching
from gradveil.attacks.distances import cosine
from gradveil.attacks.optimizers import Adam
from gradveil.core.seeds import generator
from gradveil.data import Images
from gradveil.scores.accuracy import AccuracyScorer
from gradveil.scores.privacy import PrivacyScorer
from gradveil.scores.scorer import Scorer
from gradveil.search.probe import ProbeScorer
from gradveil.transforms import Policy

POLICIES = [Policy.parse(text) for text in ("none", "3-1-7", "43-18-18+3", "9")]
SIZE, COUNT = 8, 20
SMALL = GradientMatching(cosine, Adam(0.1), steps=4, frames=0)


def small() -> tuple[nn.Module, Tensor, Tensor]:
    """A small model with random weights, and random images and labels for it."""
    rng = generator(3, "contract")
    layers = (nn.Flatten(), nn.Linear(3 * SIZE**2, 16), nn.Sigmoid(), nn.Linear(16, 10))
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(0, 0.1, generator=rng)
    images = torch.randint(256, (COUNT, 3, SIZE, SIZE), generator=rng, dtype=torch.uint8)
    return model, images, torch.randint(10, (COUNT,), generator=rng)


def make_probe_scorer(seed: int) -> Scorer:
    model, images, labels = small()
    public = Images("toys", "train", images, labels, tuple("abcdefghij"), (0.5,) * 3, (0.5,) * 3)
    candidates = torch.stack([images[:12], images[8:], images[4:16]], dim=1)
    true = torch.zeros(12, dtype=torch.long)
    chosen = images[:12], labels[:12], candidates, true, public
    return ProbeScorer(model, 10, *chosen, SMALL, seed=seed, sizes=(7, 5))


SCORERS: dict[str, Callable[[int], Scorer]] = {
    "privacy, code": lambda seed: PrivacyScorer(*small(), "code", points=3, seed=seed),
    "privacy, paper": lambda seed: PrivacyScorer(*small(), "paper", points=3, seed=seed),
    "accuracy": lambda seed: AccuracyScorer(*small(), batches=2, seed=seed),
    "probe": make_probe_scorer,
}


@pytest.fixture(params=SCORERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Scorer]:
    return SCORERS[request.param]


@pytest.fixture
def scorer(make: Callable[[int], Scorer]) -> Scorer:
    return make(5)


def test_every_scorer_of_policies_is_here() -> None:
    packages = (gradveil.scores, gradveil.search)
    for package in packages:
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    homes = tuple(f"{package.__name__}." for package in packages)
    defined = {kind for kind in Scorer.__subclasses__() if kind.__module__.startswith(homes)}
    assert {type(make(0)) for make in SCORERS.values()} == defined


def test_every_block_gives_finite_values_of_the_promised_shape(scorer: Scorer) -> None:
    assert min(scorer.blocks) >= 1 and scorer.unit >= 1
    for block, size in enumerate(scorer.blocks):
        found = scorer.score(POLICIES, block)
        assert tuple(found) == scorer.names
        for values in found.values():
            assert values.shape == (len(POLICIES), size)
            assert values.dtype == torch.float64 and values.device.type == "cpu"
            assert bool(values.isfinite().all())


def test_the_blocks_add_up_to_the_whole_score(scorer: Scorer) -> None:
    blocks = [scorer.score(POLICIES, block) for block in range(len(scorer.blocks))]
    for row, estimates in enumerate(scorer.estimates(POLICIES)):
        for name, estimate in estimates.items():
            assert estimate.n == sum(scorer.blocks)
            joined = [value for block in blocks for value in block[name][row].tolist()]
            assert list(estimate.values) == joined


def test_the_seed_decides_the_values(make: Callable[[int], Scorer]) -> None:
    last = len(make(5).blocks) - 1
    first, again, other = (make(seed).score(POLICIES, last) for seed in (5, 5, 6))
    for name, values in first.items():
        assert values.equal(again[name])
    assert any(not values.equal(other[name]) for name, values in first.items())


def test_a_value_depends_on_neither_the_other_policies_nor_earlier_calls(scorer: Scorer) -> None:
    last = len(scorer.blocks) - 1
    together = scorer.score(POLICIES, last)
    for row in reversed(range(len(POLICIES))):
        alone = scorer.score([POLICIES[row]], last)
        for name, values in alone.items():
            torch.testing.assert_close(values[0], together[name][row], rtol=1e-4, atol=1e-4)


def test_a_scorer_that_was_sent_to_another_process_gives_the_same_values(scorer: Scorer) -> None:
    copy = pickle.loads(pickle.dumps(scorer))
    for name, values in copy.score(POLICIES[1:2], 0).items():
        assert values.equal(scorer.score(POLICIES[1:2], 0)[name])


def test_crop_and_flip_are_an_option(scorer: Any) -> None:
    plain = replace(scorer, augment=False)
    first, second = (one.score(POLICIES[:1], 0) for one in (scorer, plain))
    assert any(not values.equal(second[name]) for name, values in first.items())
