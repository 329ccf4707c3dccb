"""Draws handed in: used as if the model had drawn them, batched or not; none stays on the model."""

import pytest
import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Protocol
from gradveil.engine.batched import BatchedGradients
from gradveil.engine.draws import Draw, draw_shapes, drawing, given
from gradveil.engine.gradients import cross_entropy, gradient, loop_gradients
from gradveil.engine.shares import Shares

CLASSES = 4


class Noisy(nn.Module):
    """A layer whose output is blurred by the model's own draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 6)
        self.draw = Draw()

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.layer(values)
        blurred: Tensor = found + found.exp() * self.draw(found)
        return blurred


def model() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [
        nn.Conv2d(1, 2, 3, padding=1),
        nn.Sigmoid(),
        nn.Dropout2d(0.25),
        nn.Flatten(),
        nn.Dropout(0.5),
    ]
    return nn.Sequential(*convolutions, Noisy(), nn.Linear(6, CLASSES)).double()


def victims(count: int = 3, size: int = 2) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    rng = generator(1)
    images = torch.rand(count, size, 1, 4, 4, generator=rng, dtype=torch.double)
    draws = {
        "2": (torch.rand(count, size, 2, 1, 1, generator=rng) > 0.25).double(),
        "4": (torch.rand(count, size, 32, generator=rng) > 0.5).double(),
        "5.draw": torch.randn(count, size, 6, generator=rng, dtype=torch.double),
    }
    return images, torch.randint(CLASSES, (count, size), generator=rng), draws


def test_the_modules_that_draw_are_named_in_the_models_present_mode() -> None:
    net = model()
    assert list(drawing(net)) == ["2", "4", "5.draw"]
    assert list(drawing(net.eval())) == ["5.draw"]
    assert drawing(nn.Sequential(nn.Dropout(0.0), nn.Dropout(1.0), nn.Linear(1, 1))) == {}


def test_given_masks_and_numbers_are_used_as_if_the_model_had_drawn_them() -> None:
    torch.manual_seed(3)
    values = torch.rand(5, 7)
    for layer in (nn.Dropout(0.3), nn.Dropout1d(0.3)):
        drawn = layer(values)
        with given(nn.Sequential(layer), {"0": (drawn != 0).float()}):
            torch.testing.assert_close(layer(values), drawn)
    draw = Draw()
    with given(nn.Sequential(draw), {"0": values}):
        assert torch.equal(draw(torch.zeros(5, 7)), values)
    assert not torch.equal(draw(values), draw(values))
    assert draw(torch.zeros(10_000)).std().sub(1).abs() < 0.05


def test_nothing_stays_on_the_model_even_after_an_error() -> None:
    net = model()
    images, labels, draws = victims()
    with pytest.raises(RuntimeError), given(net, {name: value[0] for name, value in draws.items()}):
        net(images[0][:, :, :2])
    assert all("forward" not in module.__dict__ for module in net.modules())
    first, second = (
        gradient(net, cross_entropy, images[0], labels[0])["6.weight"] for _ in range(2)
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize("differentiable", [False, True])
def test_batched_gradients_equal_the_loops_with_the_same_draws(differentiable: bool) -> None:
    net = model()
    images, labels, draws = victims()
    leaves = {"images": images, "2": draws["2"], "4": draws["4"], "5.draw": draws["5.draw"]}
    found = []
    for way in (BatchedGradients(net, cross_entropy, told=draws), None):
        own = {name: value.clone().requires_grad_() for name, value in leaves.items()}
        given_draws = {name: own[name] for name in draws}
        if way is not None:
            each = way(own["images"], labels, draws=given_draws, differentiable=differentiable)
        else:
            each = loop_gradients(
                net,
                cross_entropy,
                own["images"],
                labels,
                draws=given_draws,
                differentiable=differentiable,
            )
        slopes = (
            torch.autograd.grad(sum_of_cubes(each), list(own.values())) if differentiable else ()
        )
        found.append((*each.values(), *slopes))
    for batched, plain in zip(*found, strict=True):
        torch.testing.assert_close(batched, plain, rtol=1e-9, atol=1e-12)
    assert not differentiable or all(bool(slope.any()) for slope in found[0][-4:])


def sum_of_cubes(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([value.pow(3).sum() for value in gradients.values()]).sum()


def test_shares_take_draws_in_the_protocols_mode_and_share_one_pass() -> None:
    net = model().eval()
    images, labels, draws = victims()
    shares = Shares(net, cross_entropy, Protocol(train_mode=True), told=draws)
    found = shares(images, labels, draws=draws)
    assert shares.why_not is None
    assert not net[4].training
    plain = loop_gradients(net.train(), cross_entropy, images, labels, draws=draws)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value)


def test_the_shapes_of_draws_are_those_of_one_image() -> None:
    images, _, draws = victims()
    assert draw_shapes(model(), images[0], list(draws)) == {
        "2": (2, 1, 1),
        "4": (32,),
        "5.draw": (6,),
    }


def test_draws_that_no_module_takes_are_refused() -> None:
    net = model()
    images, labels, draws = victims()
    with (
        pytest.raises(GradveilError, match=r"no module '6' draws .* choose from 2, 4, 5\.draw"),
        given(net, {"6": images}),
    ):
        pass
    with pytest.raises(GradveilError, match=r"draws of 2: expected those of 2, 4, 5\.draw"):
        BatchedGradients(net, cross_entropy, told=draws)(images, labels, draws={"2": draws["2"]})
    with pytest.raises(GradveilError, match="3 local steps"):
        Shares(net, cross_entropy, Protocol(local_steps=3), told=draws)
