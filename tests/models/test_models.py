"""The built-in models: their sizes, their weights at the start, and their refusals."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from gradveil import models
from gradveil.core.errors import GradveilError

TASKS = [(3, 32, 100), (1, 28, 10), (3, 64, 200)]


def conv(inputs: int, outputs: int, kernel: int, bias: bool = True) -> int:
    return inputs * outputs * kernel**2 + bias * outputs


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def resnet_count(channels: int, _size: int, classes: int) -> int:
    total = conv(channels, 64, 3, bias=False) + 2 * 64
    for inputs, width in ((64, 64), (64, 128), (128, 256)):
        total += (
            conv(inputs, width, 3, bias=False)
            + 5 * conv(width, width, 3, bias=False)
            + 6 * 2 * width
        )
        if inputs != width:
            total += conv(inputs, width, 1, bias=False) + 2 * width
    return total + linear(256, classes)


def convnet_count(channels: int, size: int, classes: int, convolutions: int = 8) -> int:
    widths = [channels, 64, 128, 128, 256, 256, 256, 256, 256, 256][: convolutions + 1]
    return sum(conv(i, o, 3) + 2 * o for i, o in pairwise(widths)) + linear(
        256 * (size // 3 // 3) ** 2, classes
    )


def convnet_9_count(channels: int, size: int, classes: int) -> int:
    return convnet_count(channels, size, classes, convolutions=9)


def lenet_count(channels: int, size: int, classes: int) -> int:
    return conv(channels, 12, 5) + 3 * conv(12, 12, 5) + linear(12 * (size // 4) ** 2, classes)


def mlp_count(channels: int, size: int, classes: int) -> int:
    return linear(channels * size**2, 1024) + 3 * linear(1024, 1024) + linear(1024, classes)


def vit_count(channels: int, size: int, classes: int) -> int:
    norm = 2 * 192
    layer = 2 * norm + linear(192, 3 * 192) + linear(192, 192) + linear(192, 768) + linear(768, 192)
    return conv(channels, 192, 4) + 192 * (size // 4) ** 2 + 6 * layer + norm + linear(192, classes)


COUNTS: dict[str, Callable[[int, int, int], int]] = {
    "resnet20-4": resnet_count,
    "convnet": convnet_count,
    "convnet-9": convnet_9_count,
    "lenet": lenet_count,
    "mlp": mlp_count,
    "vit": vit_count,
}


def make(
    name: str, channels: int = 3, size: int = 16, classes: int = 10, seed: int = 0
) -> nn.Module:
    return models.build(name, channels=channels, size=size, classes=classes, seed=seed)


def test_every_model_has_its_parameter_formula() -> None:
    assert set(COUNTS) == set(models.names())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", models.names())
def test_parameter_counts_follow_the_layer_formulas(name: str, task: tuple[int, int, int]) -> None:
    assert sum(p.numel() for p in make(name, *task).parameters()) == COUNTS[name](*task)


def test_resnet20_4_has_4_35_million_parameters_for_cifar_100() -> None:
    assert sum(p.numel() for p in make("resnet20-4", 3, 32, 100).parameters()) == 4_350_884


def test_convnet_has_the_parameters_of_the_papers_eight_layers_for_cifar_100() -> None:
    assert sum(p.numel() for p in make("convnet", 3, 32, 100).parameters()) == 3_112_420


def test_a_checkpoint_carries_the_normalization() -> None:
    saved = models.build("lenet", channels=1, size=8, classes=2, mean=[0.3], std=[0.2]).state_dict()
    fresh = make("lenet", 1, 8, 2, seed=9)
    fresh.load_state_dict(saved)
    assert fresh.state_dict()["normalize.mean"].item() == pytest.approx(0.3)
    assert fresh.state_dict()["normalize.std"].item() == pytest.approx(0.2)


def test_lenet_weights_and_biases_fill_plus_minus_one_half() -> None:
    values = torch.cat([p.detach().flatten() for p in make("lenet", 3, 32, 100).parameters()])
    assert 0.499 < values.abs().max() <= 0.5
    assert values.mean().abs() < 0.01 and values.std().item() == pytest.approx(
        1 / 12**0.5, rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "least"),
    [("resnet20-4", 4), ("convnet", 9), ("convnet-9", 9), ("lenet", 4), ("mlp", 1), ("vit", 4)],
)
def test_the_smallest_size_works_and_one_less_names_it(name: str, least: int) -> None:
    assert make(name, 1, least, 2).eval()(torch.rand(2, 1, least, least)).shape == (2, 2)
    with pytest.raises(GradveilError, match=rf"^size is {least - 1}: .*at least {least}"):
        make(name, 1, least - 1, 2)


def test_vit_asks_for_whole_patches() -> None:
    with pytest.raises(GradveilError, match=r"size is 30: .*multiple of 4"):
        make("vit", 3, 30, 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": 0}, "channels is 0: .*at least 1"),
        ({"classes": 1}, "classes is 1: .*at least 2"),
        ({"mean": (0.5, 0.5)}, "mean is .*each of 3 channel"),
        ({"mean": (0.5, 0.5, float("nan"))}, "mean is .*finite"),
        ({"std": (0.5, 0.0, 0.5)}, "std is .*above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        models.build("mlp", **({"channels": 3, "size": 8, "classes": 10} | settings))


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(
        GradveilError,
        match=r"unknown model 'resnet': choose from resnet20-4, .*vit, package.module:factory",
    ):
        make("resnet")
