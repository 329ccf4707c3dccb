"""The inputs of dense layers, layer by layer from their gradients."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import toys
from gradveil.attacks import dense_layers
from gradveil.attacks.dense_layers import Found, trailing
from gradveil.attacks.features import find_features, told
from gradveil.core.types import Batch, Observation


def network(
    between: Callable[[], nn.Module] = nn.ReLU, *, widths: tuple[int, ...] = (24, 20)
) -> nn.Sequential:
    """A convolution of 32 outputs, then dense layers of these widths and one of ten classes."""

    def make() -> nn.Module:
        sizes = (32, *widths)
        hidden = [
            part
            for wide, narrow in pairwise(sizes)
            for part in (nn.Linear(wide, narrow), between())
        ]
        start = nn.Conv2d(3, 2, 3, 2, padding=1), nn.ReLU(), nn.Flatten()
        return nn.Sequential(*start, *hidden, nn.Linear(sizes[-1], 10))

    found = toys.seeded(make).double()
    assert isinstance(found, nn.Sequential)
    return found


def dense(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def batch(*labels: int) -> Batch:
    return Batch(toys.pictures(len(labels), dtype=torch.float64), torch.tensor(labels))


def find(seen: Observation) -> Found:
    return find_features(seen, torch.Generator().manual_seed(0))[0]


def inputs_of(model: nn.Module, private: Batch, layer: nn.Module) -> Tensor:
    made: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: made.append(given[0]))
    model(private.images.to(next(model.parameters())))
    hook.remove()
    return made[0].detach().double()


def gap(model: nn.Module, private: Batch, found: Found) -> float:
    """Return the largest relative distance of an image's features from the nearest found ones."""
    true = inputs_of(model, private, found.layer)
    nearest = torch.cdist(true, found.features).min(1).values
    return float((nearest / true.norm(dim=1)).max())


@pytest.mark.parametrize("between", [nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Identity])
@pytest.mark.parametrize("labels", [(3,), (0, 1, 2, 3), (9, 8, 7, 6, 5, 4, 3)])
def test_the_inputs_of_the_first_dense_layer_come_out_exactly(
    between: Callable[[], nn.Module], labels: tuple[int, ...]
) -> None:
    model, private = network(between), batch(*labels)
    found = find(toys.observe(model, private))
    assert found.layer is dense(model)[0]
    assert gap(model, private, found) < 1e-6


@pytest.mark.parametrize("labels", [(1, 1), (5, 5, 2, 5)])
def test_behind_relus_images_of_one_class_are_told_apart(labels: tuple[int, ...]) -> None:
    model, private = network(), batch(*labels)
    found = find(toys.observe(model, private))
    assert found.layer is dense(model)[0]
    assert gap(model, private, found) < 1e-5


@pytest.mark.parametrize("between", [nn.ReLU, nn.Sigmoid, nn.Tanh])
@pytest.mark.parametrize("labels", [(5, 5, 2, 5), (0, 0, 0, 0), (1, 1, 1, 3, 3, 3)])
def test_features_that_are_wrong_are_not_told_for_sure(
    between: Callable[[], nn.Module], labels: tuple[int, ...]
) -> None:
    model = network(between).float()
    private = Batch(toys.pictures(len(labels)), torch.tensor(labels))
    seen = toys.observe(model, private)
    for found in find_features(seen, torch.Generator().manual_seed(0)):
        if found.layer is dense(model)[1]:
            continue  # what is between the first and the last is taken only where they fail
        true = inputs_of(model, private, found.layer)
        nearest = torch.cdist(found.features, true).min(1).values / found.features.norm(dim=1)
        sure = told(found).bool()
        assert not bool((nearest[sure] > 2e-2).any())
        alone = [labels.count(label) == 1 for label in labels]
        assert bool(sure[torch.tensor(alone)].all())


def test_images_of_one_class_are_followed_to_the_last_digit_that_float32_has() -> None:
    """The first solution that explains the gradient to 3e-7 has features 1e-3 off."""
    private = Batch(toys.pictures(4), torch.tensor([0, 0, 0, 0]))
    model = network(widths=()).float()
    found = find(toys.observe(model, private))
    assert gap(model, private, found) < 1e-4
    assert bool(told(found).all())


def test_a_float32_gradient_gives_them_to_its_precision() -> None:
    model, private = network().float(), toys.batch(6)
    found = find(toys.observe(model, private))
    assert found.layer is dense(model)[0]
    assert gap(model, private, found) < 1e-4


def test_of_dense_layers_alone_the_images_themselves_come_out() -> None:
    model = toys.mlp(nn.ReLU())
    private = batch(1, 4, 4, 7)
    found = find(toys.observe(model, private))
    assert found.layer is dense(model)[0]
    assert found.features.shape == (4, private.images[0].numel())
    assert gap(model, private, found) < 1e-6


def test_a_layer_without_a_bias_is_no_obstacle() -> None:
    model, private = network(), batch(0, 1, 2)
    first, *_ = dense(model)
    first.register_parameter("bias", None)
    found = find(toys.observe(model, private))
    assert found.layer is first
    assert gap(model, private, found) < 1e-6


def test_pruned_entries_give_no_equation() -> None:
    model, private = network(), batch(0, 1)
    seen = toys.observe(model, private)
    first = "3.weight"
    kept = torch.rand(seen.gradients[first].shape, generator=torch.Generator().manual_seed(0)) > 0.3
    found = find(replace(seen, gradients={**seen.gradients, first: seen.gradients[first] * kept}))
    assert found.layer is dense(model)[0]
    assert gap(model, private, found) < 1e-6


def test_a_gradient_that_no_inputs_explain_leaves_those_of_the_layer_after_it() -> None:
    model, private = network(), batch(0, 1, 2)
    seen = toys.observe(model, private)
    spoiled = torch.randn(seen.gradients["3.weight"].shape, dtype=torch.float64)
    found = find(replace(seen, gradients={**seen.gradients, "3.weight": spoiled}))
    assert found.layer is dense(model)[1]
    assert gap(model, private, found) < 1e-6


@pytest.mark.parametrize("spoiled", ["3.weight", "3.bias"])
def test_a_gradient_that_is_not_finite_ends_the_row(spoiled: str) -> None:
    model, private = network(), batch(0, 1, 2)
    seen = toys.observe(model, private)
    seen.gradients[spoiled][0] = torch.nan
    found = find(seen)
    assert found.layer is dense(model)[1]
    assert gap(model, private, found) < 1e-6


def test_rough_features_of_the_last_layer_are_refined_by_the_layers_before() -> None:
    model, private = network(), batch(0, 1, 2, 3)
    seen = toys.observe(model, private)
    layers = trailing(seen)
    made = model[:-1](private.images).detach()
    rough = made * (1 + 0.02 * torch.randn(made.shape, dtype=torch.float64))
    logits = layers[-1].outputs(made).requires_grad_()
    (slopes,) = torch.autograd.grad(seen.loss(logits, private.labels).sum(), logits)
    spreads = torch.full((4,), 0.02, dtype=torch.float64)
    found = dense_layers.find_inputs(seen, layers, rough, slopes, spreads)[0]
    assert found.layer is dense(model)[0]
    assert gap(model, private, found) < 1e-6


class Twice(nn.Module):
    """A network that runs its first dense layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.middle, self.head = nn.Flatten(), nn.Linear(192, 192), nn.Linear(192, 10)

    def forward(self, images: Tensor) -> Tensor:
        values = self.middle(self.start(images)).relu()
        answers: Tensor = self.head(self.middle(values).relu())
        return answers


class Skipping(nn.Module):
    """A network with a sum between its dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.middle, self.head = nn.Flatten(), nn.Linear(192, 192), nn.Linear(192, 10)

    def forward(self, images: Tensor) -> Tensor:
        values = self.start(images)
        answers: Tensor = self.head(values + self.middle(values).relu())
        return answers


@pytest.mark.parametrize(
    "make", [Twice, Skipping, lambda: network(nn.GELU), lambda: network(nn.LeakyReLU)]
)
def test_layers_that_something_else_parts_do_not_follow_each_other(
    make: Callable[[], nn.Module],
) -> None:
    model = toys.seeded(make).double()
    private = batch(0, 1, 2)
    seen = toys.observe(model, private)
    assert [each.layer for each in trailing(seen)] == dense(model)[-1:]
    assert gap(model, private, find(seen)) < 1e-4


def test_dropout_that_is_off_does_not_part_layers() -> None:
    model = network(lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.5))).eval()
    seen = toys.observe(model, batch(0, 1))
    assert [each.layer for each in trailing(seen)] == dense(model)


def test_a_frozen_layer_ends_the_row() -> None:
    model = network()
    dense(model)[0].weight.requires_grad_(False)
    seen = toys.observe(model, batch(0, 1))
    assert [each.layer for each in trailing(seen)] == dense(model)[1:]
