"""Inputs of dense layers, matched through these layers alone, and images that give them."""

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import toys
from gradveil.attacks import GradientMatching, dense_matching, features, find
from gradveil.attacks.dense_layers import trailing
from gradveil.attacks.dense_matching import _KEPT, Head, MatchedFeatures, match_inputs
from gradveil.attacks.features import FeatureMeasure
from gradveil.core.types import Batch, Knowledge, Observation, Protocol

LOCAL = Protocol(
    local_lr=0.05,
    local_epochs=2,
    local_batch_size=3,
    client_momentum=0.9,
    client_weight_decay=5e-3,
)


def head_alone() -> nn.Module:
    """Three dense layers that get the picture itself."""

    def make() -> nn.Module:
        layers = nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 10)
        return nn.Sequential(nn.Flatten(), *layers)

    return toys.seeded(make).double()


def convolution_first() -> nn.Module:
    """A convolution, a ReLU and two dense layers."""

    def make() -> nn.Module:
        layers = nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 48)
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(48, 10))

    return toys.seeded(make)


def some(count: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Batch:
    return Batch(toys.pictures(count, seed=seed, dtype=dtype), torch.arange(count) % 10)


def inputs_of(model: nn.Module, images: Tensor) -> Tensor:
    """Return what the first dense layer gets of the images."""
    made: list[Tensor] = []
    layer = next(each for each in model.modules() if isinstance(each, nn.Linear))
    hook = layer.register_forward_pre_hook(lambda _, given: made.append(given[0].detach()))
    model(images)
    hook.remove()
    return made[0]


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(),
        Protocol(local_steps=3, local_lr=0.1),
        LOCAL,
        replace(LOCAL, averaged_clients=2),
    ],
)
@pytest.mark.parametrize("frozen", [None, "1.bias", "3.weight"])
def test_the_update_of_the_head_is_what_the_client_shares(
    protocol: Protocol, frozen: str | None
) -> None:
    model, private = head_alone(), some(8, dtype=torch.float64)
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    seen = toys.observe(model, private, protocol=protocol)
    layers = trailing(seen)
    assert len(layers) == (1 if frozen == "3.weight" else 3)
    given = private.images.flatten(1)
    if len(layers) == 1:
        if protocol.steps(8) > 1:
            return  # the layers before move, so that there are no such inputs
        given = model[:5](private.images).detach()  # type: ignore[index]
    found = Head([seen], [layers]).updates(given[None].float())
    shared = [part for each in layers for part in (each.by_weight, each.by_bias)]
    for made, wanted in zip(found, shared, strict=True):
        if wanted is None:
            assert not bool(made.any())
        else:
            torch.testing.assert_close(made[0], wanted.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("protocol", [Protocol(), LOCAL], ids=["a gradient", "local steps"])
def test_each_image_has_the_inputs_next_to_its_own(protocol: Protocol) -> None:
    model, private = convolution_first(), some(10)
    seen = toys.observe(model, private, protocol=protocol)
    (found,) = match_inputs([seen], 600, 0)
    true = inputs_of(model, private.images)
    assert torch.cdist(found.inputs, true).argmin(1).tolist() == [*range(10)]
    assert found.error < 0.1
    gaps = (found.inputs - true).norm(dim=1) / true.norm(dim=1)
    blind = (true.mean(0) - true).norm(dim=1) / true.norm(dim=1)
    assert bool((gaps < 0.5 * blind).all())


@pytest.mark.parametrize("protocol", [Protocol(), LOCAL, replace(LOCAL, averaged_clients=2)])
@pytest.mark.parametrize("most", [1, 1 << 23], ids=["one by one", "together"])
def test_victims_who_are_matched_together_are_matched_as_alone(
    protocol: Protocol, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["gradveil.attacks.dense_matching"], "MOST", most)
    model, shuffled = convolution_first(), torch.tensor([3, 1, 4, 1, 5, 9])
    private = [some(6), some(6, seed=1), replace(some(6, seed=2), labels=shuffled), some(4, seed=3)]
    seen = [toys.observe(model, batch, protocol=protocol) for batch in private]
    knowing = replace(seen[1].knowledge, pruned=True)
    cut = {n: torch.where(g.abs() < 1e-3, 0, g) for n, g in seen[1].gradients.items()}
    seen[1] = replace(seen[1], gradients=cut, knowledge=knowing)
    together = match_inputs(seen, 12, 0)
    for victim, found in zip(seen, together, strict=True):
        (alone,) = match_inputs([replace(victim)], 12, 0)
        torch.testing.assert_close(found.inputs, alone.inputs, rtol=1e-3, atol=1e-3)
        assert found.error == pytest.approx(alone.error, rel=1e-3)
    assert not torch.allclose(together[0].inputs, together[2].inputs, atol=0.01)


def test_the_update_of_other_images_tells_nothing_of_these() -> None:
    model, private, others = convolution_first(), some(10), some(10, seed=7)
    (found,) = match_inputs([toys.observe(model, others, protocol=LOCAL)], 600, 0)
    true = inputs_of(model, private.images)
    right = torch.cdist(found.inputs, true).argmin(1) == torch.arange(10)
    assert int(right.sum()) <= 4


def test_what_pruning_cut_off_is_not_matched() -> None:
    model, private = convolution_first(), some(4)
    seen = toys.observe(model, private)
    cut = {
        name: torch.where(part.abs() < part.abs().median(), 0, part)
        for name, part in seen.gradients.items()
    }
    true = inputs_of(model, private.images)[None]
    knowing = Knowledge(labels=private.labels, pruned=True)
    errors = [
        float(Head([victim], [trailing(victim)]).unexplained(true).detach())
        for victim in (
            replace(seen, gradients=cut, knowledge=knowing),
            replace(seen, gradients=cut, knowledge=Knowledge(labels=private.labels)),
        )
    ]
    assert errors[0] < 1e-4 < 0.01 < errors[1]


def test_inputs_after_a_relu_are_never_negative_and_other_ones_may_be() -> None:
    model = convolution_first()
    (kept,) = match_inputs([toys.observe(model, some(4))], 20, 0)
    free = nn.Sequential(*(part for part in model.children() if not isinstance(part, nn.ReLU)))
    (open_ended,) = match_inputs([toys.observe(free, some(4))], 20, 0)
    assert float(kept.inputs.min()) >= 0 > float(open_ended.inputs.min())


def test_images_of_local_steps_are_found_by_their_features() -> None:
    model, private = convolution_first(), some(6)
    attack = replace(dense_matching, steps=600, frames=0)
    gaps = []
    for victims in (private, some(6, seed=7)):  # the second are a sham
        found = attack(toys.observe(model, victims, protocol=LOCAL), 0)
        assert found.status == "ok"
        made = inputs_of(model, found.images).double()
        true = inputs_of(model, private.images).double()
        gaps.append(float((made - true).norm() / true.norm()))
    assert gaps[0] < 0.5 * gaps[1]


def test_a_short_search_matches_as_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counting(victims: Sequence[Observation], iterations: int, seed: int) -> object:
        asked.append(iterations)
        return match_inputs(victims, iterations, seed)

    monkeypatch.setattr(sys.modules["gradveil.attacks.dense_matching"], "match_inputs", counting)
    seen = toys.observe(convolution_first(), some(3))
    for steps in (3, 5):
        replace(dense_matching, steps=steps, frames=0)(seen, 0)
    few = replace(dense_matching, distance=MatchedFeatures(iterations=4))
    replace(few, steps=5, frames=0)(seen, 0)
    assert asked == [3, 5, 4]


def test_a_victim_is_matched_once_and_forgotten_with_it() -> None:
    seen = toys.observe(convolution_first(), some(3))
    (first,) = match_inputs([seen], 5, 0)
    assert match_inputs([seen], 5, 0) == [first] != match_inputs([seen], 6, 0)
    before = len(_KEPT)
    del seen
    gc.collect()
    assert len(_KEPT) == before - 1


def test_two_victims_of_local_steps_are_reconstructed_together() -> None:
    model = convolution_first()
    seen = [toys.observe(model, some(3, seed=seed), protocol=LOCAL) for seed in (0, 1)]
    attack = replace(dense_matching, steps=20, restarts=2, frames=0)
    found = attack(seen, 0)
    assert [each.status for each in found] == ["ok", "ok"]
    alone = attack(seen[:1], 0)
    assert found[0].distance < 10 * alone[0].distance


def test_what_it_cannot_work_on_is_refused_in_one_line() -> None:
    attack = replace(dense_matching, steps=2)
    seen = toys.observe(convolution_first(), some(2))
    unknown = replace(seen, knowledge=Knowledge())
    assert "needs to know the labels" in toys.refused(attack, unknown, 0)
    spoiled = {**seen.gradients, "5.weight": torch.full_like(seen.gradients["5.weight"], torch.nan)}
    said = toys.refused(attack, replace(seen, gradients=spoiled), 0)
    assert said == "the last dense layer's gradient is needed, with finite numbers"


def test_clients_who_cannot_have_as_many_images_each_are_refused() -> None:
    protocol = Protocol(local_steps=2, averaged_clients=3)
    seen = replace(toys.observe(convolution_first(), some(8)), protocol=protocol)
    said = toys.refused(replace(dense_matching, steps=2), seen, 0)
    assert said == "8 images of 3 clients: each has to have as many"


def test_class_weights_in_float64_are_taken_in_float32() -> None:
    loss = nn.CrossEntropyLoss(torch.arange(1.0, 11).double(), reduction="none")
    seen = toys.observe(head_alone(), some(4, dtype=torch.float64), loss=loss)
    (found,) = match_inputs([seen], 5, 0)
    assert found.inputs.isfinite().all()
    assert loss.weight is not None and loss.weight.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:.*one at a time")
@pytest.mark.parametrize("attack", [dense_matching, features], ids=["matching", "features"])
def test_a_last_layer_whose_weight_is_computed_is_refused(attack: GradientMatching) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(192, 10)))

    seen = toys.observe(toys.seeded(make), some(2))
    assert "gradient" in toys.refused(replace(attack, steps=2), seen, 0)


@pytest.mark.filterwarnings("ignore:.*one at a time")
def test_before_a_layer_whose_weight_is_computed_no_inputs_are_looked_for() -> None:
    def make() -> nn.Module:
        first = weight_norm(nn.Linear(192, 24))
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(24, 10))

    model = toys.seeded(make)
    (found,) = match_inputs([toys.observe(model, some(2))], 5, 0)
    assert found.layer is model.get_submodule("3")


class Tokens(nn.Module):
    """A last layer that runs on each of four rows of numbers of an image, then their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        made: Tensor = self.head(images.reshape(len(images), 4, 48)).mean(1)
        return made


def test_a_last_layer_that_runs_on_several_rows_is_refused() -> None:
    seen = toys.observe(toys.seeded(Tokens), some(2))
    said = toys.refused(replace(dense_matching, steps=2), seen, 0)
    assert said == "the last dense layer must run once, on a row of numbers an image"


def test_victims_whose_dense_layers_are_not_all_shared_have_aims_of_their_own() -> None:
    model = convolution_first()
    whole, cut = (toys.observe(model, some(3, seed=seed)) for seed in (0, 1))
    cut = replace(cut, gradients={n: g for n, g in cut.gradients.items() if n != "3.weight"})
    measure = MatchedFeatures(iterations=3).bind([whole, cut], 2)
    assert isinstance(measure, FeatureMeasure)
    first, last = (each for each in model.modules() if isinstance(each, nn.Linear))
    told = {aim.layer: [bool(row.any()) for row in aim.factors] for aim in measure.aims}
    assert told == {first: [True, True, False, False], last: [False, False, True, True]}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_it_finds_as_much_as_on_the_processor() -> None:
    model, private = convolution_first(), some(6)
    attack = replace(dense_matching, steps=600, frames=0)
    errors = []
    for device in ("cpu", "cuda"):
        here = Batch(private.images.to(device), private.labels.to(device))
        found = attack(toys.observe(model.to(device), here, protocol=LOCAL), 0)
        assert found.status == "ok"
        errors.append(float((found.images.cpu() - private.images).square().mean()))
    assert errors[1] < 1.5 * errors[0]


def test_it_unites_with_a_race() -> None:
    united = find("raced+dense-matching")
    assert united.race.heats and united.distance == dense_matching.distance  # type: ignore[attr-defined]
