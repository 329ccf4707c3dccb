"""A client that checks its own update and the model it was given."""

from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toys
from flower import answer, context, question
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.types import Batch
from gradveil.federated import guard
from gradveil.federated.guards import PATIENCE, Guard, Outcome

CANARIES = Batch(toys.pictures(1200, 1, 12).float(), torch.arange(1200) % 10)
FEW = Batch(CANARIES.images[:90], CANARIES.labels[:90])
OTHERS = toys.fashion(300, 12, dtype=torch.float32)


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
    monkeypatch.setattr("gradveil.federated.guards.TIMED", 10)
    monkeypatch.setattr("gradveil.federated.guards.LEAST", 10)
    monkeypatch.setattr("gradveil.federated.guards.time.process_time", partial(next, count()))


def guarded_lenet(**more: Any) -> Any:
    model = toys.lenet(1, 12).float()
    mod = guarded(model=model, canaries=FEW, max_identified=0.3, count=20, **more)
    return mod(asked(dict(model.state_dict())), context(), train)


@pytest.mark.usefixtures("clock")
@pytest.mark.filterwarnings("ignore:canaries")
def test_by_default_a_convolutional_network_meets_a_search_that_the_seconds_allow() -> None:
    reply = guarded_lenet(seconds=10.0)
    said = str(reply.error.reason)
    assert "by adam-cosine (40 iterations, for 10 s)" in said
    assert "closed-form could not run: the first layer" in said


@pytest.mark.usefixtures("clock")
@pytest.mark.filterwarnings("ignore:canaries")
def test_a_search_that_finds_nothing_lets_the_update_go() -> None:
    assert not guarded_lenet(seconds=10.0, defense="gaussian:10").has_error()


@pytest.mark.usefixtures("clock")
@pytest.mark.filterwarnings("ignore:canaries")
def test_nothing_is_sent_where_no_attack_can_run() -> None:
    said = str(guarded_lenet(seconds=5.0).error.reason)
    assert "the check failed: closed-form could not run" in said
    assert "adam-cosine could not run: 5 s are time for 2 of its iterations" in said


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
    from gradveil.stats import upper_bound

    assert upper_bound(0, 59) <= 0.05 < upper_bound(0, 58)


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Guard, "identified", lambda *_: Outcome(0, 59))
    mod, here = guarded(), context()
    replies = [mod(asked(), here, train) for _ in range(2 * PATIENCE)]
    assert not any(reply.has_error() for reply in replies[:-1])
    assert "does not fall" in str(replies[-1].error.reason)
