"""Options that several commands share, read into values."""

from dataclasses import asdict
from inspect import signature

import pytest

from gradveil.cli.options import Local, client_optimizer, normalized_model, with_local
from gradveil.core.errors import GradveilError
from gradveil.core.types import Protocol
from gradveil.models import NormalizedName


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, (0.5, 0.0)),
        ("sgd", (0.5, 0.0)),
        ("sgd:weight-decay=5e-4", (0.5, 5e-4)),
        ("sgd:weight_decay=0.1", (0.5, 0.1)),
    ],
)
def test_a_client_optimizer_holds_momentum_and_weight_decay(
    text: str | None, found: tuple[float, float]
) -> None:
    assert client_optimizer(text, 0.5, 0.0) == found
    assert client_optimizer("sgd:momentum=0.9,weight-decay=1e-3", 0.0, 0.0) == (0.9, 1e-3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("adam", "unknown client optimizer 'adam': choose from sgd"),
        ("sgd:momentm=0.9", "unknown setting of .* 'momentm': .*did you mean momentum"),
        ("sgd:weight-decay=x", "weight-decay is 'x'; expected a number"),
        ("sgd:momentum=0.9", "--client-momentum says it too; give one"),
    ],
)
def test_a_client_optimizer_that_cannot_be_used_is_refused(text: str, says: str) -> None:
    with pytest.raises(GradveilError, match=says):
        client_optimizer(text, 0.5, 0.0)


def test_a_command_has_the_options_of_local_training_and_gets_them_as_a_value() -> None:
    found = []

    @with_local
    def command(*, first: int, local: Local, last: int = 0) -> None:
        found.append((first, local.protocol, last))

    assert [*signature(command).parameters] == ["first", *asdict(Local()), "last"]
    assert Local().protocol == Protocol()
    given = asdict(Local(local_epochs=3, train_mode=True, client_optimizer="sgd:momentum=0.9"))
    command(first=1, last=2, **given)
    assert found == [(1, Protocol(local_epochs=3, train_mode=True, client_momentum=0.9), 2)]


def test_a_model_has_its_loaders_normalization_only_where_one_is_given() -> None:
    assert normalized_model("lenet", None) == "lenet"
    wanted = NormalizedName("nets:make", (0.5,), (0.25,))
    assert normalized_model("nets:make", "0.5,0.25") == wanted
