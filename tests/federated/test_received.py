"""Models that a client receives: honest ones pass, ones that are made to leak are refused."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import toys
from gradveil.federated.received import suspicion
from gradveil.models import build

OTHERS = toys.fashion(96, 12, dtype=torch.float32)


def network() -> nn.Module:
    return toys.mlp(nn.ReLU(), channels=1, size=12, width=64).float()


def set_traps(layer: nn.Linear, units: int, scale: float = 0.95) -> None:
    """Let the positive half of each unit's weights be the negative half, scaled."""
    half = layer.in_features // 2
    with torch.no_grad():
        for number in range(units):
            rng = torch.Generator().manual_seed(number)
            order = torch.randperm(layer.in_features, generator=rng)
            values = torch.randn(half, generator=rng).abs()
            layer.weight[number, order[:half]] = -values
            layer.weight[number, order[half:]] = scale * values


def first_layer(model: nn.Module) -> nn.Linear:
    return next(module for module in model.modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize("units", [64, 24])
def test_trap_weights_in_more_than_a_quarter_of_the_units_are_refused(units: int) -> None:
    model = network()
    set_traps(first_layer(model), units)
    assert suspicion(model, OTHERS.images) == (
        "the weights of at least 25% of the 64 units of layer '1' have nearly the same sum, as "
        "trap weights do"
    )


def test_sums_of_weights_say_nothing_where_inputs_may_be_negative() -> None:
    norm = nn.LayerNorm((1, 12, 12), elementwise_affine=False)
    model = nn.Sequential(norm, network())
    set_traps(first_layer(model), 64)
    assert suspicion(model, OTHERS.images) is None


def test_dead_units_and_values_that_are_not_finite_are_refused() -> None:
    model = network()
    first = first_layer(model)
    with torch.no_grad():
        first.weight[:32] = 0
    assert suspicion(model, OTHERS.images) == "32 of 64 units of layer '1' are dead"
    with torch.no_grad():
        first.weight[0] = float("nan")
    assert "not finite" in str(suspicion(model, OTHERS.images))


@pytest.mark.parametrize("name", ["lenet", "mlp", "convnet", "vit"])
def test_honest_models_at_several_stages_are_not_refused(name: str) -> None:
    for seed in range(2):
        model = toys.narrow(partial(build, name, channels=1, size=12, classes=10, seed=seed))
        assert suspicion(model, OTHERS.images[:8]) is None
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        for step in range(10):
            optimizer.zero_grad()
            some = slice(step * 8, step * 8 + 8)
            cross_entropy(model(OTHERS.images[some]), OTHERS.labels[some]).backward()
            optimizer.step()
            assert step % 5 or suspicion(model, OTHERS.images[:8]) is None
        assert suspicion(model, OTHERS.images[:8]) is None


def test_a_wide_network_passes_untrained_and_trained() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-2)
    for step in range(60):
        assert step % 20 or suspicion(model, OTHERS.images) is None
        optimizer.zero_grad()
        cross_entropy(model(OTHERS.images), OTHERS.labels).backward()
        optimizer.step()
    assert suspicion(model, OTHERS.images) is None
