"""Train mode in one pass of all victims: values, slopes and statistics equal the plain loop's."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import toys
from gradveil.core.errors import GradveilError
from gradveil.core.types import Protocol
from gradveil.engine.batched import ALIKE, BatchedGradients
from gradveil.engine.gradients import copied_buffers, cross_entropy, gradient, loop_gradients
from gradveil.engine.norms import normalize
from gradveil.engine.products import Aim
from gradveil.engine.shares import Shares
from twins import CLASSES, NETS, SIZE, apart, assert_near, slope, victims


@pytest.mark.parametrize("name", NETS)
def test_train_mode_is_batched_with_the_loops_gradients_and_slopes(name: str) -> None:
    model = NETS[name]().train()
    images, labels = victims(2, 4)
    engine = BatchedGradients(model, cross_entropy)
    looped = partial(loop_gradients, model, cross_entropy)
    assert_near(engine(images, labels), looped(images, labels))
    assert engine.why_not is None
    expected = slope(looped, images, labels)
    assert expected.norm() > 0
    assert apart(slope(engine, images, labels), expected) < 1e-9


@pytest.mark.parametrize("name", ["convnet", "instances", "twice"])
def test_inner_products_in_train_mode_and_their_slopes_are_the_loops(name: str) -> None:
    model = NETS[name]().train()
    images, labels = victims(2, 3)
    target = loop_gradients(model, cross_entropy, *victims(2, 3, seed=5))
    aim, guess = Aim(target, dict.fromkeys(target, 1.0)), images.requires_grad_()
    plain = aim.pair(loop_gradients(model, cross_entropy, guess, labels, differentiable=True))
    engine = BatchedGradients(model, cross_entropy)
    found = engine.compare(guess, labels, aim, differentiable=True)
    slopes = []
    for dot, square in (found, plain):
        slopes.append(torch.autograd.grad((dot / square.sqrt()).sum(), guess)[0])
    for part, expected in ((found[0], plain[0]), (found[1], plain[1]), slopes):
        assert apart(part, expected) < 1e-9


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 3, 2, 5)])
def test_normalization_and_its_two_derivatives_are_those_of_torch(shape: tuple[int, ...]) -> None:
    rng = Generator().manual_seed(0)
    inputs, first, second = torch.randn(3, *shape, generator=rng, dtype=torch.float64).unbind()
    weight, bias = torch.randn(2, 2, 3, generator=rng, dtype=torch.float64).unbind()
    leaves = [inputs.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    layer = kind(3, eps=0.1, dtype=torch.float64)

    def plain() -> Tensor:
        pieces = zip(inputs.chunk(2), weight, bias, strict=True)
        return torch.cat([F.batch_norm(x, None, None, w, b, True, 0.0, 0.1) for x, w, b in pieces])

    each = []
    for values in (normalize(layer, inputs, 2, weight, bias), plain()):
        once = torch.autograd.grad((values * first).sin().sum(), leaves, create_graph=True)
        total = (once[0] * second).sum() + (once[1] * once[2]).sin().sum()
        each.append((values, *once, *torch.autograd.grad(total, leaves)))
    for found, expected in zip(*each, strict=True):
        assert apart(found, expected) < 1e-12


def test_the_slope_in_train_mode_is_the_difference_quotient() -> None:
    model = NETS["instances"]().train()
    images, labels = victims(2, 3)
    engine = BatchedGradients(model, cross_entropy)

    def value(guess: Tensor) -> Tensor:
        found = engine(guess, labels)
        return torch.stack([(g.square() + (3 * g).sin()).sum() for g in found.values()]).sum()

    step = 1e-6 * victims(2, 3, seed=7)[0]
    quotient = (value(images + step) - value(images - step)) / 2
    torch.testing.assert_close(
        quotient, (slope(engine, images, labels) * step).sum(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("name", NETS)
def test_statistics_of_a_step_are_those_that_torch_leaves_in_the_buffers(name: str) -> None:
    model = NETS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images, labels = victims(3, 4)
    shares = Shares(model, cross_entropy, Protocol(train_mode=True))
    found = shares.send(images, labels).statistics
    for victim in range(3):
        local = NETS[name]().train()
        local(images[victim])
        moved = {
            key: value
            for key, value in local.named_buffers()
            if key.endswith(("running_mean", "running_var"))
        }
        assert found.keys() == moved.keys()
        for key, value in moved.items():
            torch.testing.assert_close(found[key][victim], value, rtol=1e-12, atol=1e-12)
    assert_near(shares.statistics(images, labels), found)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_in_eval_mode_no_statistics_are_sent() -> None:
    images, labels = victims(2, 2)
    shares = Shares(NETS["convnet"](), cross_entropy, Protocol())
    assert shares.send(images, labels).statistics == {}
    assert shares.statistics(images, labels) == {}


class Selfish(nn.Module):
    """Keeps a mean of its inputs in a buffer, and subtracts it: no module says so."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * SIZE**2, CLASSES)
        self.register_buffer("center", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.center.mul_(0.5).add_(images.detach().mean())
        logits: Tensor = self.head((images - self.center).flatten(1))
        return logits


def test_a_model_that_moves_buffers_of_other_kinds_is_refused_and_left_alone() -> None:
    model = Selfish().double().train()
    images, labels = victims(2, 2)
    message = toys.refused(BatchedGradients(model, cross_entropy), images, labels)
    assert "changes its buffer 'center'" in message
    assert not model.center.any() and not copied_buffers(model)["center"].any()


def test_a_single_value_for_each_channel_is_refused_as_in_the_loop() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(3 * SIZE**2), nn.Linear(3 * SIZE**2, CLASSES)
    )
    images, labels = victims(2, 1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        Shares(model.double().train(), cross_entropy)(images, labels)
    with pytest.raises(GradveilError, match=r"single value for each channel.*2 victim"):
        normalize(nn.BatchNorm1d(3), torch.rand(2, 3), 2, None, None)


def test_a_victim_is_the_same_in_any_company() -> None:
    model = NETS["convnet"]().train()
    images, labels = victims(3, 4)
    together = BatchedGradients(model, cross_entropy)(images, labels)
    alone = gradient(model, cross_entropy, images[1], labels[1])
    assert_near({key: value[1] for key, value in together.items()}, alone)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["convnet", "resnet20-4"])
def test_train_mode_on_a_gpu_is_the_loop_in_float64(name: str) -> None:
    model = NETS[name]().double().cuda().train()
    images, labels = (part.cuda() for part in victims(4, 8))
    looped = partial(loop_gradients, model, cross_entropy)
    engine = BatchedGradients(model, cross_entropy)
    assert_near(engine(images, labels), looped(images, labels))
    assert apart(slope(engine, images, labels), slope(looped, images, labels)) < 1e-9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["convnet", "resnet20-4"])
def test_train_mode_on_a_gpu_in_short_formats_points_where_float64_does(name: str) -> None:
    """Batch norm of a few pixels amplifies rounding: of bf16 only the direction is asked for."""
    model = NETS[name]().double().cuda().train()
    images, labels = (part.cuda() for part in victims(4, 8))
    exact = loop_gradients(model, cross_entropy, images, labels)
    found = BatchedGradients(model.float(), cross_entropy, short=True)(images.float(), labels)
    one, other = (
        torch.cat([each.double().flatten(1) for each in some.values()], dim=1)
        for some in ({key: found[key] for key in exact}, exact)
    )
    assert float(torch.cosine_similarity(one, other, dim=1).min()) > ALIKE
