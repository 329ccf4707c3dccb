"""Noise has the stated law and scale."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Knowledge
from gradveil.defenses import GaussianNoise, LaplacianNoise, Moment, Pruning, chain
from gradveil.defenses.noise import Noise
from gradveil.engine.gradients import cross_entropy

MOMENT = Moment(
    nn.Linear(1, 1), Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long)), cross_entropy
)
COUNT = (
    100_000  # a scale 5% off moves the distribution by 0.009 (Laplace); 100,000 draws tell 0.005
)
MODEL = nn.Linear(1, 1)


def added(defense: Noise, value: float = 3.0) -> Tensor:
    clean = {"w": torch.full((COUNT,), value, dtype=torch.float64)}
    return defense.protect_gradients(clean, MOMENT, None, generator(5))[0]["w"] - value


@pytest.mark.parametrize("scale", [1e-3, 1e-2, 2.0])
@pytest.mark.parametrize(
    ("kind", "law"), [(GaussianNoise, stats.norm), (LaplacianNoise, stats.laplace)]
)
def test_noise_has_the_stated_law_and_scale(
    kind: type[Noise], law: stats.rv_continuous, scale: float
) -> None:
    noise = added(kind(scale)) / scale
    assert stats.kstest(noise.numpy(), law.cdf).pvalue > 0.01
    assert float(noise.std()) == pytest.approx(law.std(), rel=0.03)
    assert stats.kstest(noise.numpy() * 1.05, law.cdf).pvalue < 0.01, (
        "the test can tell a scale that is 5% off"
    )


def test_the_sum_of_squares_of_gaussian_noise_is_chi_squared() -> None:
    total = float((added(GaussianNoise(0.1)) / 0.1).square().sum())
    assert stats.chi2.ppf(0.001, COUNT) < total < stats.chi2.ppf(0.999, COUNT)


@pytest.mark.parametrize("kind", [GaussianNoise, LaplacianNoise])
def test_tensors_get_noise_of_their_own(kind: type[Noise]) -> None:
    clean = {name: torch.zeros(1000) for name in "ab"}
    found = kind(1.0).protect_gradients(clean, MOMENT, None, generator(0))[0]
    assert abs(float(torch.corrcoef(torch.stack([found["a"], found["b"]]))[0, 1])) < 4 / math.sqrt(
        1000
    )


def test_noise_of_scale_zero_changes_nothing_and_is_not_random() -> None:
    assert (
        not bool(added(GaussianNoise(0)).any())
        and not GaussianNoise(0).random
        and LaplacianNoise(1).random
    )
    assert GaussianNoise(0).tell(Knowledge(), MODEL).noise is None


def test_an_attacker_is_told_of_zeros_only_where_they_stay_zeros() -> None:
    assert chain([GaussianNoise(0.1), Pruning(0.5)]).tell(Knowledge(), MODEL).pruned is True
    told = chain([Pruning(0.5), LaplacianNoise(0.1)]).tell(Knowledge(), MODEL)
    assert told.pruned is None and told.noise == ("laplacian", 0.1)


def test_of_two_kinds_of_noise_the_louder_one_is_told() -> None:
    for pair in ([GaussianNoise(1), LaplacianNoise(2)], [LaplacianNoise(2), GaussianNoise(1)]):
        assert chain(pair).tell(Knowledge(), MODEL).noise == ("laplacian", 2)


def test_two_gaussian_noises_are_told_as_the_one_that_they_are() -> None:
    both = chain([GaussianNoise(0.3), GaussianNoise(0.4)])
    told = both.tell(Knowledge(), MODEL).noise
    assert told is not None and told[0] == "gaussian" and told[1] == pytest.approx(0.5)
    noise = both.protect_gradients({"w": torch.zeros(COUNT)}, MOMENT, both.start(), generator(5))[
        0
    ]["w"]
    assert float(noise.std()) == pytest.approx(told[1], rel=0.02)


def test_noise_of_scale_zero_covers_no_zeros() -> None:
    assert (
        chain([GaussianNoise(0.1), Pruning(0.5), GaussianNoise(0)]).tell(Knowledge(), MODEL).pruned
        is True
    )
