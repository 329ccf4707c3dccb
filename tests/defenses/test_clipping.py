"""Clipping of the whole gradient and of each sample's, and epsilon as Opacus counts it."""

import warnings

import pytest
import torch
from scipy import stats
from torch import nn

import toys
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Gradients, Knowledge
from gradveil.defenses import DPSGD, Clipping, Moment
from gradveil.engine.gradients import cross_entropy, gradient
from gradveil.models import build

BATCH = toys.batch(20, dtype=torch.float64)


def moment(model: nn.Module, batch: Batch = BATCH) -> Moment:
    return Moment(model, batch, cross_entropy)


def norm(gradients: Gradients) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).norm())


@pytest.fixture
def lenet() -> nn.Module:
    return toys.lenet()


@pytest.mark.parametrize(("bound", "factor"), [(2.5, 0.5), (5.0, 1.0), (50.0, 1.0)])
def test_a_gradient_is_scaled_down_to_the_norm_and_never_up(
    lenet: nn.Module, bound: float, factor: float
) -> None:
    clean = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])}
    found, _ = Clipping(bound).protect_gradients(clean, moment(lenet), None, generator(0))
    for name, value in clean.items():
        torch.testing.assert_close(found[name], factor * value)


def test_a_gradient_of_zeros_stays_one(lenet: nn.Module) -> None:
    found, _ = Clipping(1).protect_gradients(
        {"a": torch.zeros(3)}, moment(lenet), None, generator(0)
    )
    assert torch.equal(found["a"], torch.zeros(3))


def test_per_sample_clipping_equals_a_loop(lenet: nn.Module) -> None:
    """The noise is far below rounding, and 20 samples are more than are taken at once.

    The bound clips some of them and not others.
    """
    clean = gradient(lenet, cross_entropy, BATCH.images, BATCH.labels)
    each = [
        gradient(lenet, cross_entropy, x[None], y[None])
        for x, y in zip(BATCH.images, BATCH.labels, strict=True)
    ]
    bound = sorted(map(norm, each))[10]
    found, _ = DPSGD(bound, 1e-15).protect_gradients(clean, moment(lenet), None, generator(0))
    for name, value in found.items():
        expected = torch.stack([one[name] * min(1.0, bound / norm(one)) for one in each]).mean(0)
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10)


def test_a_bound_above_all_norms_leaves_the_gradient_as_it_is(lenet: nn.Module) -> None:
    clean = gradient(lenet, cross_entropy, BATCH.images, BATCH.labels)
    found, _ = DPSGD(1e6, 1e-20).protect_gradients(clean, moment(lenet), None, generator(0))
    for name, value in clean.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)


def test_the_noise_has_standard_deviation_multiplier_times_norm_over_batch_size(
    lenet: nn.Module,
) -> None:
    clean = gradient(lenet, cross_entropy, BATCH.images, BATCH.labels)
    quiet, _ = DPSGD(0.5, 1e-15).protect_gradients(clean, moment(lenet), None, generator(0))
    found, _ = DPSGD(0.5, 3.0).protect_gradients(clean, moment(lenet), None, generator(0))
    noise = torch.cat([(found[name] - quiet[name]).flatten() for name in found])
    assert stats.kstest((noise / (3.0 * 0.5 / 20)).numpy(), stats.norm.cdf).pvalue > 0.01
    told = DPSGD(0.5, 3.0).tell(Knowledge(labels=BATCH.labels), lenet)
    assert (
        told.noise is not None
        and told.noise[0] == "gaussian"
        and told.noise[1] == pytest.approx(3.0 * 0.5 / 20)
    )


@pytest.mark.parametrize(
    ("multiplier", "rate", "steps", "delta"),
    [(1.1, 0.01, 1000, 1e-5), (0.7, 0.1, 50, 1e-6), (4.0, 1.0, 10, 1e-5)],
)
def test_epsilon_equals_that_of_opacus(
    multiplier: float, rate: float, steps: int, delta: float
) -> None:
    with warnings.catch_warnings(action="ignore"):
        from opacus.accountants import RDPAccountant

        accountant = RDPAccountant()
        for _ in range(steps):
            accountant.step(noise_multiplier=multiplier, sample_rate=rate)
        expected = accountant.get_epsilon(delta)
    assert DPSGD(1.0, multiplier).epsilon(steps, delta, rate) == pytest.approx(expected, rel=1e-9)
    assert DPSGD(1.0, multiplier, rate).epsilon(steps, delta) == pytest.approx(expected, rel=1e-9)


@pytest.mark.usefixtures("without_opacus")
def test_epsilon_without_opacus_says_how_to_install_it() -> None:
    with pytest.raises(GradveilError, match=r"pip install gradveil\[dp\]"):
        DPSGD(1, 1, 0.1).epsilon(10, 1e-5)


@pytest.mark.parametrize(
    ("steps", "delta", "rate", "says"),
    [
        (10, 1e-5, None, "epsilon needs the sample rate"),
        (0, 1e-5, 0.1, "0 steps and delta 1e-05"),
        (10, 0.0, 0.1, "10 steps and delta 0"),
        (10, 1e-5, 1.5, "sample_rate 1.5"),
    ],
)
def test_epsilon_of_what_cannot_be_is_refused(
    steps: int, delta: float, rate: float | None, says: str
) -> None:
    with pytest.raises(GradveilError, match=says):
        DPSGD(1, 1).epsilon(steps, delta, rate)


@pytest.mark.parametrize("name", ["convnet", "resnet20-4"])
def test_batch_norm_is_refused_with_the_way_out(name: str) -> None:
    model = build(name, channels=3, size=16, classes=10)
    with pytest.raises(
        GradveilError, match=r"features\.1 is a BatchNorm2d.*GroupNorm.*ModuleValidator\.fix"
    ):
        DPSGD(1, 1).protect_model(model)
