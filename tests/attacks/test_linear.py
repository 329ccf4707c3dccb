"""The closed form gives back real images to the last digit, and says when it cannot."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

import toys
from gradveil.attacks.linear import LinearInversion, solve
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch, Knowledge, Observation, Protocol
from gradveil.engine.gradients import pixel_frame
from gradveil.models import Normalize, build
from toys import CLASSES


def rng() -> Generator:
    return Generator().manual_seed(0)


def mlp() -> nn.Module:
    return toys.built("mlp", 1, 28, mean=(0.2,), std=(0.4,))


def observe(model: nn.Module, image: Tensor, label: Tensor) -> Observation:
    """The update alone: labels must be read off it."""
    return replace(toys.observe(model, Batch(image, label)), knowledge=Knowledge())


def observe_each(model: nn.Module, batch: Batch) -> list[Observation]:
    return [replace(one, knowledge=Knowledge()) for one in toys.observe_each(model, batch)]


def psnr(found: Tensor, truth: Tensor) -> float:
    return float(-10 * (found - truth).square().mean().log10())


def tiny(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, *toys.mlp(nn.ReLU(), size=2, width=8).float())


def test_real_images_come_back_above_60_db_in_single_precision() -> None:
    batch = toys.fashion(5, 28, dtype=torch.float32)
    found = LinearInversion()(observe_each(mlp().float(), batch), rng())
    for i, own in enumerate(found):
        assert own.status == "ok" and own.images.shape == (1, 1, 28, 28)
        assert psnr(own.images[0], batch.images[i]) > 100  # measured: 133 dB and more
        assert own.labels is not None and own.labels.tolist() == [int(batch.labels[i])]
        assert own.distance < 1e-5


def test_real_images_come_back_exactly_in_double_precision() -> None:
    batch = toys.fashion(2, 28)
    for i, own in enumerate(LinearInversion()(observe_each(mlp(), batch), rng())):
        torch.testing.assert_close(own.images[0], batch.images[i], rtol=0, atol=1e-8)
        assert own.distance < 1e-12


def test_the_solution_is_that_of_least_squares() -> None:
    draw = rng()
    bias, weight = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((6,), (6, 5))
    )
    expected = torch.linalg.lstsq(bias[:, None], weight).solution[0]
    torch.testing.assert_close(solve(weight, bias), expected)


def test_tiny_gradients_still_give_the_input() -> None:
    bias, x = torch.tensor([1e-30, -3e-30, 0.0]), torch.tensor([0.25, 1.0])
    torch.testing.assert_close(solve(bias[:, None] * x, bias), x)


def test_all_units_together_beat_the_strongest_one_under_noise() -> None:
    draw = rng()
    bias, x = torch.randn(200, generator=draw), torch.rand(50, generator=draw)
    weight = bias[:, None] * x + 0.1 * torch.randn(200, 50, generator=draw)
    strongest = bias.abs().argmax()
    assert (solve(weight, bias) - x).norm() < 0.5 * (weight[strongest] / bias[strongest] - x).norm()


def test_known_labels_are_taken() -> None:
    batch = toys.fashion(1, 28)
    labels, (one,) = batch.labels, observe_each(mlp(), batch)
    (found,) = LinearInversion()([replace(one, knowledge=Knowledge(labels))], rng())
    (wrong,) = LinearInversion()([replace(one, knowledge=Knowledge((labels + 1) % CLASSES))], rng())
    assert torch.equal(wrong.images, found.images)
    assert wrong.distance > 0.1 > found.distance


def test_a_model_that_normalizes_by_other_shapes_or_not_at_all_is_inverted_too() -> None:
    class Plain(nn.Module):
        mean: Tensor
        std: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.tensor(0.3))
            self.register_buffer("std", torch.tensor([0.2, 0.5, 2.0]))

        def forward(self, images: Tensor) -> Tensor:
            return (images - self.mean) / self.std.view(-1, 1, 1)

    image = torch.rand(1, 3, 2, 2, generator=rng())
    for layers in ((), (Plain(),), (Normalize(3, [0.1, 0.2, 0.3], [0.5, 1.0, 2.0]),)):
        (found,) = LinearInversion()([observe(tiny(*layers), image, torch.tensor([4]))], rng())
        torch.testing.assert_close(found.images, image, rtol=0, atol=1e-5)


def test_the_frame_is_the_first_fitting_pair_of_buffers_and_else_the_identity() -> None:
    first, second = Normalize(3, [0.1, 0.2, 0.3], [0.5, 1.0, 2.0]), Normalize(3)
    mean, std = pixel_frame(nn.Sequential(nn.Identity(), nn.Sequential(first), second), (3, 2, 2))
    assert mean.shape == std.shape == (3, 1, 1)
    torch.testing.assert_close(mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    torch.testing.assert_close(std.flatten(), torch.tensor([0.5, 1.0, 2.0]))
    for other in (
        nn.Sequential(Normalize(5, [1.0] * 5)),
        nn.BatchNorm2d(3),
        nn.Linear(2, 2).double(),
    ):
        mean, std = pixel_frame(other, (3, 2, 2))
        assert torch.equal(mean, torch.zeros(3, 1, 1).to(mean)) and torch.equal(
            std, torch.ones(3, 1, 1).to(std)
        )
    assert pixel_frame(nn.Linear(2, 2).double(), (3, 2, 2))[0].dtype == torch.float64


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_dead_units_are_a_failure_in_the_result_and_spare_the_other_victims(value: float) -> None:
    model, image, label = tiny(), torch.rand(1, 3, 2, 2, generator=rng()), torch.tensor([4])
    dead, alive = observe(model, image, label), observe(model, image, label)
    dead.gradients["1.bias"].fill_(value)
    failed, fine = LinearInversion()([dead, alive], rng())
    assert failed.status.startswith("failed: ") and failed.distance == math.inf
    assert torch.equal(failed.images, torch.full((1, 3, 2, 2), 0.5))
    assert fine.status == "ok"


def test_what_has_no_closed_form_is_refused() -> None:
    image, label = torch.rand(1, 3, 2, 2, generator=rng()), torch.tensor([4])
    pair = observe(tiny(), image.expand(2, -1, -1, -1), label.expand(2))
    steps = replace(observe(tiny(), image, label), protocol=Protocol(local_steps=3))
    lenet = build("lenet", channels=1, size=28, classes=CLASSES)
    convolved = observe(lenet, torch.rand(1, 1, 28, 28), label)
    unbiased = nn.Sequential(nn.Flatten(), nn.Linear(12, 8, bias=False), nn.Linear(8, CLASSES))
    for one, message in (
        (pair, "batch of 2"),
        (steps, "3 local steps"),
        (convolved, r"'features.0', is of type Conv2d: .* 784 inputs"),
        (observe(unbiased, image, label), r"1\.bias has no gradient"),
    ):
        with pytest.raises(GradveilError, match=message):
            LinearInversion()([one], rng())
