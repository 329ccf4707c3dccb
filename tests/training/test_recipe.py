"""The published recipe as numbers, and the settings it refuses."""

import math
import re

import pytest
import torch
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.training import Recipe


def test_the_defaults_are_the_published_ones() -> None:
    recipe = Recipe()
    assert (recipe.lr, recipe.momentum, recipe.weight_decay, recipe.batch_size) == (
        0.1,
        0.9,
        5e-4,
        128,
    )
    assert (recipe.epochs, recipe.loss_scale) == (60, 1.0)
    group = recipe.optimizer(nn.Linear(2, 2)).param_groups[0]
    assert (group["nesterov"], group["momentum"], group["weight_decay"], group["dampening"]) == (
        True,
        0.9,
        5e-4,
        0,
    )


@pytest.mark.parametrize(
    ("epochs", "falls"),
    [(8, (3, 5, 7)), (60, (23, 38, 53)), (200, (75, 125, 175)), (1, ()), (2, (1,))],
)
def test_the_rate_is_divided_by_ten_at_three_five_and_seven_eighths(
    epochs: int, falls: tuple[int, ...]
) -> None:
    rates = [Recipe(epochs=epochs).rate(epoch) for epoch in range(epochs)]
    assert tuple(epoch for epoch in range(1, epochs) if rates[epoch] < rates[epoch - 1]) == falls
    assert rates[0] == 0.1 and (len(falls) < 3 or math.isclose(rates[-1], 1e-4))


def test_the_loss_is_scaled_cross_entropy() -> None:
    logits, labels = torch.tensor([[0.0, math.log(3)]]), torch.tensor([0])
    assert float(Recipe().loss(logits, labels)) == pytest.approx(math.log(4))
    assert float(Recipe(loss_scale=0.5).loss(logits, labels)) == pytest.approx(math.log(4) / 2)


def test_no_momentum_means_plain_descent() -> None:
    assert Recipe(momentum=0).optimizer(nn.Linear(2, 2)).param_groups[0]["nesterov"] is False


@pytest.mark.parametrize(
    "bad",
    [{"epochs": -1}, {"batch_size": 0}, {"batch_size": -5}, {"momentum": -0.1}, {"momentum": 1.0}],
)
def test_settings_out_of_range_are_refused_by_name(bad: dict[str, float]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(
        GradveilError, match="^" + re.escape(f"{name.replace('_', ' ')} {value}: it must be ")
    ):
        Recipe(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lr", "loss_scale", "weight_decay", "momentum"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e39])
def test_rates_that_are_no_positive_numbers_are_refused(name: str, value: float) -> None:
    with pytest.raises(
        GradveilError, match="^" + re.escape(f"{name.replace('_', ' ')} {value}: it must be ")
    ):
        Recipe(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lr", "loss_scale"])
def test_a_rate_of_zero_is_refused(name: str) -> None:
    with pytest.raises(GradveilError, match=r"above 0 and finite as a float32"):
        Recipe(**{name: 0.0})  # type: ignore[arg-type]
