"""Passes in short formats as a GPU makes them, in float32 by Triton's interpreter.

TRITON_INTERPRET=1 with Triton installed runs them anywhere. The formats stay float32, so that the
kernels and the order of the derivatives are tested, and not the rounding.
"""

import copy
import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from gradveil.core.types import Protocol
from gradveil.engine import batched, convolutions, layers, local, norms, passes, products, weights
from gradveil.engine.gradients import cross_entropy, loop_gradients
from gradveil.engine.local import LocalUpdates, loop_updates

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="no Triton that interprets",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.relu(self.norm(self.convolution(x)) + x)
        return found


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Block(),
        nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5),
    )  # fmt: skip
    for layer in made.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None and layer.running_var is not None
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            nn.init.uniform_(layer.weight, 0.5, 2)
            nn.init.normal_(layer.bias)
    return made


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def suits(values: Tensor) -> bool:
        return values.dtype == torch.float32

    def shortened(values: Tensor) -> Tensor:
        return values.contiguous(memory_format=torch.channels_last)

    for module in (layers, products, batched, norms, local, passes):
        monkeypatch.setattr(module, "suits", suits)
    for module in (convolutions, norms):
        monkeypatch.setattr(module, "suits_short", suits)
    for module in (convolutions, batched, weights):
        monkeypatch.setattr(module, "shortened", shortened)
    monkeypatch.setattr(passes, "_formatted", lambda tap, blame, _: (tap.inputs, blame))


def images_and_labels() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    return torch.rand(2, 3, 3, 8, 8, generator=rng), torch.arange(6).view(2, 3) % 5


def slope(found: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values in one row, and the slope of a fixed mixture of them."""
    flat = torch.cat([part.flatten(1) for part in found.values()], dim=1)
    mixture = torch.randn(flat.shape, generator=torch.Generator().manual_seed(1)).to(flat)
    return flat.detach(), torch.autograd.grad((flat * mixture).sum(), images)[0]


def assert_near(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize("train_mode", [False, True])
def test_a_step_equals_the_loop(model: nn.Module, train_mode: bool) -> None:
    model.train(train_mode)
    images, labels = images_and_labels()
    engine = batched.BatchedGradients(model, cross_entropy, short=True)
    guess = images.requires_grad_()
    found = slope(engine(guess, labels, differentiable=True), guess)
    assert engine._forwards is layers.SHORT_TWICE
    exact, wide = copy.deepcopy(model).double(), images.detach().double().requires_grad_()
    looped = loop_gradients(exact, cross_entropy, wide, labels, differentiable=True)
    assert_near(found, slope(looped, wide))


@pytest.mark.parametrize("train_mode", [False, True])
def test_local_steps_equal_the_loop(model: nn.Module, train_mode: bool) -> None:
    model.train(train_mode)
    images, labels = images_and_labels()
    protocol = Protocol(
        local_steps=3,
        local_lr=0.05,
        train_mode=train_mode,
        client_momentum=0.5,
        client_weight_decay=0.01,
    )
    updates = LocalUpdates(model, cross_entropy, protocol, short=True)
    guess = images.requires_grad_()
    found = slope(updates(guess, labels, differentiable=True), guess)
    assert updates._short and updates.why_not is None
    exact, wide = copy.deepcopy(model).double(), images.detach().double().requires_grad_()
    looped = loop_updates(exact, cross_entropy, protocol, wide, labels, differentiable=True)
    assert_near(found, slope(looped, wide))
