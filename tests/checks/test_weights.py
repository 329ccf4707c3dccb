"""Weights that seem to be made for other images are told, and little trained ones are not."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import toys
from gradveil.checks.weights import Weights, look_at_weights
from gradveil.data import load
from gradveil.models.normalized import KNOWN, normalized

CLASSES = 10
STAGES = (0, 1, 5, 20, 80)
Change = Callable[[Tensor], Tensor]


def half(images: Tensor) -> Tensor:
    return (images - 0.5) / 0.5


def small(seed: int, *, norm: bool) -> nn.Sequential:
    def make() -> nn.Module:
        first = [nn.Conv2d(1, 8, 3, 2, 1), *([nn.BatchNorm2d(8)] if norm else []), nn.ReLU()]
        layers = *first, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(8 * 49, CLASSES)
        return nn.Sequential(*layers)

    made = toys.seeded(make, seed)
    assert isinstance(made, nn.Sequential)
    return made


def trained(model: nn.Module, change: Change, labels: Tensor | None = None) -> list[nn.Module]:
    """Copies of the model after some steps, trained on images that a loader has changed."""
    split = load("fashion-mnist-mini", "train")
    images, classes = change(split.images.float() / 255), split.labels
    classes = classes if labels is None else labels[classes]
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    rng, kept = torch.Generator().manual_seed(0), [copy.deepcopy(model)]
    for step in range(1, max(STAGES) + 1):
        chosen = torch.randint(len(images), (32,), generator=rng)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), classes[chosen]).backward()
        optimizer.step()
        kept += [copy.deepcopy(model)] if step in STAGES else []
    return kept


def looked_at(model: nn.Module) -> Weights:
    test = load("fashion-mnist-mini", "test")
    return look_at_weights(model, test.images[:200], test.labels[:200], CLASSES)


@pytest.fixture(scope="module")
def loader_normalizes() -> nn.Module:
    return trained(small(0, norm=True), half)[-1]


@pytest.mark.parametrize("norm", [False, True])
def test_honest_weights_raise_no_alarm_at_any_stage_of_training(norm: bool) -> None:
    for model in trained(small(1, norm=norm), lambda images: images):
        assert looked_at(model).finding is None
    assert looked_at(model).accuracy > 0.6


def test_classes_that_take_turns_are_all_looked_at() -> None:
    images, labels = torch.zeros(500, 1, 4, 4), torch.arange(500) % CLASSES
    for label in range(CLASSES):  # a model that always answers with this class
        linear = nn.Linear(16, CLASSES)
        linear.load_state_dict(
            {"weight": torch.zeros(CLASSES, 16), "bias": F.one_hot(torch.tensor(label), 10).float()}
        )
        found = look_at_weights(nn.Sequential(nn.Flatten(), linear), images, labels, CLASSES)
        assert found.n == 400 and 0.06 < found.accuracy < 0.14


def test_untrained_weights_raise_no_alarm() -> None:
    for seed in range(3):
        assert looked_at(small(seed, norm=False)).finding is None


def test_a_normalization_that_is_missing_is_told_with_what_it_reaches(
    loader_normalizes: nn.Module,
) -> None:
    found = looked_at(loader_normalizes)
    assert found.finding is not None and found.finding.name == "normalization"
    right = looked_at(wrapped(loader_normalizes, 0.5, 0.5))
    assert right.finding is None and right.accuracy > found.accuracy + 0.25
    assert found.finding.do.startswith("give normalize ")


def wrapped(model: nn.Module, mean: float, std: float) -> nn.Module:
    made = normalized(model, mean, std)
    assert isinstance(made, nn.Module)
    return made


def test_another_normalization_than_that_of_the_loader_is_told(
    loader_normalizes: nn.Module,
) -> None:
    wrong = wrapped(loader_normalizes, -KNOWN["mnist"][0][0], 2.0)
    found = looked_at(wrong).finding
    assert found is not None and found.name == "normalization"


def test_constants_that_nobody_else_has_are_found() -> None:
    model = trained(small(4, norm=True), lambda images: (images - 0.1) / 0.05)[-1]
    found = looked_at(model)
    assert found.finding is not None and found.finding.name == "normalization"
    told = re.search(r"normalized by about (\S+),(\S+) on", found.finding.means)
    assert told is not None
    right = looked_at(wrapped(model, float(told[1]), float(told[2])))
    assert right.finding is None and right.accuracy > found.accuracy + 0.25


def test_images_that_are_normalized_twice_are_told() -> None:
    plain = trained(small(2, norm=True), lambda images: images)[-1]
    found = looked_at(wrapped(plain, 0.8, 0.2)).finding
    assert found is not None and found.name == "normalization"


def test_another_order_of_the_classes_is_told() -> None:
    order = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 0])
    found = looked_at(trained(small(3, norm=True), lambda images: images, order)[-1])
    assert found.finding is not None and found.finding.name == "class order"
    assert found.accuracy < 0.3 and "10 classes trade places" in found.finding.means
    assert "1, which is 0 here" in found.finding.means or "0, which is 9" in found.finding.means


def test_few_images_are_not_judged() -> None:
    test = load("fashion-mnist-mini", "test")
    found = look_at_weights(small(0, norm=True), test.images[:8], test.labels[:8], CLASSES)
    assert found.finding is None and found.n == 8 and "of 8 test images" in str(found)
