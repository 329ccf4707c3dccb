"""A client that checks its own update and the model it was given."""

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Generator, Tensor, nn

import toys
from flower import answer, context, question
from gradveil.attacks import Attack
from gradveil.clients import Client
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation, Protocol, Reconstruction
from gradveil.federated import guard
from gradveil.federated.canaries import plant
from gradveil.federated.guards import FIRST, PATIENCE, Guard, Outcome, shared_by
from gradveil.stats import upper_bound

CANARIES = Batch(toys.pictures(1200, 1, 12).float(), torch.arange(1200) % 10)
FEW = Batch(CANARIES.images[:90], CANARIES.labels[:90])
OTHERS = toys.fashion(300, 12, dtype=torch.float32)
OTHERS_TWICE = OTHERS.images.repeat(2, 1, 1, 1), OTHERS.labels.repeat(2)


def network(width: int = 64) -> nn.Module:
    """A network whose first layer gives a single image away exactly."""
    return toys.mlp(nn.ReLU(), channels=1, size=12, width=width).float()


def mine(size: int) -> Batch:
    return Batch(OTHERS.images[-size:], OTHERS.labels[-size:])


def guarded(size: int = 1, model: nn.Module | None = None, **more: Any) -> Any:
    batch = mine(size)
    pair = more.pop("canaries", CANARIES)
    return guard(
        model or network(),
        (pair.images, pair.labels),
        lambda _: (batch.images, batch.labels),
        **more,
    )


def asked(weights: dict[str, Tensor] | None = None) -> Any:
    return question(dict(network().state_dict()) if weights is None else weights)


def train(message: Any, _: Any) -> Any:
    return answer(message, {"sent": torch.ones(1)})


def test_an_update_that_gives_images_away_is_withheld_with_the_reason() -> None:
    reply = guarded()(asked(), context(), train)
    assert reply.has_error()
    said = str(reply.error.reason)
    assert said.startswith("withheld: ") and "of 8 planted images were picked out" in said
    assert "by closed-form; with" in said and "at most 0.05 may be" in said


def test_an_update_that_hides_images_is_sent() -> None:
    reply = guarded(defense="gaussian:10", attack="closed-form")(asked(), context(), train)
    assert not reply.has_error()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second goes by from each look at the clock to the next, and 10 iterations are enough."""
    monkeypatch.setattr("gradveil.federated.attempts.TIMED", 10)
    monkeypatch.setattr("gradveil.federated.attempts.LEAST", 10)
    monkeypatch.setattr("gradveil.federated.attempts.time.process_time", partial(next, count()))


def guarded_lenet(**more: Any) -> Any:
    model = toys.lenet(1, 12).float()
    mod = guarded(model=model, canaries=FEW, max_identified=0.3, count=20, **more)
    return mod(asked(dict(model.state_dict())), context(), train)


@pytest.mark.usefixtures("clock")
@pytest.mark.filterwarnings("ignore:canaries")
def test_by_default_a_convolutional_network_meets_a_search_that_the_seconds_allow(
    log: Any,
) -> None:
    reply = guarded_lenet(seconds=10.0)
    assert "by adam-cosine (40 iterations, for 10 s)" in str(reply.error.reason)
    assert "closed-form could not run: the first layer" in log.text


@pytest.mark.usefixtures("clock")
@pytest.mark.filterwarnings("ignore:canaries")
@pytest.mark.parametrize("local", [{}, {"local_epochs": 2, "local_batch_size": 2}])
def test_a_batch_meets_what_its_dense_layers_tell_in_half_of_the_seconds(
    local: Any, log: Any
) -> None:
    guarded_lenet(size=4, seconds=40.0, defense="gaussian:10", **local)
    names = "dense-matching (80 iterations, for 20 s) and likelihood (80 iterations, for 20 s)"
    assert f"by {names}" in log.text
    assert "peeling could not run" in log.text


@pytest.mark.usefixtures("clock")
@pytest.mark.filterwarnings("ignore:canaries")
def test_a_batch_is_not_sent_where_the_usual_search_has_too_little_time(log: Any) -> None:
    assert guarded_lenet(size=4, seconds=5.0).has_error()
    assert "adam-cosine could not run: " in log.text


@pytest.mark.usefixtures("clock")
@pytest.mark.filterwarnings("ignore:canaries")
def test_a_search_that_finds_nothing_lets_the_update_go() -> None:
    assert not guarded_lenet(seconds=10.0, defense="gaussian:10").has_error()


@pytest.mark.usefixtures("clock")
@pytest.mark.filterwarnings("ignore:canaries")
def test_nothing_is_sent_where_no_attack_can_run(log: Any) -> None:
    reply = guarded_lenet(seconds=5.0)
    assert str(reply.error.reason) == "withheld: the check failed, its log says why"
    assert "the check failed, its log says why: closed-form could not run" in log.text
    assert "adam-cosine could not run: 5 s are time for 2 of its iterations" in log.text


@pytest.mark.usefixtures("clock")
def test_nothing_is_sent_where_the_exact_attack_finds_nothing_and_no_search_can_run(
    log: Any,
) -> None:
    assert guarded(seconds=5.0, defense="gaussian:10")(asked(), context(), train).has_error()
    assert "likelihood could not run: 5 s are time for" in log.text


class Lost(Attack):
    """An attack whose reconstructions are not finite."""

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Any
    ) -> list[Reconstruction]:
        images = torch.full((seen[0].size, *seen[0].image_shape), float("nan"))
        return [Reconstruction(images, None, float("inf")) for _ in seen]


def test_nothing_is_sent_where_the_attack_diverges(log: Any) -> None:
    assert guarded(attack=Lost())(asked(), context(), train).has_error()
    assert "Lost diverged on 59 of 59 planted images" in log.text


def test_an_image_that_comes_back_as_the_policy_changed_it_is_picked_out() -> None:
    reply = guarded(defense="43-18-18", attack="closed-form")(asked(), context(), train)
    assert reply.has_error() and "of 8 planted images" in str(reply.error.reason)


def test_the_model_given_to_a_guard_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "identified", lambda *_: Outcome(0, 59))
    model = network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    others = {name: 2 * value for name, value in before.items()}
    assert not guarded(model=model)(asked(others), context(), train).has_error()
    assert model.training
    assert all(bool((value == before[name]).all()) for name, value in model.state_dict().items())


def test_errors_of_the_clients_code_are_for_its_log_alone(log: Any) -> None:
    def batch(_: Any) -> Any:
        raise KeyError("patient-0042.png")

    mod = guard(network(), (CANARIES.images, CANARIES.labels), batch)
    reply = mod(asked(), context(), train)
    assert str(reply.error.reason) == "withheld: the check failed, its log says why"
    assert "patient-0042.png" in log.text


def test_a_canary_has_the_place_and_the_label_of_an_image() -> None:
    batch = Batch(mine(4).images, torch.tensor([3, 3, 3, 5]))
    planted = plant(batch, CANARIES, 59, generator(0))
    assert len({each.number for each in planted}) == 59
    assert {each.row for each in planted} == {0, 1, 2, 3}
    for each in planted:
        others = torch.arange(4) != each.row
        assert bool((each.batch.images[others] == batch.images[others]).all())
        assert bool((each.batch.images[each.row] == CANARIES.images[each.number]).all())
        assert each.batch.labels.tolist() == batch.labels.tolist()


def test_canaries_of_other_labels_are_planted_where_those_of_a_label_are_used_up() -> None:
    batch = Batch(mine(1).images, torch.tensor([3]))
    labels = [int(each.batch.labels) for each in plant(batch, FEW, 59, generator(0))]
    assert labels[:9] == [3] * 9 and 3 not in labels[9:]


def test_a_planted_batch_is_shared_as_a_plain_loop_of_local_epochs_trains_on_it() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            nn.Linear(400, 10),
        )
    client = Client(model, 10, protocol=Protocol(1, 0.1, True, 2, 2, 0.5, 0.01))
    (planted,) = plant(mine(4), CANARIES, 1, generator(0))
    (seen,) = shared_by(client, [planted])
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.train().parameters(), 0.1, 0.5, weight_decay=0.01)
    for first in (0, 2, 0, 2):
        some = slice(first, first + 2)
        optimizer.zero_grad()
        answers = model(planted.batch.images[some])
        nn.functional.cross_entropy(answers, planted.batch.labels[some]).backward()
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(
            0.1 * seen.gradients[name], before[name] - value, atol=1e-5, rtol=1e-4
        )


def test_a_guarantee_of_differential_privacy_is_said_to_be_void() -> None:
    with pytest.warns(GradveilWarning, match="voids its guarantee of differential privacy"):
        guarded(defense="dp:norm=1,multiplier=1.1")


def test_each_round_and_client_plants_other_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def identified(*given: Any) -> Outcome:
        drawn.append(int(torch.randint(2**40, (), generator=given[-1])))
        return Outcome(0, 59)

    monkeypatch.setattr(Guard, "identified", identified)
    mod, weights = guarded(), dict(network().state_dict())
    for client, number in ((0, 1), (0, 2), (1, 1), (0, 1)):
        mod(question(weights, number=number), context(client), train)
    assert len(set(drawn)) == 3 and drawn[0] == drawn[3]


def test_local_epochs_in_mini_batches_are_checked_as_the_client_makes_them() -> None:
    local: dict[str, Any] = {
        "local_epochs": 2,
        "local_batch_size": 2,
        "client_momentum": 0.5,
        "attack": "dlg",
    }
    made = guarded(4, **local)
    assert made.client.protocol.steps(4) == 4 and made.client.protocol.client_momentum == 0.5


def test_evaluations_are_not_checked() -> None:
    message = question({"other": torch.ones(1)}, "evaluate")
    assert not guarded()(message, context(), train).has_error()


def test_nothing_is_sent_where_the_check_fails() -> None:
    reply = guarded()(asked({"other": torch.ones(1)}), context(), train)
    assert reply.has_error() and "the check failed" in str(reply.error.reason)


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (torch.zeros(2, 1, 12, 12, dtype=torch.uint8), [0, 1], "images of type torch.uint8"),
        (torch.full((2, 1, 12, 12), -1.0), [0, 1], "images with values from -1 to -1"),
        (torch.zeros(2, 1, 12, 12), [0, 12], "label 12; there are 10 classes"),
    ],
)
def test_a_batch_that_cannot_be_checked_is_named_in_the_log_alone(
    images: Tensor, labels: list[int], said: str, log: Any
) -> None:
    mod = guard(
        network(),
        (CANARIES.images, CANARIES.labels),
        lambda _: (images, torch.tensor(labels)),
    )
    reply = mod(asked(), context(), train)
    assert str(reply.error.reason) == "withheld: the check failed, its log says why"
    assert f"the client's batch: {said}" in log.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"count": 20}, "count 20: to show that at most 0.05 is identified takes 59 canaries"),
        ({"max_identified": 0.0}, "max identified 0: choose between 0 and 1"),
        ({"count": 1201}, "canaries: 1200 images; give at least 1201"),
        ({"defense": "prunn"}, "unknown defense 'prunn'"),
        ({"seconds": 0.0}, "seconds 0: they must be above 0"),
        ({"attack": "dlgg"}, "unknown attack 'dlgg'"),
    ],
)
def test_settings_that_show_nothing_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(GradveilError) as error:
        guarded(**settings)
    assert said in str(error.value)


def test_a_short_line_up_is_warned_of() -> None:
    few = Batch(CANARIES.images[:240], CANARIES.labels[:240])
    with pytest.warns(GradveilWarning, match="by luck in 22% of rounds; give 590 or more"):
        guarded(canaries=few)


def test_0_of_59_is_what_5_percent_needs() -> None:
    assert upper_bound(0, 59) <= 0.05 < upper_bound(0, 58)


def test_the_bound_holds_although_a_few_canaries_are_tried_before_the_others() -> None:
    few, others = np.arange(FIRST + 1), np.arange(60 - FIRST)
    early = np.array([upper_bound(int(hits), FIRST) for hits in few])
    late = np.array([upper_bound(hits, 59) for hits in range(60)])
    for share in np.linspace(0.01, 0.99, 99):
        chance = binom.pmf(few, FIRST, share)
        missed = (chance * (early < share))[late[few] > 0.05].sum()
        both = chance[0] * binom.pmf(others, 59 - FIRST, share)  # no hit, and it goes on
        missed += (both * (late[others] < share)).sum()
        assert missed <= 0.05


def test_a_leaking_layer_that_a_server_planted_is_refused() -> None:
    model = network()
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():  # every unit measures the brightness, against another threshold
        first.weight.copy_(torch.full_like(first.weight, 1 / 144))
        assert first.bias is not None
        first.bias.copy_(-torch.linspace(0, 1, len(first.bias)))
    reply = guarded(defense="gaussian:10")(asked(dict(model.state_dict())), context(), train)
    assert reply.has_error()
    assert "64 of 64 units of layer '1' are copies of others" in str(reply.error.reason)


def test_a_loss_that_does_not_fall_is_refused_after_enough_rounds(
    monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    monkeypatch.setattr(Guard, "identified", lambda *_: Outcome(0, 59))
    mod, here = guarded(), context()
    replies = [mod(asked(), here, train) for _ in range(2 * PATIENCE)]
    assert not any(reply.has_error() for reply in replies[:-1])
    said = "the loss of the models that were received does not fall"
    assert str(replies[-1].error.reason) == f"withheld: {said}"  # no figure leaves the client
    assert f"{said}: 2." in log.text


def test_a_loss_that_stands_after_a_training_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Guard, "identified", lambda *_: Outcome(0, 59))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(OTHERS.images), OTHERS.labels).backward()
        optimizer.step()
    mod, here, weights = guarded(canaries=Batch(*OTHERS_TWICE)), context(), model.state_dict()
    replies = [mod(asked(dict(weights)), here, train) for _ in range(2 * PATIENCE)]
    assert not any(reply.has_error() for reply in replies)
