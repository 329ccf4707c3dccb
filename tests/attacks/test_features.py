"""Features of a batch at dense layers: found exactly from their gradients, and matched."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import toys
from gradveil.attacks import (
    Attack,
    GradientMatching,
    adam_cosine,
    dense_inversion,
    dense_matching,
    features,
)
from gradveil.attacks.distances import cosine
from gradveil.attacks.features import FeatureCosine, FeatureMeasure, find_features
from gradveil.attacks.labels import last_layer
from gradveil.clients import Client
from gradveil.core.types import Batch, Knowledge, Loss, Protocol
from gradveil.engine.shares import Shares

RNG = torch.Generator


def relu_net() -> nn.Module:
    """A convolution, a ReLU and a pool before the only dense layer; float64."""

    def make() -> nn.Module:
        layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(64, 10))

    return toys.seeded(make).double()


def deep_head() -> nn.Module:
    """Two dense layers after a convolution; the features are those between them."""

    def make() -> nn.Module:
        layers = nn.Conv2d(3, 4, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 32)
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(32, 10))

    return toys.seeded(make).double()


def truth(model: nn.Module, images: Tensor, layer: nn.Module) -> Tensor:
    """Return what goes into the layer."""
    made: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: made.append(given[0]))
    model(images)
    hook.remove()
    return made[0].detach()


def batch(labels: list[int]) -> Batch:
    return Batch(toys.pictures(len(labels), dtype=torch.float64), torch.tensor(labels))


def worst(found: Tensor, true: Tensor) -> float:
    return float(((found - true).norm(dim=1) / true.norm(dim=1)).max())


@pytest.mark.parametrize("make", [toys.lenet, relu_net, deep_head])
@pytest.mark.parametrize("labels", [[3], [0, 1, 2, 3], [5, 5, 2], [9, 8, 7, 6, 5, 4]])
def test_features_of_every_image_come_out_of_the_gradient(make: object, labels: list[int]) -> None:
    model = make()  # type: ignore[operator]
    private = batch(labels)
    seen = toys.observe(model, private)
    found = find_features(seen, RNG().manual_seed(0))[0]
    true = truth(model, private.images, found.layer)
    assert found.layer is next(each for each in model.modules() if isinstance(each, nn.Linear))
    order = torch.cdist(found.features, true).argmin(1).tolist()
    assert sorted(order) == [*range(len(labels))]  # images of one class may change places
    assert [labels[n] for n in order] == labels
    assert worst(found.features, true[order]) < 1e-4


def test_features_of_a_float32_gradient_come_out_to_its_precision() -> None:
    model = toys.lenet().float()
    private = toys.batch(4)
    seen = toys.observe(model, private)
    found = find_features(seen, RNG().manual_seed(0))[0]
    assert worst(found.features, truth(model, private.images, found.layer).double()) < 1e-3


def test_a_pruned_gradient_is_completed_from_its_whole_columns() -> None:
    model, private = toys.lenet(), batch([0, 1, 2])
    seen = toys.observe(model, private, "prune:0.1")
    weight = seen.gradients["head.weight"]
    counts = (weight != 0).sum(0)
    assert bool(((counts < 10) & (counts >= 3)).any()) and int((counts == 10).sum()) >= 3
    found = find_features(seen, RNG().manual_seed(0))[0]
    assert worst(found.features, truth(model, private.images, found.layer)) < 1e-4


def test_matching_toward_features_comes_nearer_than_plain_matching() -> None:
    model = toys.leaky()
    private = toys.fashion(4)
    seen = toys.observe(model, private)
    layer = last_layer(seen)
    true = truth(model, private.images, layer)
    gaps = []
    for attack in (adam_cosine, features):
        found = replace(attack, steps=30, frames=0)(seen, 0)
        made = truth(model, found.images.double(), layer)
        gaps.append(float((made - true).norm()))
    assert gaps[1] < gaps[0]


def test_the_distance_and_its_slope_are_the_formula() -> None:
    model = relu_net()
    seen = [toys.observe(model, batch(labels)) for labels in ([0, 1, 2], [3, 4, 5])]
    rows = toys.pictures(6, seed=5, dtype=torch.float64).view(2, 3, 3, 8, 8).requires_grad_()
    labels = torch.tensor([[0, 1, 2], [3, 4, 5]])
    shares = Shares(model, seen[0].loss, seen[0].protocol)
    found = FeatureCosine(pull=2.5).bind(seen).from_shares(shares, rows, labels, {}, True)
    plain = cosine.bind(seen).from_shares(shares, rows, labels, {}, True)
    private = toys.pictures(3, dtype=torch.float64)
    true = truth(model, private, last_layer(seen[0]))  # both have the same pictures

    def gaps(of: Tensor) -> Tensor:
        return torch.stack([(model[:-1](row) - true).square().sum() for row in of])  # type: ignore[index]

    noise = torch.rand(2, 3, 3, 8, 8, generator=RNG().manual_seed(0)).double().requires_grad_()
    other = cosine.bind(seen).from_shares(shares, noise, labels, {}, True)
    lengths = [
        torch.autograd.grad(each.sum(), noise)[0].flatten(1).norm(dim=1)
        for each in (other, gaps(noise))
    ]
    wanted = plain + 2.5 * lengths[0] / lengths[1] * gaps(rows)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(each.sum(), rows)[0] for each in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_victims_without_features_are_matched_plainly_beside_others() -> None:
    model = toys.lenet()
    good, wrong = (toys.observe(model, batch([0, 1, 2])) for _ in range(2))
    told = replace(wrong, knowledge=Knowledge(labels=torch.tensor([7, 8, 9])))
    measure = FeatureCosine().bind([good, told])
    assert isinstance(measure, FeatureMeasure)
    (aim,) = measure.aims
    assert aim.factors.bool().all(1).tolist() == [True, False]


def test_victims_whose_features_are_those_of_several_layers_each_have_their_aim() -> None:
    model = deep_head()
    whole, cut = (toys.observe(model, batch([0, 1, 2])) for _ in range(2))
    noise = torch.rand(cut.gradients["3.weight"].shape, generator=RNG().manual_seed(0))
    cut = replace(cut, gradients={**cut.gradients, "3.weight": noise.double()})
    measure = FeatureCosine(pull=2.0).bind([whole, cut], restarts=2)
    assert isinstance(measure, FeatureMeasure)
    layers = {aim.layer: aim.factors.bool().all(1).tolist() for aim in measure.aims}
    first, last = (each for each in model.modules() if isinstance(each, nn.Linear))
    assert layers == {first: [True, True, False, False], last: [False, False, True, True]}
    rows = toys.pictures(12, seed=5, dtype=torch.float64).view(4, 3, 3, 8, 8)
    labels = torch.tensor([[0, 1, 2]] * 4)
    shares = Shares(model, whole.loss, whole.protocol)
    found = measure.from_shares(shares, rows, labels, {}, False)
    plain = cosine.bind([whole, cut], restarts=2).from_shares(shares, rows, labels, {}, False)
    private = toys.pictures(3, dtype=torch.float64)
    gaps = [
        (truth(model, row, layer) - truth(model, private, layer)).square().sum()
        for row, layer in zip(rows, (first, first, last, last), strict=True)
    ]
    factors = torch.stack([aim.factors[:, 0] for aim in measure.aims]).sum(0)
    assert factors[0] == factors[1] and factors[2] == factors[3] and factors[0] != factors[2]
    torch.testing.assert_close(found - plain, factors * torch.stack(gaps), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("defense", "said"),
    [
        (
            "gaussian:0.01",
            "no features of 3 images were found with the gradient of the last dense layer (rel",
        ),
        ("prune:0.99", "features of a batch of 3 need as many"),
    ],
)
def test_noise_and_hard_pruning_end_it_and_it_says_so(defense: str, said: str) -> None:
    seen = toys.observe(toys.lenet(), batch([0, 1, 2]), defense)
    assert said in toys.refused(features, seen, 0)


def test_what_it_cannot_work_on_is_refused_in_one_line() -> None:
    model = toys.lenet()
    many = toys.observe(model, batch([*range(10)]))
    assert "batch of 10: features are found of fewer images" in toys.refused(features, many, 0)
    wide = toys.built("lenet", classes=1_000)
    private = Batch(toys.pictures(40, dtype=torch.float64), torch.arange(40))
    large = toys.observe(wide, private)
    assert "equations of features would be too large" in toys.refused(features, large, 0)
    several = toys.observe(model, batch([0, 1]), protocol=Protocol(local_steps=2))
    assert "2 local steps" in toys.refused(features, several, 0)
    drawn = toys.observe(model, batch([0, 1]), "precode")
    assert "the model draws by itself" in toys.refused(features, drawn, 0)


def test_a_reason_does_not_begin_with_the_name_that_a_report_writes_before_it() -> None:
    model = toys.lenet()
    seen = [toys.observe(model, batch([0, 1, 2]), kind) for kind in ("gaussian:0.01", "prune:0.99")]
    seen += [toys.observe(model, batch([0, 1]), "precode"), toys.observe(model, batch([0, 1, 2]))]
    seen[-1].gradients["head.bias"][0] = torch.nan
    told = [toys.refused(features, each, 0) for each in seen]
    assert not [said for said in told if said.startswith("features:")]


@pytest.mark.parametrize("spoiled", ["head.weight", "head.bias"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_refused(spoiled: str, value: float) -> None:
    seen = toys.observe(toys.lenet(), batch([0, 1, 2]))
    seen.gradients[spoiled][0] = value
    said = toys.refused(features, seen, 0)
    assert "the gradient of the last dense layer is not finite" in said


def test_a_model_that_ends_in_a_convolution_is_refused_without_a_word_of_labels() -> None:
    model = toys.seeded(lambda: nn.Sequential(nn.Conv2d(3, 10, 8), nn.Flatten())).double()
    said = toys.refused(features, toys.observe(model, batch([0, 1])), 0)
    assert "features need a last linear layer with 10 outputs" in said and "labels" not in said


def test_more_images_than_the_last_layer_has_inputs_are_refused() -> None:
    seen = toys.observe(toys.mlp(nn.ReLU(), width=3), batch([0, 1, 2, 3]))
    assert "as the last dense layer has inputs, 3" in toys.refused(features, seen, 0)


def looping(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy that counts one class twice, image by image."""
    each = zip(logits, labels, strict=True)
    return torch.stack([(1 + (int(y) == 1)) * -z.log_softmax(0)[int(y)] for z, y in each])


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - nn.functional.one_hot(labels, logits.shape[1])).square().sum(1)


def straight(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a loss whose slopes are the same everywhere."""
    return logits.sum(1) - 3 * logits.gather(1, labels[:, None])[:, 0]


@pytest.mark.parametrize("loss", [looping, squares])
def test_a_client_s_loss_is_called_as_the_client_calls_it(loss: Loss) -> None:
    model, private = relu_net(), batch([0, 1, 2])
    found = find_features(toys.observe(model, private, loss=loss), RNG().manual_seed(0))[0]
    assert worst(found.features, truth(model, private.images, found.layer)) < 1e-4


def test_a_loss_without_curves_is_no_obstacle() -> None:
    model, private = relu_net(), batch([0, 1, 2])
    found = find_features(toys.observe(model, private, loss=straight), RNG().manual_seed(0))[0]
    assert worst(found.features, truth(model, private.images, found.layer)) < 1e-4


@pytest.mark.parametrize("attack", [adam_cosine, features, dense_inversion], ids=str)
def test_a_loss_that_torch_has_no_second_derivative_of_is_refused_in_one_line(
    attack: Attack,
) -> None:
    loss = nn.MultiMarginLoss(reduction="none")
    seen = toys.observe(toys.mlp(nn.ReLU()), batch([0, 1, 2]), loss=loss)
    said = toys.refused(attack, seen, 0)
    assert "torch has no second derivative of multi_margin_loss, in the client's loss" in said


def test_class_weights_in_float32_serve_a_loss_in_float64() -> None:
    model, private = deep_head().float(), toys.batch(3)
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 10), reduction="none")
    seen = toys.observe(model, private, loss=loss)
    found = find_features(seen, RNG().manual_seed(0))[0]
    assert found.layer is model[3]  # type: ignore[index]
    assert worst(found.features, truth(model, private.images, found.layer).double()) < 1e-3
    assert loss.weight is not None and loss.weight.dtype is torch.float32


def test_a_layer_of_a_thousand_classes_takes_little_memory() -> None:
    # A slope of each logit by each other one, for all starts, would be over 100 million numbers.
    model = toys.built("lenet", classes=1_000)
    private = batch([3])
    seen = toys.observe(model, private, classes=1_000)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        found = find_features(seen, RNG().manual_seed(0))[0]
    assert worst(found.features, truth(model, private.images, found.layer)) < 1e-4
    assert largest.numbers < 4_000_000


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made meanwhile."""

    numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        made = function(*given, **(named or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.numel())
        return made


def test_zeros_of_a_model_that_is_sure_are_not_called_pruning() -> None:
    model = toys.mlp(nn.ReLU()).float()
    with torch.no_grad():
        last_layer(toys.observe(model, toys.batch(1))).weight.mul_(3_000)
    private = Batch(toys.pictures(3), torch.tensor([0, 1, 2]))
    seen = toys.observe(model, private)
    assert bool((seen.gradients["3.bias"] == 0).any())
    assert "pruning" not in toys.refused(features, seen, 0)


def test_in_float32_a_client_s_batch_is_found_and_told_by_an_audit() -> None:
    model = toys.lenet().float()
    shared = Client(model, classes=10).share(toys.pictures(2), torch.tensor([4, 1]), seed=0)
    found = replace(features, steps=2, frames=0)(shared.seen, 0)
    assert found.status == "ok" and found.labels is not None and found.labels.tolist() == [4, 1]


def test_train_mode_is_no_obstacle_where_no_layer_mixes_images() -> None:
    model, private = toys.lenet(), batch([4, 1])
    seen = toys.observe(model, private, protocol=Protocol(train_mode=True))
    found = replace(features, steps=2, frames=0)(seen, 0)
    assert found.status == "ok"


def normed_head() -> nn.Module:
    """A batch norm before the dense layers, and one between them; float64."""

    def make() -> nn.Module:
        layers = nn.Conv2d(3, 4, 3, 2, padding=1), nn.BatchNorm2d(4), nn.Flatten()
        head = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)
        return nn.Sequential(*layers, *head)

    return toys.seeded(make).double()


@pytest.mark.parametrize("make", [toys.conv_with_norm, normed_head])
def test_in_train_mode_features_are_those_that_the_batch_s_own_statistics_make(
    make: Callable[[], nn.Module],
) -> None:
    model, private = make(), batch([4, 1, 7])
    seen = toys.observe(model, private, protocol=Protocol(train_mode=True))
    found = find_features(seen, RNG().manual_seed(0))[0]
    true = truth(model.train(), private.images, last_layer(seen))
    assert found.layer is last_layer(seen)  # a batch norm ends the way back through dense layers
    assert worst(found.features, true) < 1e-4
    assert worst(truth(model.eval(), private.images, found.layer), true) > 0.01


@pytest.mark.parametrize("strong", [features, dense_matching], ids=str)
def test_in_train_mode_matching_toward_features_comes_nearer_than_plain_matching(
    strong: GradientMatching,
) -> None:
    model, private = toys.conv_with_norm(1, 12, 10), toys.fashion(4)
    seen = toys.observe(model, private, protocol=Protocol(train_mode=True))
    gaps = []
    for attack in (adam_cosine, strong):
        found = replace(attack, steps=60, frames=0)(seen, 0)
        made, true = (
            truth(model.train(), images.double(), last_layer(seen))
            for images in (found.images, private.images)
        )
        gaps.append(float((made - true).norm()))
    assert gaps[1] < gaps[0]
