"""Breakers combined by name, and rounds that are added up only where the model of them is true."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks import PRESETS, GradientMatching, find, names
from gradveil.attacks.distances import Cosine, Likelihood, totals
from gradveil.attacks.hidden_draws import JointMasks
from gradveil.attacks.policy_views import KnownTransform
from gradveil.attacks.presets import INVERTING, NATS
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation
from gradveil.defenses import parse
from gradveil.models import build


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "masked+without-random-layers",
            replace(INVERTING, distance=Cosine(nonzero=True, leave_out="random")),
        ),
        (
            "without-random-layers+without-defended-layers",
            replace(INVERTING, distance=Cosine(leave_out="both")),
        ),
        (
            "transform-known+joint-masks",
            replace(INVERTING, through=KnownTransform(), joint=JointMasks()),
        ),
        (
            "masked-rounds+likelihood",
            replace(INVERTING, distance=Likelihood(free=True, rounds=True), prior=NATS),
        ),
    ],
)
def test_a_combination_is_the_standard_attack_with_what_sets_each_apart(
    name: str, expected: GradientMatching
) -> None:
    assert find(name) == PRESETS[name] == expected
    assert find("+".join(reversed(name.split("+")))) == expected
    assert name not in names()


def test_a_published_attack_can_be_given_a_breaker() -> None:
    dlg, both = find("dlg"), find("dlg+masked")
    assert isinstance(dlg, GradientMatching)
    assert both == replace(dlg, distance=replace(dlg.distance, nonzero=True))


@pytest.mark.parametrize("name", names())
def test_the_standard_attack_adds_nothing(name: str) -> None:
    if isinstance(find(name), GradientMatching) and name != "adam-cosine":
        assert find(f"adam-cosine+{name}") == find(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("masked+nope", "unknown attack 'masked+nope': choose from adam-cosine, "),
        ("masked+", "unknown attack 'masked+'"),
        ("masked+masked", "names a part twice"),
        ("masked+closed-form", "closed-form matches no gradients"),
        (
            "transform-known+transform-drawn",
            "transform-known and transform-drawn cannot be combined, each has a through of its own",
        ),
        ("joint-noise+joint-masks", "each has a joint of its own"),
        ("likelihood+adam-l2", "each has a distance of its own"),
        ("likelihood+early-step", "each has a prior of its own"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(name: str, says: str) -> None:
    with pytest.raises(GradveilError) as caught:
        find(name)
    assert says in str(caught.value) and "\n" not in str(caught.value)


MODEL = build("lenet", channels=1, size=8, classes=5).double()
BATCH = Batch(torch.rand(1, 1, 8, 8, generator=generator(0)), torch.tensor([3]))


def seen(defense: str, told: bool = True, rounds: int = 4) -> Observation:
    ((one, _),) = Client(MODEL, 5, defense=parse(defense)).share_batches(
        [BATCH], generator(1), tell_defense=told, rounds=rounds
    )
    return one


def strays(one: Observation, before: str = "none") -> float:
    """How far the total is from as many gradients as it is said to hold; 0 where the model of the rounds is true."""
    total, times = totals([one])
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
        find("masked-rounds")([one], generator(0))
