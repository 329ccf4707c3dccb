"""Batched gradients against the plain loop, in float64; refusals; the model is left alone."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call

import toys
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.types import Gradients, Loss
from gradveil.engine import convolutions, each
from gradveil.engine.batched import BatchedGradients, NotBatchableError
from gradveil.engine.convolutions import convolution_weight
from gradveil.engine.gradients import cross_entropy, gradient, loop_gradients
from gradveil.engine.layers import RULES
from gradveil.engine.products import Aim, DotAndSquare
from gradveil.engine.shares import Shares
from gradveil.models import build, names
from twins import by_name

CLASSES = 10
SIZE = 12
PIXELS = 3 * SIZE**2


def victims(count: int, batch: int = 1, size: int = SIZE, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = Generator().manual_seed(seed)
    images = torch.rand(count, batch, 3, size, size, generator=rng, dtype=torch.float64)
    return images, torch.randint(CLASSES, (count, batch), generator=rng)


def ready(model: nn.Module) -> nn.Module:
    """Put it into float64 and eval mode, with a batch's running statistics: no unit is dead."""
    model = model.double().train()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        model(victims(1, batch=8, seed=1)[0][0])
    return model.eval()


def built(name: str) -> nn.Module:
    make = partial(build, name, channels=3, size=SIZE, classes=CLASSES)
    return ready(toys.narrow(make))


def assert_same(found: Gradients, expected: Gradients, tolerance: float = 1e-10) -> None:
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].shape == expected[name].shape, name
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


def cosine_distance(found: Gradients, target: Gradients) -> Tensor:
    def dot(left: Gradients, right: Gradients) -> Tensor:
        return torch.stack([(left[name] * right[name]).flatten(1).sum(1) for name in left]).sum(0)

    return 1 - dot(found, target) / (dot(found, found) * dot(target, target)).sqrt()


def slope(
    engine: Callable[..., Gradients], target: Gradients, images: Tensor, labels: Tensor
) -> Tensor:
    guess = images.clone().requires_grad_()
    (found,) = torch.autograd.grad(
        cosine_distance(engine(guess, labels, differentiable=True), target).sum(), guess
    )
    return found


class Odd(nn.Module):
    """A layer used twice, a shared weight, a scale and a class token, and changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.twice = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.tied = nn.Conv2d(4, 4, 3, padding=1)
        self.tied.weight = self.twice.weight
        self.scale = nn.Parameter(torch.rand(1, 4, 1, 1))
        self.token = nn.Parameter(torch.rand(1, 1, 64))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.half_frozen = nn.Linear(64, 64)
        self.half_frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu_(self.first(images))
        x = self.twice(torch.tanh(self.twice(x)))
        x += self.tied(torch.sigmoid(x)) * self.scale
        tokens = torch.cat(
            [self.token.expand(len(images), -1, -1), F.adaptive_avg_pool2d(x, 8).flatten(2)], 1
        )
        logits: Tensor = self.head(self.half_frozen(torch.tanh(self.frozen(tokens))).mean(1))
        return logits


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 8, (3, 1), padding="same", dilation=(2, 1), groups=4),
        nn.BatchNorm2d(8),
        nn.LayerNorm([5, 5]),
        nn.Flatten(2),
        nn.BatchNorm1d(8),
        nn.Linear(25, 6),
        nn.LayerNorm(6, bias=False),
        nn.Flatten(),
        nn.BatchNorm1d(48),
        nn.Linear(48, CLASSES, bias=False),
    )


NETS: dict[str, Callable[[], nn.Module]] = {name: partial(built, name) for name in names()}
NETS |= {
    "norms": lambda: ready(norms()),
    "odd": lambda: ready(Odd()),
    "by name": lambda: ready(toys.seeded(partial(by_name, CLASSES))),
}


@pytest.mark.parametrize("name", NETS)
def test_batched_gradients_and_their_slopes_equal_the_loops(name: str) -> None:
    model = NETS[name]()
    images, labels = victims(3)
    engine = BatchedGradients(model, cross_entropy)
    expected = loop_gradients(model, cross_entropy, images, labels)
    assert_same(engine(images, labels), expected)
    assert engine.why_not is None
    guess, _ = victims(3, seed=5)
    plain = slope(
        lambda *args, **more: loop_gradients(model, cross_entropy, *args, **more),
        expected,
        guess,
        labels,
    )
    assert plain.abs().max() > 0
    torch.testing.assert_close(slope(engine, expected, guess, labels), plain, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ["convnet", "vit", "norms", "odd"])
def test_a_victim_of_several_images_gets_the_gradient_of_its_mean_loss(name: str) -> None:
    model = NETS[name]()
    images, labels = victims(2, batch=2)
    found = BatchedGradients(model, cross_entropy)(images, labels)
    assert_same(found, loop_gradients(model, cross_entropy, images, labels))
    halves = [
        gradient(model, cross_entropy, images[1, i : i + 1], labels[1, i : i + 1]) for i in range(2)
    ]
    assert_same(
        {n: g[1] for n, g in found.items()},
        {n: (halves[0][n] + halves[1][n]) / 2 for n in halves[0]},
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", NETS)
def test_inner_products_and_their_slopes_equal_those_of_the_loops_gradients(
    name: str, batch: int
) -> None:
    model = NETS[name]()
    images, labels = victims(2, batch)
    target = loop_gradients(model, cross_entropy, *victims(2, batch, seed=5))
    left_out = next(iter(target))
    aim = Aim(
        target, {key: 0.5 + number % 3 for number, key in enumerate(target) if key != left_out}
    )
    guess = images.clone().requires_grad_()

    def plain() -> DotAndSquare:
        found = loop_gradients(model, cross_entropy, guess, labels, differentiable=True)
        pairs = [
            [(f * (found[key] * other[key]).flatten(1).sum(1)) for key, f in aim.factors.items()]
            for other in (target, found)
        ]
        return torch.stack(pairs[0]).sum(0), torch.stack(pairs[1]).sum(0)

    ways = (
        plain(),
        BatchedGradients(model, cross_entropy).compare(guess, labels, aim, differentiable=True),
    )
    for expected, found in zip(*ways, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    slopes = [torch.autograd.grad((dot / square.sqrt()).sum(), guess)[0] for dot, square in ways]
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-7, atol=1e-12)
    assert not any(
        part.requires_grad
        for part in BatchedGradients(model, cross_entropy).compare(guess, labels, aim)
    )


def test_weights_of_linear_layers_are_never_written_out_for_inner_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = built("mlp")
    images, labels = victims(2)
    target = loop_gradients(model, cross_entropy, images, labels)
    engine, aim = BatchedGradients(model, cross_entropy), Aim(target, dict.fromkeys(target, 1.0))
    engine.check(images, labels)
    monkeypatch.setitem(
        RULES, nn.Linear, lambda *_: pytest.fail("a weight's gradient was written out")
    )
    dot, square = engine.compare(images, labels, aim)
    torch.testing.assert_close(dot, square)


def test_soft_labels_are_differentiable_too() -> None:
    model = built("lenet")
    images, _ = victims(2, batch=2)
    weights = torch.rand(
        2, 2, CLASSES, generator=Generator().manual_seed(3), dtype=torch.float64
    ).requires_grad_()
    slopes = []
    for engine in (
        BatchedGradients(model, cross_entropy),
        lambda *a, **k: loop_gradients(model, cross_entropy, *a, **k),
    ):
        found = engine(images, weights.softmax(-1), differentiable=True)
        slopes.append(
            torch.autograd.grad(
                torch.stack([g.square().sum() for g in found.values()]).sum(), weights
            )[0]
        )
    assert slopes[1].abs().max() > 0
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-11)


CONVOLUTIONS = [
    nn.Conv2d(4, 6, 3, padding=1),
    nn.Conv2d(4, 6, 3, stride=2, padding=1),
    nn.Conv2d(4, 6, 5, stride=(3, 2), padding=(0, 4), groups=2),
    nn.Conv2d(4, 4, (1, 4), padding="same", dilation=(1, 3), groups=4),
    nn.Conv2d(4, 6, (4, 3), stride=(2, 3), dilation=(3, 2), padding=3),
    nn.Conv2d(4, 6, 1, stride=4, padding="valid"),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("form", ["groups", "groups, thin", "patches"])
def test_a_convolutions_gradient_and_its_slopes_equal_autograds(
    layer: nn.Conv2d, batch: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of patches are the way of a GPU; a CPU takes some of them for thin layers."""
    monkeypatch.setattr(convolutions, "grouped", lambda _: form != "patches")
    monkeypatch.setattr(each, "THIN", 5 if form == "groups, thin" else 0)
    layer = layer.double()
    rng = Generator().manual_seed(0)
    inputs = torch.rand(
        3 * batch, 4, 13, 17, generator=rng, dtype=torch.float64, requires_grad=True
    )
    blame = torch.rand(layer(inputs).shape, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = layer.weight.detach().expand(3, *layer.weight.shape).clone().requires_grad_()

    def plain(a: Tensor, b: Tensor) -> Tensor:
        pieces = zip(a.chunk(3), weight, b.chunk(3), strict=True)
        total = torch.stack(
            [(functional_call(layer, {"weight": w}, (x,)) * y).sum() for x, w, y in pieces]
        ).sum()
        return torch.autograd.grad(total, weight, create_graph=True)[0]

    def batched(a: Tensor, b: Tensor) -> Tensor:
        return convolution_weight(layer, a, b, 3)

    mix = torch.rand(weight.shape, generator=rng, dtype=torch.float64)
    results = [
        (w := f(inputs, blame), *torch.autograd.grad((w * mix).sum(), (inputs, blame)))
        for f in (plain, batched)
    ]
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def wide() -> nn.Module:
    reflecting = nn.Conv2d(16, 4, 3, padding=1, padding_mode="reflect")
    return ready(
        nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.Tanh(), reflecting, nn.Flatten(), nn.Linear(1024, CLASSES)
        )
    )


def test_padding_that_is_not_zero_is_reflected_in_the_gradient() -> None:
    model = wide()
    images, labels = victims(2, size=18)
    assert_same(
        BatchedGradients(model, cross_entropy)(images, labels),
        loop_gradients(model, cross_entropy, images, labels),
    )


def test_memory_in_channels_last_order_changes_nothing() -> None:
    model = wide().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images, labels = victims(2, batch=2, size=18)
    rows = images.flatten(0, 1).contiguous(memory_format=torch.channels_last).view_as(images)
    assert_same(
        BatchedGradients(model, cross_entropy)(rows, labels),
        loop_gradients(model, cross_entropy, images, labels),
    )


@pytest.mark.parametrize("differentiable", [True, False])
def test_the_model_is_left_exactly_as_found(differentiable: bool) -> None:
    model = NETS["odd"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    images, labels = victims(2)
    BatchedGradients(model, cross_entropy)(images, labels, differentiable=differentiable)
    assert parameters == [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    assert all(p.grad is None for p in model.parameters()) and not images.requires_grad
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m.training for m in model.modules())


def test_no_hook_stays_when_the_forward_pass_fails() -> None:
    model = built("lenet")
    images, labels = victims(2)
    engine = BatchedGradients(model, cross_entropy)
    engine(images, labels)
    with pytest.raises(RuntimeError):
        engine(images[..., :5, :5], labels)
    assert not any(m._forward_hooks for m in model.modules())


def test_a_training_model_keeps_its_running_statistics() -> None:
    model = norms().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images, labels = victims(2, batch=3)
    Shares(model, cross_entropy)(images, labels)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_gradients_are_found_under_no_grad_and_carry_no_graph_unless_asked() -> None:
    model = built("lenet")
    images, labels = victims(2)
    with torch.no_grad():
        found = BatchedGradients(model, cross_entropy)(images.requires_grad_(), labels)
        assert not any(
            g.requires_grad for g in gradient(model, cross_entropy, images[0], labels[0]).values()
        )
    assert not any(g.requires_grad for g in found.values())


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES))
    model[1].register_forward_hook(lambda *_: None)
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(3 * SIZE, CLASSES, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        states: Tensor = self.memory(images.flatten(2).view(len(images), SIZE, 3 * SIZE))[0]
        return states[:, -1]


class Bypassed(nn.Module):
    """Its weight is used without calling the layer that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(PIXELS, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.linear(images.flatten(1), self.inner.weight))
        return logits


class Mixing(nn.Module):
    """Subtracts the mean over the batch, without any module that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(PIXELS, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(images.flatten(1))
        return logits - logits.mean(0)


class Turned(nn.Module):
    """Puts the rows in the second dimension, so they no longer come in the victims' order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE**2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(images.flatten(2).transpose(0, 1))
        return logits.mean(0)


class OtherNorm(nn.BatchNorm2d):
    """A batch norm of another type may compute something else."""


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm of another type": (
        lambda: nn.Sequential(OtherNorm(3), nn.Flatten(), nn.Linear(PIXELS, CLASSES)),
        r"0 \(OtherNorm\) takes its statistics from the batch",
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Dropout(), nn.Flatten(), nn.Linear(PIXELS, CLASSES)),
        r"0 \(Dropout\) .* dropout is on",
    ),
    "hooks": (with_hook, r"1 \(Linear\) has hooks of its own"),
    "recurrent": (Recurrent, r"memory \(LSTM\) holds 'weight_ih_l0' of shape \(40, 36\)"),
    "bypassed layer": (
        Bypassed,
        "gradient of 'inner.weight' differs from plain autograd's by 100.0%",
    ),
    "mixed rows": (Mixing, "one row of a batch changes the outcome of another"),
    "rows out of order": (Turned, "a trial pass failed|gradient of 'inner.weight' differs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_batched_is_refused_by_name_and_looped_after_one_warning(case: str) -> None:
    make, reason = REFUSED[case]
    model = make().double()
    images, labels = victims(2, batch=2)
    with pytest.raises(NotBatchableError, match=reason) as caught:
        BatchedGradients(model, cross_entropy)(images, labels)
    assert "\n" not in str(caught.value)
    engine = Shares(model, cross_entropy)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [engine(images, labels) for _ in range(2)][1]
    assert [w.category for w in told] == [GradveilWarning] and engine.why_not is not None
    assert engine.why_not in str(told[0].message)
    if case != "dropout":
        assert_same(found, loop_gradients(model, cross_entropy, images, labels))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_a_model_that_draws_noise_row_by_row_is_batched() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(PIXELS, 16), Noise(), nn.Linear(16, CLASSES)
    ).double()
    images, labels = victims(2)
    engine = BatchedGradients(model, cross_entropy)
    with torch.random.fork_rng():
        engine(images, labels)
        torch.manual_seed(4)
        found = engine(images, labels)
        torch.manual_seed(4)
        losses = cross_entropy(model(images.flatten(0, 1)), labels.flatten())
    for victim, loss in enumerate(losses):
        expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert_same(
            {name: g[victim] for name, g in found.items()}, dict(zip(found, expected, strict=True))
        )


def test_a_model_back_in_eval_mode_is_batched_again() -> None:
    model = nn.Sequential(nn.Dropout(), norms()).double()
    engine = Shares(model, cross_entropy)
    images, labels = victims(2)
    assert engine.why_not is not None
    model.eval()
    assert engine.why_not is None
    assert_same(engine(images, labels), loop_gradients(model, cross_entropy, images, labels))


IMAGES, LABELS = victims(2)
BAD: dict[str, tuple[Tensor, Tensor, str]] = {
    "no batch dimension": (IMAGES[:, 0], LABELS[:, 0], r"\(2, 3, 12, 12\).*use images\[:, None\]"),
    "other count": (IMAGES, LABELS[:1], r"labels of shape \(1, 1\)"),
    "nobody": (IMAGES[:0], LABELS[:0], "no victim"),
    "integers": ((IMAGES * 255).to(torch.uint8), LABELS, "torch.uint8"),
}


def shared(model: nn.Module, loss: Loss, images: Tensor, labels: Tensor) -> Gradients:
    return Shares(model, loss)(images, labels)


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("way", [shared, loop_gradients])
def test_bad_input_is_named(case: str, way: Callable[..., Gradients]) -> None:
    images, labels, message = BAD[case]
    with pytest.raises(GradveilError, match=message):
        way(built("lenet"), cross_entropy, images, labels)


def test_a_label_out_of_range_is_the_users_error_and_does_not_end_batching() -> None:
    model = built("lenet")
    engine = Shares(model, cross_entropy)
    with pytest.raises(IndexError):
        engine(IMAGES, LABELS + CLASSES)
    engine(IMAGES, LABELS)
    assert engine.why_not is None


def test_a_reduced_loss_is_refused() -> None:
    with pytest.raises(GradveilError, match=r"shape \(\) for 2 sample"):
        gradient(built("lenet"), F.cross_entropy, IMAGES[:, 0], LABELS[:, 0])


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(GradveilError, match="no parameter that requires a gradient"):
        shared(built("lenet").requires_grad_(False), cross_entropy, IMAGES, LABELS)


def test_a_first_linear_layer_gives_its_input_away() -> None:
    images, labels = victims(3)
    model = ready(nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES)))
    found = BatchedGradients(model, cross_entropy)(images, labels)
    torch.testing.assert_close(
        found["1.weight"][:, 4] / found["1.bias"][:, 4, None], images.flatten(1)
    )
