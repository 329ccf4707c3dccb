"""Products of gradients along lines against the plain loop, and in their special cases."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import toys
from gradveil.core.errors import GradveilWarning
from gradveil.engine.gradients import cross_entropy
from gradveil.engine.lines import LineProducts, Products, loop_products
from gradveil.models import build


def cosines(found: Products) -> Tensor:
    return found.dots / (found.squares * found.squares[..., -1:]).sqrt()


def lines(
    count: int, points: int, size: int = 16, channels: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    images = torch.rand(count, points, channels, size, size, generator=rng, dtype=torch.float64).to(
        dtype
    )
    return images, torch.randint(7, (count,), generator=rng)


def agree(model: nn.Module, images: Tensor, labels: Tensor, tolerance: float = 1e-10) -> None:
    found, wanted = (
        LineProducts(model, cross_entropy)(images, labels),
        loop_products(model, cross_entropy, images, labels),
    )
    assert (
        found.dots.shape == wanted.dots.shape == (len(list(model.parameters())), *images.shape[:2])
    )
    assert torch.allclose(found.squares, wanted.squares, rtol=tolerance, atol=0)
    assert torch.allclose(cosines(found), cosines(wanted), rtol=0, atol=tolerance)
    assert torch.allclose(found.dots[..., -1], found.squares[..., -1], rtol=tolerance)


@pytest.mark.parametrize("name", ["resnet20-4", "convnet", "lenet", "mlp", "vit"])
def test_products_are_the_loops_for_every_model(name: str) -> None:
    images, labels = lines(2, 2, size=24)
    make = partial(build, name, channels=3, size=24, classes=7, seed=0)
    # One model is as wide as it is meant to be: large layers take another way.
    model = make() if name == "resnet20-4" else toys.narrow(make)
    agree(model.double().eval(), images, labels)


def test_a_layer_used_twice_is_summed_before_it_is_multiplied() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3 * 64, 7)

        def forward(self, images: Tensor) -> Tensor:
            answer: Tensor = self.head(self.conv(self.conv(images).tanh()).flatten(1))
            return answer

    images, labels = lines(3, 4, size=8)
    torch.manual_seed(0)
    agree(Twice().double(), images, labels)


def test_groups_strides_and_group_norm_are_right() -> None:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 4, (3, 1), padding="same"),
    )
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 16, 7, bias=False)).double()
    agree(model, *lines(3, 3, size=8, channels=4))


def test_a_parameter_that_plays_no_part_has_products_of_zero() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.head = nn.Linear(2, 2), nn.Linear(3 * 64, 7)

        def forward(self, images: Tensor) -> Tensor:
            answer: Tensor = self.head(images.flatten(1))
            return answer

    images, labels = lines(2, 3, size=8)
    found = LineProducts(Idle().double(), cross_entropy)(images, labels)
    assert not found.dots[:2].any() and not found.squares[:2].any() and found.squares[2:].all()


def test_a_model_that_cannot_be_batched_goes_one_by_one_after_one_warning() -> None:
    torch.manual_seed(0)

    class OtherNorm(nn.BatchNorm2d):
        pass

    norm = OtherNorm(3, track_running_stats=False)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(3 * 64, 7)).double().eval()
    images, labels = lines(2, 2, size=8)
    products = LineProducts(model, cross_entropy)
    with pytest.warns(GradveilWarning, match="one at a time"):
        found = products(images, labels)
    again = products(images, labels)
    wanted = loop_products(model, cross_entropy, images, labels)
    assert torch.equal(found.dots, wanted.dots) and torch.equal(again.squares, wanted.squares)


def test_an_image_is_normalized_by_its_own_statistics_where_the_layer_takes_them() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(3 * 64, 7)).double().eval()
    images, labels = lines(2, 3, size=8)
    found = LineProducts(model, cross_entropy)(images, labels)
    wanted = loop_products(model, cross_entropy, images, labels)
    torch.testing.assert_close(found.dots, wanted.dots, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.squares, wanted.squares, rtol=1e-9, atol=1e-12)


def test_long_rows_of_floats_keep_their_digits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(256, 256, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 7)
    )
    images, labels = lines(1, 3, size=8, channels=256, dtype=torch.float32)
    found = LineProducts(model, cross_entropy)(images, labels)
    wanted = loop_products(copy.deepcopy(model).double(), cross_entropy, images.double(), labels)
    assert torch.allclose(found.squares.double(), wanted.squares, rtol=1e-5)
    assert torch.allclose(found.dots.double(), wanted.dots, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_in_short_formats_is_near_the_loop() -> None:
    model = build("resnet20-4", channels=3, size=32, classes=7, seed=0).cuda().eval()
    images, labels = lines(3, 4, size=32, dtype=torch.float32)
    found = LineProducts(model, cross_entropy, fast=True)(images.cuda(), labels.cuda())
    wanted = loop_products(model, cross_entropy, images.cuda(), labels.cuda())
    assert float((cosines(found) - cosines(wanted)).abs().mean()) < 5e-3
    assert torch.allclose(found.squares, wanted.squares, rtol=0.2)
