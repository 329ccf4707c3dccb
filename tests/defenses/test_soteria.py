"""Soteria cuts the columns that its rule says, and nothing else."""

import pytest
import torch
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Knowledge
from gradveil.defenses import Moment, Soteria, chain
from gradveil.defenses.soteria import sensitivities
from gradveil.engine.gradients import cross_entropy, gradient
from gradveil.models import build


@pytest.fixture
def moment() -> Moment:
    model = build("lenet", channels=1, size=8, classes=5).double().eval()
    batch = Batch(torch.rand(3, 1, 8, 8, generator=generator(0)).double(), torch.tensor([0, 3, 1]))
    return Moment(model, batch, cross_entropy)


def head(model: nn.Module) -> nn.Linear:
    found = model.get_submodule("head")
    assert isinstance(found, nn.Linear)
    return found


def test_the_rule_equals_a_loop_over_features_and_images(moment: Moment) -> None:
    found = sensitivities(moment, head(moment.model))
    body = nn.Sequential(
        moment.model.get_submodule("normalize"), moment.model.get_submodule("features")
    )
    expected = torch.zeros(head(moment.model).in_features, dtype=torch.float64)
    for image in moment.batch.images:
        x = image[None].requires_grad_()
        features = body(x)[0]
        for number, feature in enumerate(features):
            (slope,) = torch.autograd.grad(feature, x, retain_graph=True)
            expected[number] += slope.norm() / feature.abs().detach()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 0.99])
def test_the_columns_of_the_least_sensitive_features_become_zero_and_nothing_else(
    moment: Moment, share: float
) -> None:
    clean = gradient(moment.model, cross_entropy, moment.batch.images, moment.batch.labels)
    found, _ = Soteria(share).protect_gradients(clean, moment, None, generator(0))
    order = sensitivities(moment, head(moment.model)).argsort()
    cut = order[: int(share * len(order) + 1e-9)]
    for name, value in clean.items():
        expected = value.clone()
        if name == "head.weight":
            expected[:, cut] = 0
        assert torch.equal(found[name], expected)


def test_another_layer_can_be_named_and_the_attacker_told_of_it() -> None:
    model = build("mlp", channels=1, size=4, classes=5).eval()
    batch = Batch(torch.rand(1, 1, 4, 4, generator=generator(0)), torch.tensor([2]))
    clean = gradient(model, cross_entropy, batch.images, batch.labels)
    defense = Soteria(0.5, layer="features.3")
    found, _ = defense.protect_gradients(
        clean, Moment(model, batch, cross_entropy), None, generator(0)
    )
    assert [name for name in clean if not torch.equal(found[name], clean[name])] == [
        "features.3.weight"
    ]
    assert defense.tell(Knowledge(), model).defended_layers == ("features.3.weight",)
    assert Soteria(0.5).tell(Knowledge(), model).defended_layers == ("head.weight",)


def test_an_attacker_is_told_of_the_layers_of_two_soterias() -> None:
    model = build("mlp", channels=1, size=4, classes=5)
    for second, layers in (
        (Soteria(0.2, layer="features.3"), ("head.weight", "features.3.weight")),
        (Soteria(0.2), ("head.weight",)),
    ):
        assert chain([Soteria(0.5), second]).tell(Knowledge(), model).defended_layers == layers


def test_a_layer_that_does_not_exist_is_told_with_those_there_are(moment: Moment) -> None:
    with pytest.raises(GradveilError, match=r"'features\.1': choose from head"):
        Soteria(0.5, layer="features.1").protect_gradients({}, moment, None, generator(0))


def test_a_model_without_a_linear_layer_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 5, 8), nn.Flatten())
    with pytest.raises(GradveilError, match="no linear layer"):
        Soteria(0.5).tell(Knowledge(), model)


def test_a_frozen_layer_is_refused(moment: Moment) -> None:
    head(moment.model).weight.requires_grad_(False)
    clean = gradient(moment.model, cross_entropy, moment.batch.images, moment.batch.labels)
    with pytest.raises(GradveilError, match="'head' is frozen"):
        Soteria(0.5).protect_gradients(clean, moment, None, generator(0))
