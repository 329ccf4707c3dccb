"""Runs of SGD in one pass of all victims for each step: updates, slopes and statistics equal those
of torch.optim.SGD and of the plain loop."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import toys
from gradveil.core.types import Gradients, Protocol
from gradveil.engine import convolutions
from gradveil.engine import each as engine_each
from gradveil.engine.convolutions import convolve_each
from gradveil.engine.gradients import are_finite, cross_entropy, in_mode
from gradveil.engine.local import loop_updates
from gradveil.engine.norms import Running
from gradveil.engine.products import multiply
from gradveil.engine.shares import Shares, as_one_client
from twins import CLASSES, NETS, SIZE, apart, assert_near, slope, victims

EVERYTHING = Protocol(
    local_lr=0.05,
    local_epochs=2,
    local_batch_size=3,
    client_momentum=0.8,
    client_weight_decay=0.02,
)
PROTOCOLS = {
    "steps": Protocol(local_steps=3, local_lr=0.05),
    "epochs": Protocol(local_epochs=2, local_lr=0.05),
    "mini-batches": Protocol(local_batch_size=2, local_lr=0.05),
    "an uneven mini-batch": Protocol(local_batch_size=3, local_lr=0.05),
    "momentum": Protocol(local_steps=3, local_lr=0.05, client_momentum=0.9),
    "weight decay": Protocol(local_steps=2, local_lr=0.05, client_weight_decay=0.1),
    "weight decay of one step": Protocol(local_lr=0.05, client_weight_decay=0.1),
    "everything": EVERYTHING,
}
MODES = [False, True]
MODELESS = ("lenet", "mlp", "vit", "mobilenet", "transformer")  # the same in both modes


def sgd(model: nn.Module, protocol: Protocol, images: Tensor, labels: Tensor) -> nn.Module:
    """Train on one victim as a federated client does, with torch's optimizer."""
    local = copy.deepcopy(model).train(protocol.train_mode)
    optimizer = torch.optim.SGD(
        local.parameters(),
        lr=protocol.local_lr,
        momentum=protocol.client_momentum,
        weight_decay=protocol.client_weight_decay,
    )
    width = protocol.local_batch_size or len(images)
    for _ in range(protocol.local_epochs * protocol.local_steps):
        for x, y in zip(images.split(width), labels.split(width), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(local(x), y).backward()
            optimizer.step()
    return local


def sgd_of_all(
    model: nn.Module, protocol: Protocol, images: Tensor, labels: Tensor
) -> tuple[Gradients, dict[str, Tensor]]:
    """The updates of all victims, and their running statistics."""
    each = [sgd(model, protocol, x, y) for x, y in zip(images, labels, strict=True)]
    before = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    updates = {
        name: torch.stack(
            [(was - local.get_parameter(name).detach()) / protocol.local_lr for local in each]
        )
        for name, was in before.items()
    }
    kept = {
        name: torch.stack([local.get_buffer(name) for local in each])
        for name, _ in model.named_buffers()
        if name.endswith(("running_mean", "running_var"))
    }
    return updates, kept


def looped(model: nn.Module, protocol: Protocol) -> Callable[..., Gradients]:
    def run(images: Tensor, labels: Tensor, differentiable: bool = False) -> Gradients:
        with in_mode(model, protocol.train_mode):
            return loop_updates(
                model, cross_entropy, protocol, images, labels, differentiable=differentiable
            )

    return run


def check(model: nn.Module, protocol: Protocol, batch: int = 4) -> None:
    """Compare values and statistics with torch's SGD, and slopes with the plain loop's."""
    images, labels = victims(2, batch)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shares = Shares(model, cross_entropy, protocol)
    expected, kept = sgd_of_all(model, protocol, images, labels)
    found = shares.send(images, labels)
    assert shares.why_not is None
    assert_near(found.gradients, expected)
    assert_near(found.statistics, kept if protocol.train_mode else {})
    assert_near(looped(model, protocol)(images, labels), expected)
    plain = slope(looped(model, protocol), images, labels)
    assert plain.norm() > 0
    assert apart(slope(shares, images, labels), plain) < 1e-9
    assert not any(
        value.requires_grad for value in shares(images.requires_grad_(), labels).values()
    )
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "train"),
    [(name, train) for name in NETS for train in MODES if train or name not in MODELESS],
)
def test_every_model_is_batched_through_mini_batches_momentum_and_decay(
    name: str, train: bool
) -> None:
    short = replace(EVERYTHING, local_epochs=1, local_batch_size=2, train_mode=train)
    check(NETS[name](), short)


@pytest.mark.parametrize("train", MODES)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_is_a_run_of_torchs_sgd(name: str, train: bool) -> None:
    check(NETS["twice"](), replace(PROTOCOLS[name], train_mode=train), batch=5)


@pytest.mark.parametrize("train", MODES)
@pytest.mark.parametrize("protocol", [Protocol(local_lr=0.05), EVERYTHING], ids=["one", "several"])
def test_an_average_of_clients_is_the_mean_of_their_own_runs(
    protocol: Protocol, train: bool
) -> None:
    model, own = NETS["twice"](), replace(protocol, train_mode=train)
    images, labels = victims(2, 8)  # averages of 2 clients with 4 images each

    def of_each(run: Callable[..., Gradients]) -> Callable[..., Gradients]:
        def mean(images: Tensor, labels: Tensor, differentiable: bool = False) -> Gradients:
            runs = [
                run(images[:, part], labels[:, part], differentiable=differentiable)
                for part in (slice(4), slice(4, 8))
            ]
            return {name: (runs[0][name] + runs[1][name]) / 2 for name in runs[0]}

        return mean

    shares = Shares(model, cross_entropy, replace(own, averaged_clients=2))
    found = shares.send(images, labels)
    ends = [sgd_of_all(model, own, images[:, p], labels[:, p]) for p in (slice(4), slice(4, 8))]
    for ours, each in ((found.gradients, 0), (found.statistics, 1)):
        wanted = {name: (ends[0][each][name] + ends[1][each][name]) / 2 for name in ends[0][each]}
        assert_near(ours, wanted if train or each == 0 else {})
    plain = slope(of_each(looped(model, own)), images, labels)
    assert plain.norm() > 0 and apart(slope(shares, images, labels), plain) < 1e-9
    assert "7 images of 2 clients" in toys.refused(shares, images[:, :7], labels[:, :7])


@pytest.mark.parametrize("train", MODES)
def test_an_average_is_one_clients_gradient_where_batches_do_not_matter(train: bool) -> None:
    averaged = Protocol(train_mode=train, averaged_clients=2)
    shape = (3, SIZE, SIZE)
    assert as_one_client(averaged, NETS["lenet"](), 8, shape).averaged_clients == 1
    twice = as_one_client(averaged, NETS["twice"](), 8, shape)
    assert twice.averaged_clients == (2 if train else 1)
    several = replace(averaged, local_batch_size=2)
    assert as_one_client(several, NETS["lenet"](), 8, shape) == several
    assert as_one_client(several, NETS["lenet"](), 4, shape).averaged_clients == 1


class Centered(nn.Module):
    """A user's layer that takes the mean over the batch off, in training mode."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0, keepdim=True)
        return x - (mean.detach() if self.detached else mean) if self.training else x


@pytest.mark.parametrize("train", MODES)
@pytest.mark.parametrize("detached", [False, True])
def test_images_that_a_user_s_layer_mixes_stay_with_their_clients(
    detached: bool, train: bool
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), Centered(detached), nn.Linear(3 * SIZE**2, CLASSES), nn.Dropout(0.5)
        )

    model, before = toys.seeded(make).double().eval(), torch.get_rng_state()
    averaged = Protocol(train_mode=train, averaged_clients=2)
    found = as_one_client(averaged, model, 8, (3, SIZE, SIZE))
    assert found.averaged_clients == (2 if train else 1)
    assert torch.equal(before, torch.get_rng_state()) and not model.training
    layers = [layer for layer in model.children() if not isinstance(layer, Centered)]
    found = as_one_client(averaged, nn.Sequential(*layers), 8, (3, SIZE, SIZE))
    assert found.averaged_clients == 1  # though dropout draws
    assert as_one_client(averaged, model, 8, (1, 2, 2)) == averaged  # images that do not fit


class Mixed(nn.Module):
    """A user's layer that does something to a batch."""

    def __init__(self, do: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        return self.do(x)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("do", [lambda x: x.cumsum(0), lambda x: x - x[:1], lambda x: x - x[-1:]])
def test_an_image_that_changes_others_and_is_not_changed_is_mixed_with_them(
    do: Callable[[Tensor], Tensor], size: int
) -> None:
    model = nn.Sequential(Mixed(do), nn.Flatten(), nn.Linear(3 * SIZE**2, CLASSES)).eval()
    averaged = Protocol(averaged_clients=2)
    assert as_one_client(averaged, model, size, (3, SIZE, SIZE)) == averaged


def test_a_model_without_parameters_may_be_asked_about_too() -> None:
    averaged = Protocol(averaged_clients=2)
    assert as_one_client(averaged, nn.Flatten(), 8, (3, SIZE, SIZE)).averaged_clients == 1


@pytest.mark.parametrize("train", MODES)
def test_frozen_parameters_stay_through_the_steps(train: bool) -> None:
    model = NETS["instances"]()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 1)
    check(model, replace(EVERYTHING, train_mode=train), batch=5)


def test_statistics_can_be_differentiated_through_the_steps() -> None:
    model, protocol = NETS["twice"](), Protocol(local_steps=2, local_lr=0.5, train_mode=True)
    images, labels = victims(2, 3)
    guess = images.requires_grad_()

    def summed(statistics: dict[str, Tensor]) -> Tensor:
        return torch.stack([value.square().sum() for value in statistics.values()]).sum()

    shares = Shares(model, cross_entropy, protocol)
    found = shares.statistics(guess, labels, differentiable=True)
    with in_mode(model, True):
        running = Running(model, 2)
        settings = model, cross_entropy, protocol
        loop_updates(*settings, guess, labels, differentiable=True, running=running)
    plain = running.values()
    assert_near(found, plain)
    slopes = [torch.autograd.grad(summed(kept), guess)[0] for kept in (found, plain)]
    assert slopes[1].norm() > 0
    assert apart(*slopes) < 1e-9


def test_victims_are_batched_where_the_local_steps_on_noise_are_not_finite() -> None:
    model, protocol = nn.Sequential(toys.Brittle(), NETS["lenet"]()), PROTOCOLS["steps"]
    images, labels = victims(2, 4)
    assert not are_finite([*looped(model, protocol)(images, labels).values()])
    shares = Shares(model, cross_entropy, protocol)
    assert_near(shares(images / 3, labels), looped(model, protocol)(images / 3, labels))
    assert shares.why_not is None


def test_a_mini_batch_as_large_as_the_batch_shares_its_gradient() -> None:
    images, labels = victims(2, 3)
    whole, parts = (
        Shares(NETS["convnet"](), cross_entropy, Protocol(local_batch_size=size))(images, labels)
        for size in (None, 3)
    )
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


CONVOLUTIONS = [
    nn.Conv2d(4, 6, 3, padding=1),
    nn.Conv2d(4, 6, 5, stride=(3, 2), padding=(0, 4), groups=2),
    nn.Conv2d(4, 4, (1, 4), padding="same", dilation=(1, 3), groups=4),
    nn.Conv2d(4, 6, (4, 3), stride=(2, 3), dilation=(3, 2), padding=3),
    nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    nn.Conv2d(4, 6, 1, stride=4, padding="valid"),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("form", ["groups", "groups, thin", "patches"])
@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_a_convolution_with_weights_for_each_victim_is_torchs_with_both_derivatives(
    layer: nn.Conv2d, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of patches are the way of a GPU; a CPU takes some of them for thin layers."""
    monkeypatch.setattr(convolutions, "grouped", lambda _: form != "patches")
    monkeypatch.setattr(engine_each, "THIN", 5 if form == "groups, thin" else 0)
    rng = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=rng, dtype=torch.float64)
    inputs, weight = draw(6, 4, 13, 17), draw(3, *layer.weight.shape)
    leaves = [inputs.requires_grad_(), weight.requires_grad_()]

    def plain(x: Tensor, w: Tensor) -> Tensor:
        pairs = zip(x.chunk(3), w, strict=True)
        return torch.cat([layer._conv_forward(rows, each, None) for rows, each in pairs])

    each = []
    for way in (partial(convolve_each, layer), plain):
        values = way(*leaves)
        once = torch.autograd.grad(values.sin().sum(), leaves, create_graph=True)
        total = torch.stack([part.sin().sum() for part in once]).sum()
        each.append((values, *once, *torch.autograd.grad(total, leaves)))
    for found, expected in zip(*each, strict=True):
        assert apart(found, expected) < 1e-12


@pytest.mark.parametrize("pairs", [3, 80])
def test_products_of_many_pairs_have_two_derivatives(pairs: int) -> None:
    left = torch.rand(pairs, 2, 3, dtype=torch.float64, requires_grad=True)
    right = torch.rand(pairs, 3, 2, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(multiply(left, right), left @ right, rtol=1e-14, atol=0)
    some = left[:2].detach().requires_grad_(), right[:2].detach().requires_grad_()
    assert torch.autograd.gradgradcheck(multiply, some)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("train", MODES)
@pytest.mark.parametrize("name", ["resnet20-4", "mobilenet", "transformer"])
def test_local_steps_on_a_gpu_are_near_the_loop_in_float64(name: str, train: bool) -> None:
    model = NETS[name]().cuda()
    images, labels = (part.cuda() for part in victims(3, 4))
    protocol = replace(EVERYTHING, train_mode=train)
    shares = Shares(model, cross_entropy, protocol)
    assert_near(shares(images, labels), looped(model, protocol)(images, labels))
    plain = slope(looped(model, protocol), images, labels)
    assert apart(slope(shares, images, labels), plain) < 1e-9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("train", MODES)
def test_an_attack_on_local_steps_replays_its_iterations_on_a_gpu(train: bool) -> None:
    from gradveil.attacks import GradientMatching, find
    from gradveil.attacks.matching import Problem
    from gradveil.core.seeds import generator

    model = NETS["resnet20-4"]().float().cuda()
    batch = toys.batch(4, size=12, classes=5)
    protocol = Protocol(local_steps=2, local_lr=0.01, train_mode=train)
    seen = toys.observe(model, batch, protocol=protocol)
    attack = find("adam-cosine")
    assert isinstance(attack, GradientMatching)
    problem = Problem.draw(replace(attack, fast=False), [seen], generator(0))
    assert problem.search(5, False, lambda _: None).replayable
    found = replace(attack, steps=20, fast=False)(seen, 0)
    assert found.status == "ok"
