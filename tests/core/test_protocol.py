"""The protocol of a client: which images each step is made with, what adds up, bad settings."""

from typing import Any

import pytest
import torch

from gradveil.core.types import Protocol
from toys import refused


@pytest.mark.parametrize(
    ("protocol", "steps"),
    [
        (Protocol(), [[0, 1, 2, 3, 4]]),
        (Protocol(local_steps=2), [[0, 1, 2, 3, 4]] * 2),
        (Protocol(local_epochs=2), [[0, 1, 2, 3, 4]] * 2),
        (Protocol(local_batch_size=2), [[0, 1], [2, 3], [4]]),
        (Protocol(local_batch_size=2, local_epochs=2), [[0, 1], [2, 3], [4]] * 2),
        (Protocol(local_batch_size=9), [[0, 1, 2, 3, 4]]),
    ],
)
def test_the_steps_go_through_the_images_as_a_loader_that_does_not_shuffle(
    protocol: Protocol, steps: list[list[int]]
) -> None:
    found = [torch.arange(5)[part].tolist() for part in protocol.parts(5)]
    assert found == steps
    assert protocol.steps(5) == len(steps)
    assert protocol.moves(5) == (len(steps) > 1)


def test_weight_decay_moves_weights_in_a_single_step_too() -> None:
    assert Protocol(client_weight_decay=0.1).moves(1)
    assert not Protocol(client_momentum=0.9).moves(1)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_gradients_that_an_update_adds_up_to_are_those_of_torchs_sgd(momentum: float) -> None:
    """A loss with slope 1 everywhere moves the weight by the rate for each of them."""
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    for _ in range(4):
        optimizer.zero_grad()
        weight.backward()
        optimizer.step()
    protocol = Protocol(local_steps=4, client_momentum=momentum)
    assert protocol.summed(3) == pytest.approx(float(-weight.detach() / 0.1), rel=1e-12)


def test_settings_name_later_fields_only_where_they_say_something() -> None:
    old = {"local_steps": 1, "local_lr": 0.01, "train_mode": False}
    assert Protocol().settings() == old
    found = Protocol(local_batch_size=4, client_momentum=0.9).settings()
    assert found == {**old, "local_batch_size": 4, "client_momentum": 0.9}
    assert Protocol(**found) == Protocol(local_batch_size=4, client_momentum=0.9)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"local_steps": 0}, "local steps 0: there must be at least 1, and at most 100,000"),
        ({"local_epochs": 0}, "local epochs 0: there must be at least 1, and at most 100,000"),
        ({"local_batch_size": 0}, "local batch size 0: there must be at least 1 image"),
        ({"local_steps": 2, "local_epochs": 3}, "local steps 2 go over the whole batch: give"),
        ({"local_steps": 2, "local_batch_size": 3}, "local steps 2 go over the whole batch: give"),
        ({"client_momentum": 1.0}, "client momentum 1.0: it must be at least 0 and below 1"),
        ({"client_momentum": float("nan")}, "client momentum nan"),
        ({"client_weight_decay": -0.1}, "client weight decay -0.1: it must be at least 0"),
        ({"client_weight_decay": "much"}, "client weight decay 'much': expected a number"),
        ({"local_lr": 0.0}, "local learning rate 0.0: it must be above 0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(
    settings: dict[str, Any], says: str
) -> None:
    assert refused(Protocol, **settings).startswith(says)


def test_how_the_weights_move_is_put_in_words() -> None:
    assert Protocol(local_epochs=2, local_batch_size=2).in_words(5) == "6 local steps"
    assert Protocol(client_weight_decay=0.1).in_words(5) == "1 local step with weight decay 0.1"
    both = Protocol(2, client_momentum=0.9, client_weight_decay=0.1)
    assert both.in_words(5) == "2 local steps with momentum 0.9 and weight decay 0.1"
    assert Protocol(client_momentum=0.9).in_words(5) == "1 local step"  # momentum starts from zero


def test_averaged_clients_have_equal_parts_of_the_images_and_make_their_own_steps() -> None:
    protocol = Protocol(local_batch_size=2, local_epochs=2, averaged_clients=3)
    each = Protocol(local_batch_size=2, local_epochs=2)
    assert protocol.parts(9) == each.parts(3) and protocol.steps(9) == each.steps(3) == 4
    assert Protocol(averaged_clients=2).moves(2) and not Protocol(averaged_clients=1).moves(2)
    assert protocol.in_words(9) == "4 local steps of each of 3 clients, averaged"
    assert Protocol(**protocol.settings()) == protocol
    assert refused(Protocol, averaged_clients=0).startswith("averaged clients 0: there must be")
