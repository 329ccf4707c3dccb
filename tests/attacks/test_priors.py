"""Priors against plain formulas in float64; that rows are independent, that slopes reach the images, that the model is left alone."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.priors import (
    LabelTerm,
    NormStatistics,
    Prior,
    PriorState,
    Sum,
    TotalVariation,
    none,
)
from gradveil.core.errors import GradveilError

ROWS, BATCH, SIDE, CLASSES = 3, 2, 6, 4
PRIORS: list[Prior] = [
    TotalVariation(0.5),
    LabelTerm(0.5),
    NormStatistics(0.5),
    Sum((TotalVariation(0.1), LabelTerm(2.0))),
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def images() -> Tensor:
    return random(ROWS, BATCH, 3, SIDE, SIDE)


def network() -> nn.Sequential:
    """Two batch norms with running statistics of their own, one of them over vectors, and weights that do not depend on a seed."""
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(5 * 16, 7),
        nn.BatchNorm1d(7),
        nn.Linear(7, CLASSES),
    ).double()
    for seed, (name, value) in enumerate(model.state_dict().items()):
        if value.is_floating_point():
            value.copy_(
                random(*value.shape, seed=seed) + (0.1 if name.endswith("running_var") else -0.4)
            )
    return model.eval().requires_grad_(False)


def state(
    model: nn.Module | None = None, train_mode: bool = False, rows: slice = slice(None)
) -> PriorState:
    labels = torch.tensor([[0, 1], [2, 3], [3, 3]])[rows]
    frame = (
        torch.tensor([0.5, 0.4, 0.3]).double().view(3, 1, 1),
        torch.tensor([0.2, 0.5, 2.0]).double().view(3, 1, 1),
    )
    return PriorState(model or network(), labels, *frame, train_mode=train_mode)


def test_total_variation_equals_a_plain_loop() -> None:
    given = state()
    z = (images() - given.mean) / given.std
    for row, found in enumerate(TotalVariation(0.5)(images(), given)):
        across = [
            abs(float(z[row, b, c, i, j + 1] - z[row, b, c, i, j]))
            for b in range(BATCH) for c in range(3) for i in range(SIDE) for j in range(SIDE - 1)
        ]  # fmt: skip
        down = [
            abs(float(z[row, b, c, i + 1, j] - z[row, b, c, i, j]))
            for b in range(BATCH) for c in range(3) for i in range(SIDE - 1) for j in range(SIDE)
        ]  # fmt: skip
        assert float(found) == pytest.approx(
            0.5 * (sum(across) / len(across) + sum(down) / len(down)), rel=1e-12
        )


def test_total_variation_of_a_flat_or_a_one_pixel_image_is_zero() -> None:
    given = state()
    assert not TotalVariation(1.0)(
        torch.full((2, 1, 3, 4, 4), 0.3, dtype=torch.float64), given
    ).any()
    assert not TotalVariation(1.0)(images()[..., :1, :1], given).any()


@pytest.mark.parametrize("soft", [False, True])
def test_the_label_term_equals_its_formula(soft: bool) -> None:
    given = state()
    target = torch.eye(CLASSES, dtype=torch.float64)[given.labels]
    if soft:
        target = random(ROWS, BATCH, CLASSES, seed=4).softmax(-1)
        given = PriorState(given.model, target, given.mean, given.std)
    for row, found in enumerate(LabelTerm(3.0)(images(), given)):
        probabilities = given.model(images()[row]).softmax(1)
        assert float(found) == pytest.approx(
            3.0 * float(((probabilities - target[row]) ** 2).sum()), rel=1e-12
        )


def test_norm_statistics_equal_their_formula() -> None:
    model = network()
    for row, found in enumerate(NormStatistics(2.0)(images(), state(model))):
        first = model[0](images()[row])
        second = model[4](model[3](model[2](model[1](first))))
        expected = 0.0
        for norm, values in ((model[1], first.transpose(0, 1).flatten(1)), (model[5], second.T)):
            assert isinstance(norm.running_mean, Tensor) and isinstance(norm.running_var, Tensor)
            for channel, own in enumerate(values):
                mean = own.sum() / len(own)
                variance = ((own - mean) ** 2).sum() / len(own)
                gap = (mean - norm.running_mean[channel]) ** 2 + (
                    variance - norm.running_var[channel]
                ) ** 2
                expected += float(gap) / len(values)
        assert float(found) == pytest.approx(2.0 * expected, rel=1e-12)


def test_norm_statistics_vanish_where_the_statistics_are_met() -> None:
    model = (
        nn.Sequential(
            nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES)
        )
        .double()
        .eval()
    )
    norm = model[0]
    assert (
        isinstance(norm, nn.BatchNorm2d)
        and norm.running_mean is not None
        and norm.running_var is not None
    )
    own = images()[1]
    norm.running_mean.copy_(own.mean((0, 2, 3)))
    norm.running_var.copy_(own.var((0, 2, 3), correction=0))
    found = NormStatistics(1.0)(images(), state(model))
    assert float(found[1]) < 1e-25 < float(found[0])


@pytest.mark.parametrize("train_mode", [False, True])
@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_rows_are_independent(prior: Prior, train_mode: bool) -> None:
    together = prior(images(), state(train_mode=train_mode))
    assert together.shape == (ROWS,)
    for row in range(ROWS):
        rows = slice(row, row + 1)
        torch.testing.assert_close(
            prior(images()[rows], state(train_mode=train_mode, rows=rows)),
            together[rows],
            rtol=1e-12,
            atol=0,
        )


@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_the_slope_by_the_images_is_that_of_finite_differences(prior: Prior) -> None:
    given = state(rows=slice(0, 1))
    guess = images()[:1].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: prior(x, given), guess, fast_mode=True)
    (slope,) = torch.autograd.grad(prior(guess, given).sum(), guess)
    assert bool(slope.any())


@pytest.mark.parametrize("train_mode", [False, True])
@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_the_model_is_left_as_it_was(prior: Prior, train_mode: bool) -> None:
    model = network().train(not train_mode)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prior(images(), state(model, train_mode=train_mode))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(
        module.training is not train_mode and not module._forward_pre_hooks
        for module in model.modules()
    )


def test_hooks_are_gone_after_a_pass_that_failed() -> None:
    model = network()
    with pytest.raises(RuntimeError):
        NormStatistics(1.0)(images()[..., :4], state(model))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_sum_adds_its_parts_and_none_is_nothing() -> None:
    parts: tuple[Prior, ...] = (TotalVariation(0.3), LabelTerm(0.7), NormStatistics(0.1))
    torch.testing.assert_close(
        Sum(parts)(images(), state()),
        sum((part(images(), state()) for part in parts), torch.zeros(1)).double(),
    )
    assert torch.equal(none(images(), state()), torch.zeros(ROWS, dtype=torch.float64))


def test_a_model_without_batch_norm_has_no_statistics() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 8), nn.BatchNorm1d(8, track_running_stats=False)
    ).double()
    with pytest.raises(GradveilError, match="no batch norm with running statistics"):
        NormStatistics(1.0)(images(), state(model))


@pytest.mark.parametrize("kind", [TotalVariation, LabelTerm, NormStatistics])
@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_a_weight_below_zero_or_not_finite_is_refused(
    kind: Callable[[float], Prior], weight: float
) -> None:
    with pytest.raises(GradveilError, match=f"prior weight {weight}"):
        kind(weight)
