"""Images of a batch, exactly, from a network of dense layers whose labels are known."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import toys
from gradveil.attacks import dense_inversion
from gradveil.core.types import Batch, Knowledge, Protocol


def mlp(activation: nn.Module | None = None) -> nn.Module:
    """A network of three dense layers for pictures of 8 x 8 pixels."""
    more = activation or nn.ReLU()
    return toys.mlp(more, nn.Linear(16, 16, dtype=torch.float64), more)


def batch(*labels: int) -> Batch:
    return Batch(toys.pictures(len(labels), dtype=torch.float64), torch.tensor(labels))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Sigmoid(), nn.Tanh()])
def test_every_image_of_a_batch_comes_back_exactly(activation: nn.Module) -> None:
    private = batch(0, 3, 9, 4)
    found = dense_inversion(toys.observe(mlp(activation), private), 0)
    assert found.status == "ok" and found.distance < 1e-6
    torch.testing.assert_close(found.images, private.images, rtol=0, atol=1e-5)


def test_images_of_one_class_may_change_places_and_no_more() -> None:
    private = batch(7, 7, 2)
    found = dense_inversion(toys.observe(mlp(), private), 0)
    apart = torch.cdist(found.images.flatten(1), private.images.flatten(1))
    assert sorted(apart.argmin(1).tolist()) == [0, 1, 2]
    assert float(apart.min(1).values.max()) < 1e-4
    assert found.labels is not None and found.labels.tolist() == [7, 7, 2]


def test_a_normalized_model_in_float32_gives_back_every_pixel() -> None:
    model = toys.built("mlp", 1, 28, mean=(0.2,), std=(0.4,)).float()
    private = toys.fashion(6, 28, dtype=torch.float32)
    found = dense_inversion(toys.observe(model, private), 0)
    levels = [(images * 255).round().int().flatten(1) for images in (found.images, private.images)]
    assert {*map(tuple, levels[0].tolist())} == {*map(tuple, levels[1].tolist())}


def test_victims_fail_one_by_one_and_say_why() -> None:
    model = mlp()
    good, noisy = (toys.observe(model, batch(0, 1, 2), kind) for kind in ("none", "gaussian:0.01"))
    whole, failed = dense_inversion([good, noisy], 0)
    assert whole.status == "ok"
    assert "a defense may have added noise" in failed.status
    spoiled = {name: torch.rand_like(value) for name, value in good.gradients.items()}
    last = list(good.gradients)[-2:]
    kept = spoiled | {name: good.gradients[name] for name in last}
    half = dense_inversion(replace(good, gradients=kept), 0)
    assert half.status == "failed: the gradient of a layer before the last is not explained"


def test_what_it_cannot_work_on_is_refused_in_one_line() -> None:
    convolutional = toys.observe(toys.lenet(), batch(0, 1))
    assert "dense inversion needs nn.Linear" in toys.refused(dense_inversion, convolutional, 0)
    moved = toys.observe(mlp(), batch(0, 1), protocol=Protocol(local_steps=2))
    assert "2 local steps" in toys.refused(dense_inversion, moved, 0)
    untold = replace(toys.observe(mlp(), batch(0, 1)), knowledge=Knowledge())
    assert "labels" in toys.refused(dense_inversion, untold, 0)
