"""Models that a client receives: honest ones pass, ones that are made to leak are refused."""

from functools import partial
from typing import Any

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


def test_traps_are_refused_where_hardly_any_input_is_negative() -> None:
    model = network()
    set_traps(first_layer(model), 64)
    assert "trap weights" in str(suspicion(model, (OTHERS.images - 0.001)))


def test_values_that_are_not_finite_are_refused() -> None:
    model = network()
    with torch.no_grad():
        first_layer(model).weight[0] = float("nan")
    assert "not finite" in str(suspicion(model, OTHERS.images))


def imprint(layer: nn.Linear, units: int) -> None:
    """Let some units measure the brightness, each against another threshold."""
    with torch.no_grad():
        layer.weight[:units] = 1 / layer.in_features
        layer.bias[:units] = -torch.linspace(0, 1, units)


def test_an_imprint_in_a_few_units_is_refused_also_where_the_others_are_dead() -> None:
    model = network()
    imprint(first_layer(model), 8)
    assert suspicion(model, OTHERS.images) == "8 of 64 units of layer '1' are copies of others"
    with torch.no_grad():
        first_layer(model).weight[8:] = 0
    assert suspicion(model, OTHERS.images) == "8 of 64 units of layer '1' are copies of others"


def test_an_imprint_behind_a_convolution_that_hands_pixels_on_is_refused() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(400, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    with torch.no_grad():
        kernel = model[0].get_parameter("weight")
        kernel[0] = 0
        kernel[0, 0, 1, 1] = 1
    imprint(first_layer(model), 64)
    assert suspicion(model, OTHERS.images) == "64 of 64 units of layer '3' are copies of others"


def last_layer(model: nn.Module) -> nn.Linear:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def test_a_last_layer_that_asks_for_one_class_is_refused() -> None:
    model = network()
    with torch.no_grad():
        last_layer(model).weight[1:] = 0
    assert suspicion(model, OTHERS.images) == "9 of 10 units of layer '3' are dead"


def trained(model: nn.Module, steps: int, decay: float = 0.0, some: slice = slice(96)) -> nn.Module:
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.05, 0.9, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(OTHERS.images[some]), OTHERS.labels[some]).backward()
        optimizer.step()
    return model


class Adapted(nn.Module):
    """A frozen layer with a low-rank part beside it, which starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.inner = nn.Linear(layer.in_features, rank, bias=False)
        self.outer = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.outer.weight)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        answers: torch.Tensor = self.layer(given) + self.outer(self.inner(given))
        return answers


def adapted() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), Adapted(nn.Linear(144, 128), 4), nn.ReLU()), nn.Linear(128, 10)
    )


def zero_headed(classes: int) -> nn.Module:
    """A network whose last layer starts at zero, with more classes than are trained on."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, classes))
    nn.init.zeros_(last_layer(model).weight)
    return model


def with_dead_units() -> nn.Module:
    """A network that lost half of its units, as by pruning or weight decay."""
    model = network()
    with torch.no_grad():
        first_layer(model).weight[::2] = 0
    return model


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(
    "make", [adapted, partial(zero_headed, 10), partial(zero_headed, 100), with_dead_units]
)
def test_honest_models_that_started_from_zeros_or_lost_units_pass(make: Any, steps: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    assert suspicion(trained(model, steps, some=slice(8)), OTHERS.images) is None


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
    for _ in range(4):
        assert suspicion(model, OTHERS.images) is None
        trained(model, 20, decay=1e-2)
