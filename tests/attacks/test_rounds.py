"""Rounds that are added up only where the model of them is true."""

from dataclasses import replace

import pytest

import toys
from gradveil.attacks import masked_rounds
from gradveil.attacks.distances import sum_rounds
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Observation
from gradveil.defenses import parse

MODEL, BATCH = toys.lenet(1), toys.batch(1, 1)


def seen(defense: str, told: bool = True, rounds: int = 4) -> Observation:
    ((one, _),) = Client(MODEL, defense=parse(defense)).share_batches(
        [BATCH], generator(1), tell_defense=told, rounds=rounds
    )
    return one


def strays(one: Observation, before: str = "none") -> float:
    """How far the total is from the gradients it should hold; 0 where the model is true."""
    total, times = sum_rounds([one])
    clean = seen(before, rounds=1).gradients
    differences = [float((total[name] - times[name] * clean[name]).abs().max()) for name in total]
    return max(differences) / max(float(value.abs().max()) for value in clean.values())


@pytest.mark.parametrize(
    ("before", "pruning", "after"),
    [
        ("none", "prune-feedback:0.9", "none"),
        ("none", "prune-feedback:0.9,momentum=0", "none"),
        ("clip:0.1", "prune-feedback:0.9", "none"),
        ("prune:0.5", "prune-feedback:0.9", "none"),
        ("none", "prune-feedback:0.9", "gaussian:0"),
        ("none", "prune-feedback:0.9", "soteria:0.5"),
    ],
)
def test_rounds_are_told_where_their_total_holds_the_gradient_as_often_as_stated(
    before: str, pruning: str, after: str
) -> None:
    one = seen(",then,".join(part for part in (before, pruning, after) if part != "none"))
    assert one.knowledge.earlier is not None and one.knowledge.momentum is not None
    assert strays(one, before) < 1e-9


@pytest.mark.parametrize(
    "after",
    [
        "clip:0.1",
        "gaussian:1e-2",
        "laplacian:1e-2",
        "prune:0.95",
        "prune-feedback:0.95",
        "clip:1,then,prune-feedback:0.9",
    ],
)
def test_rounds_that_something_changes_after_the_pruning_are_not_told_as_such(after: str) -> None:
    defense = f"prune-feedback:0.9,then,{after}"
    plain = seen(defense, told=False)
    assert strays(replace(plain, knowledge=replace(plain.knowledge, momentum=0.9))) > 0.01, (
        "the model would be false"
    )
    one = seen(defense)
    assert one.knowledge.earlier is None and one.knowledge.momentum is None
    with pytest.raises(GradveilError, match="needs to know the earlier"):
        masked_rounds(one, 0)
