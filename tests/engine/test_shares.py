"""The update that is shared: one step is the gradient, several are a run of SGD.

Batched equals the loop in float64, and the model is left alone.
"""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor, nn

import toys
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.types import Gradients, Protocol
from gradveil.engine.gradients import cross_entropy, in_mode, loop_gradients
from gradveil.engine.local import batched_updates, loop_updates
from gradveil.engine.shares import Shares
from toys import SIZE

CLASSES = 5


def victims(count: int = 2, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = Generator().manual_seed(seed)
    images = torch.rand(count, batch, 3, SIZE, SIZE, generator=rng, dtype=torch.float64)
    return images, torch.randint(CLASSES, (count, batch), generator=rng)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    return toys.seeded(make).double()


def small_mlp() -> nn.Sequential:
    hidden = seeded(lambda: nn.Linear(16, 16))
    return toys.mlp(nn.ReLU(), hidden, nn.ReLU(), classes=CLASSES)


NETS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: toys.lenet(classes=CLASSES),
    "mlp": lambda: small_mlp().eval(),
    "conv with batch norm": lambda: toys.conv_with_norm(classes=CLASSES),
}


def sgd(model: nn.Module, protocol: Protocol, images: Tensor, labels: Tensor) -> Gradients:
    """Train on one victim as a federated client does, with torch's optimizer."""
    local = copy.deepcopy(model).train(protocol.train_mode)
    before = {name: p.detach().clone() for name, p in local.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(local.parameters(), lr=protocol.local_lr)
    for _ in range(protocol.local_steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(local(images), labels).backward()
        optimizer.step()
    return {
        name: (before[name] - p.detach()) / protocol.local_lr
        for name, p in local.named_parameters()
        if name in before
    }


def sgd_of_all(model: nn.Module, protocol: Protocol, images: Tensor, labels: Tensor) -> Gradients:
    each = [sgd(model, protocol, x, y) for x, y in zip(images, labels, strict=True)]
    return {name: torch.stack([update[name] for update in each]) for name in each[0]}


def assert_same(found: Gradients, expected: Gradients, tolerance: float = 1e-10) -> None:
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


def slopes(
    engine: Callable[..., Gradients], target: Gradients, *guesses: Tensor
) -> tuple[Tensor, ...]:
    guesses = tuple(
        guess.clone().requires_grad_() if guess.is_floating_point() else guess for guess in guesses
    )
    found = engine(*guesses, differentiable=True)
    distance = torch.stack([(found[name] - target[name]).square().sum() for name in target]).sum()
    return torch.autograd.grad(distance, [guess for guess in guesses if guess.requires_grad])


def looped(model: nn.Module, protocol: Protocol) -> Callable[..., Gradients]:
    return lambda *args, **more: loop_updates(model, cross_entropy, protocol, *args, **more)


def snapshot(model: nn.Module) -> dict[str, object]:
    state = {
        name: (value, value._version, value.clone())
        for name, value in model.state_dict(keep_vars=True).items()
    }
    return {
        **state,
        **{f"mode of {name}": module.training for name, module in model.named_modules()},
    }


def assert_untouched(model: nn.Module, before: dict[str, object]) -> None:
    after = snapshot(model)
    assert list(after) == list(before)
    for name, was in before.items():
        if isinstance(was, tuple):
            now = after[name]
            assert isinstance(now, tuple)
            assert now[0] is was[0] and now[1] == was[1] and torch.equal(now[2], was[2]), name
        else:
            assert after[name] == was, name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "steps", "batch"), list(itertools.product(NETS, (2, 5), (1, 3))))
def test_batched_local_steps_and_their_slopes_equal_the_loop_and_a_run_of_sgd(
    name: str, steps: int, batch: int
) -> None:
    model, protocol = NETS[name](), Protocol(local_steps=steps, local_lr=0.05)
    images, labels = victims(batch=batch)
    before = snapshot(model)
    shares = Shares(model, cross_entropy, protocol)
    expected = looped(model, protocol)(images, labels)
    assert_same(expected, sgd_of_all(model, protocol, images, labels))
    assert_same(shares(images, labels), expected)
    assert not any(
        found.requires_grad for found in shares(images.clone().requires_grad_(), labels).values()
    )
    guess, _ = victims(batch=batch, seed=5)
    (plain,) = slopes(looped(model, protocol), expected, guess, labels)
    assert plain.abs().max() > 0
    torch.testing.assert_close(
        slopes(shares, expected, guess, labels)[0], plain, rtol=1e-10, atol=1e-10
    )
    assert shares.why_not is None
    assert_untouched(model, before)


def test_the_slope_through_local_steps_is_the_difference_quotient() -> None:
    model, protocol = NETS["lenet"](), Protocol(local_steps=3, local_lr=0.5)
    shares = Shares(model, cross_entropy, protocol)
    (images, labels), (guess, _) = victims(1), victims(1, seed=5)
    target = shares(images, labels)

    def distance(guess: Tensor) -> Tensor:
        found = shares(guess, labels)
        return torch.stack([(found[name] - target[name]).square().sum() for name in target]).sum()

    step = 1e-6 * torch.rand(guess.shape, generator=Generator().manual_seed(2), dtype=torch.float64)
    quotient = (distance(guess + step) - distance(guess - step)) / 2
    torch.testing.assert_close(
        quotient, (slopes(shares, target, guess, labels)[0] * step).sum(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_soft_labels_have_slopes_too(steps: int) -> None:
    model, protocol = NETS["lenet"](), Protocol(local_steps=steps, local_lr=0.05)
    images, labels = victims(batch=2)
    shares = Shares(model, cross_entropy, protocol)
    target = shares(images, labels)
    assert_same(shares(images, nn.functional.one_hot(labels, CLASSES).double()), target)
    soft = torch.rand(2, 2, CLASSES, generator=Generator().manual_seed(3), dtype=torch.float64)
    for found, plain in zip(
        slopes(shares, target, images, soft),
        slopes(looped(model, protocol), target, images, soft),
        strict=True,
    ):
        assert plain.abs().max() > 0
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)


def test_one_local_step_shares_the_gradient() -> None:
    model = NETS["conv with batch norm"]()
    images, labels = victims(batch=3)
    gradients = loop_gradients(model, cross_entropy, images, labels)
    assert_same(Shares(model, cross_entropy, Protocol())(images, labels), gradients)
    assert_same(looped(model, Protocol(local_lr=7.0))(images, labels), gradients)


@pytest.mark.parametrize("steps", [1, 3])
def test_eval_mode_is_set_for_the_call_alone(steps: int) -> None:
    model = NETS["conv with batch norm"]()
    images, labels = victims(batch=2)
    shares = Shares(model, cross_entropy, Protocol(local_steps=steps))
    expected = shares(images, labels)
    for module in model.modules():
        module.training = isinstance(module, nn.BatchNorm2d | nn.Sequential)
    before = snapshot(model)
    assert_same(shares(images, labels), expected)
    assert shares.why_not is None
    assert_untouched(model, before)


@pytest.mark.parametrize("steps", [1, 3])
def test_in_train_mode_a_victim_is_normalized_by_its_own_batch_and_running_statistics_stay(
    steps: int,
) -> None:
    model, protocol = (
        NETS["conv with batch norm"](),
        Protocol(local_steps=steps, local_lr=0.05, train_mode=True),
    )
    images, labels = victims(batch=3)
    before = snapshot(model)
    shares = Shares(model, cross_entropy, protocol)
    found = shares(images, labels)
    expected = sgd_of_all(model, protocol, images, labels)
    assert_same(found, expected)
    with in_mode(model, True):
        (plain,) = slopes(looped(model, protocol), expected, images.flip(0), labels)
    torch.testing.assert_close(
        slopes(shares, expected, images.flip(0), labels)[0], plain, rtol=1e-8, atol=1e-10
    )
    eval_mode = Shares(model, cross_entropy, Protocol(local_steps=steps, local_lr=0.05))(
        images, labels
    )
    assert not torch.allclose(eval_mode["0.weight"], expected["0.weight"], rtol=1e-3)
    assert_untouched(model, before)


class OtherNorm(nn.BatchNorm2d):
    """A batch norm of another type may compute something else."""


@pytest.mark.parametrize("steps", [1, 3])
def test_a_batch_norm_of_another_type_takes_victims_one_at_a_time_with_one_warning(
    steps: int,
) -> None:
    model = NETS["conv with batch norm"]()
    model.add_module("1", OtherNorm(2).double())
    shares = Shares(model, cross_entropy, Protocol(local_steps=steps, train_mode=True))
    assert shares.why_not is not None and "1 (OtherNorm) takes its statistics" in shares.why_not
    with pytest.warns(GradveilWarning, match="one at a time") as caught:
        shares(*victims(batch=2))
        shares(*victims(batch=2))
    assert len(caught) == 1


PROTOCOLS = {
    "eval mode": Protocol(),
    "train mode": Protocol(train_mode=True),
    "several steps": Protocol(local_steps=2, train_mode=True),
    "mini-batches": Protocol(local_epochs=2, local_batch_size=2, train_mode=True),
    "mini-batches of clients": Protocol(averaged_clients=2, local_batch_size=1),
    "mini-batches of clients in train mode": Protocol(
        averaged_clients=2, local_batch_size=1, train_mode=True
    ),
}
SEEN_ALONE = {  # which images of four a layer sees together, in train mode
    "mini-batches": ([0, 1], [2, 3]),
    "mini-batches of clients in train mode": ([0], [1], [2], [3]),
}


def with_other_norm() -> nn.Module:
    model = toys.conv_with_norm(classes=CLASSES)
    model.add_module("1", OtherNorm(2).double())
    return model


class Centered(nn.Module):
    """Takes the mean over the batch off, in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


def with_own_mixing() -> nn.Module:
    model = toys.conv_with_norm(classes=CLASSES)
    model.add_module("1", Centered())
    return model


def plain_inputs(model: nn.Module, images: Tensor, parts: tuple[list[int], ...]) -> Tensor:
    """Return what goes into the last dense layer, victim by victim and part by part."""
    layer = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    made: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: made.append(given[0]))
    for victim in images:
        for part in parts:
            model(victim[part])
    hook.remove()
    found: Tensor = torch.cat(made).unflatten(0, images.shape[:2])
    return found


@pytest.mark.filterwarnings("ignore:.*one at a time")
@pytest.mark.parametrize("kind", PROTOCOLS)
@pytest.mark.parametrize(
    "make",
    [*NETS.values(), with_other_norm, with_own_mixing],
    ids=[*NETS, "other norm", "own mixing"],
)
def test_inputs_of_a_layer_and_their_slopes_are_those_of_each_victim_s_own_batch(
    make: Callable[[], nn.Module], kind: str
) -> None:
    model, protocol = make(), PROTOCOLS[kind]
    images, labels = victims(batch=4)
    images.requires_grad_()
    twin = copy.deepcopy(model).train(protocol.train_mode)
    expected = plain_inputs(twin, images, SEEN_ALONE.get(kind, ([0, 1, 2, 3],)))
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    before = snapshot(model)
    shares = Shares(model, cross_entropy, protocol)
    *_, found = shares.inputs(images, labels, layers, differentiable=True)
    assert_untouched(model, before)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(found.shape, generator=Generator().manual_seed(3), dtype=found.dtype)
    ours, theirs = (
        torch.autograd.grad((weights * each).sum(), images)[0] for each in (found, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert not any(each.requires_grad for each in shares.inputs(images, labels, layers))


class Shifted(nn.Module):
    """Holds a parameter for which there is no rule, so that rows cannot share a pass."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x + self.shift)
        return logits


def test_where_vmap_gives_wrong_slopes_the_loop_takes_over() -> None:
    """Torch's batching rule for layer norm has right values and wrong second derivatives."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(192, 16), nn.LayerNorm(16), nn.ReLU(), Shifted(16, CLASSES)
        )
    )
    protocol = Protocol(local_steps=3, local_lr=0.1)
    shares = Shares(model, cross_entropy, protocol)
    images, labels = victims(batch=2)
    with pytest.warns(GradveilWarning, match="in slopes"):
        found = shares(images, labels)
    (plain,) = slopes(looped(model, protocol), found, images.flip(0), labels)
    torch.testing.assert_close(
        slopes(shares, found, images.flip(0), labels)[0], plain, rtol=1e-12, atol=1e-12
    )


def test_victims_whose_model_has_fused_attention_share_a_pass() -> None:
    protocol = Protocol(local_steps=2, local_lr=0.1)
    shares = Shares(toys.fused_attention(), cross_entropy, protocol)
    images, labels = victims(batch=2)
    assert_same(shares(images, labels), looped(toys.fused_attention(), protocol)(images, labels))
    assert shares.why_not is None


class Branching(nn.Module):
    """Which way it goes depends on its values, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(small_mlp()[:3], Shifted(16, CLASSES).double())

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(images * 2 if images.sum() > 0 else images)
        return logits


def test_where_vmap_fails_the_loop_takes_over_with_one_warning_that_says_why() -> None:
    model, protocol = Branching(), Protocol(local_steps=2)
    shares = Shares(model, cross_entropy, protocol)
    images, labels = victims(3, batch=2)
    assert shares.why_not is None
    with pytest.warns(
        GradveilWarning, match=r"vmap failed with RuntimeError.*one at a time"
    ) as caught:
        found = shares(images, labels)
        shares(images, labels)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert shares.why_not is not None and "data-dependent" in shares.why_not
    assert_same(found, sgd_of_all(model, protocol, images, labels))


def test_dropout_draws_anew_for_each_victim() -> None:
    start = small_mlp()[:3]
    model = nn.Sequential(start, nn.Dropout(0.5), nn.Linear(16, CLASSES).double())
    images, labels = victims(1)
    found = Shares(model, cross_entropy, Protocol(local_steps=2, train_mode=True))(
        images.expand(8, -1, -1, -1, -1), labels.expand(8, -1)
    )
    assert len({tuple(row.tolist()) for row in found["2.weight"].ne(0).flatten(1)}) > 1


def test_the_global_random_state_is_left_alone_by_a_model_that_draws_nothing() -> None:
    before = torch.get_rng_state()
    Shares(small_mlp(), cross_entropy, Protocol(local_steps=2))(*victims())
    assert torch.equal(torch.get_rng_state(), before)


class Counting(nn.Module):
    """Its buffer counts passes in training mode and scales the output."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_mlp()
        self.register_buffer("passes", torch.ones((), dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.passes.add_(1)
        logits: Tensor = self.inner(images) * self.passes.detach().clone()
        return logits


def test_buffers_change_from_step_to_step_but_not_in_the_model() -> None:
    model, protocol = Counting(), Protocol(local_steps=3, local_lr=0.1, train_mode=True)
    images, labels = victims(batch=2)
    before = snapshot(model)
    shares = Shares(model, cross_entropy, protocol)
    assert_same(shares(images, labels), sgd_of_all(model, protocol, images, labels))
    assert shares.why_not is None
    with in_mode(model, True):
        assert_same(
            looped(model, protocol)(images, labels), sgd_of_all(model, protocol, images, labels)
        )
    assert_untouched(model, before)


def test_frozen_parameters_stay_and_are_not_shared_and_unused_ones_get_zeros() -> None:
    model = small_mlp()
    model[1].requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    protocol = Protocol(local_steps=3, local_lr=0.1)
    images, labels = victims(batch=2)
    shares = Shares(model, cross_entropy, protocol)
    found = shares(images, labels)  # by vmap: there is no rule for the parameter
    assert shares.why_not is None
    assert list(found) == ["unused", "3.weight", "3.bias", "5.weight", "5.bias"]
    assert not found["unused"].any()
    assert_same(found, looped(model, protocol)(images, labels))
    assert_same(found, sgd_of_all(model, protocol, images, labels))


def test_a_tied_weight_moves_in_both_places() -> None:
    model = small_mlp()
    model[3].weight = nn.Parameter(torch.eye(16, dtype=torch.float64))
    tied = nn.Sequential(model, nn.Linear(CLASSES, CLASSES).double())
    extra = nn.Linear(16, 16).double()
    extra.weight = model[3].weight
    model.insert(4, extra)
    protocol = Protocol(local_steps=3, local_lr=0.1)
    images, labels = victims(batch=2)
    assert_same(
        batched_updates(tied, cross_entropy, protocol, images, labels),
        sgd_of_all(tied, protocol, images, labels),
    )


def test_the_mode_is_put_back_when_a_call_fails() -> None:
    model = NETS["lenet"]().train()
    model.get_submodule("head").eval()
    before = snapshot(model)
    for steps in (1, 2):
        with pytest.raises(RuntimeError):
            Shares(model, cross_entropy, Protocol(local_steps=steps))(
                torch.rand(1, 1, 7, SIZE, SIZE), torch.zeros(1, 1).long()
            )
        with pytest.raises(GradveilError, match="victims, batch"):
            Shares(model, cross_entropy, Protocol(local_steps=steps))(
                torch.rand(3, SIZE), torch.zeros(1).long()
            )
        with pytest.raises(GradveilError, match="unreduced"):
            Shares(model, lambda x, y: cross_entropy(x, y).mean(), Protocol(local_steps=steps))(
                *victims()
            )
    assert_untouched(model, before)


def test_a_model_that_does_not_fit_images_or_classes_is_refused() -> None:
    model = NETS["conv with batch norm"]()
    before = snapshot(model)
    shares = Shares(model, cross_entropy, Protocol(train_mode=True))
    images = victims(batch=2)[0][0]
    shares.check(images, CLASSES)
    with pytest.raises(
        GradveilError, match=r"shape \(2, 5\); expected \(2, 7\), one logit for each of 7 classes"
    ):
        shares.check(images, 7)
    with pytest.raises(
        GradveilError,
        match=r"Sequential and images of shape \(2, 1, 8, 8\) do not fit: RuntimeError: .*channels",
    ):
        shares.check(images[:, :1], CLASSES)
    with pytest.raises(GradveilError, match="gives a tuple"):
        Shares(nn.LSTM(SIZE, SIZE).double(), cross_entropy, Protocol()).check(images[0], CLASSES)
    assert_untouched(model, before)
