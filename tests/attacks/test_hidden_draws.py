"""All that an attack draws comes from its generator, also where the model draws.

Torch's global generator is neither read nor changed.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import toys
from gradveil.attacks import Attack, GradientMatching, find, lbfgs, optimizers
from gradveil.attacks.hidden_draws import FreshDraws
from gradveil.attacks.matching import Problem
from gradveil.attacks.policy_views import ExpectedTransform
from gradveil.attacks.priors import LabelTerm, Prior, TotalVariation
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation, Protocol, Reconstruction

COUNT = 2
PROTOCOLS = {"one step": Protocol(), "two steps": Protocol(local_steps=2, local_lr=0.01)}


def seen(name: str, defense: str, protocol: Protocol = PROTOCOLS["one step"]) -> list[Observation]:
    model = toys.built(name, 1, 12, mean=(0.2,), std=(0.4,)).float()
    batch = toys.fashion(COUNT, dtype=torch.float32)
    return toys.observe_each(model, batch, defense, seed=1, protocol=protocol)


def short(name: str, **changes: Any) -> GradientMatching:
    attack = find(name)
    assert isinstance(attack, GradientMatching)
    return replace(attack, **{"steps": 2, "frames": 0, "restarts": 1, **changes})


def at(
    state: int, attack: Attack, victims: Sequence[Observation], seed: int = 5
) -> list[Reconstruction]:
    """With torch's own generator in this state, which must stay as it is."""
    with torch.random.fork_rng([]):
        torch.manual_seed(state)
        before = torch.random.get_rng_state()
        found = attack(victims, generator(seed))
        assert torch.equal(torch.random.get_rng_state(), before)
    return found


def same(ours: Sequence[Reconstruction], theirs: Sequence[Reconstruction]) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return all(
        torch.equal(one.images, other.images) and one.distance == other.distance
        for one, other in pairs
    )


COSINE, L1 = short("adam-cosine"), short("adam-l1")
LABELS = short("adam-l2", prior=LabelTerm(1e-3))


@pytest.mark.parametrize(
    ("attack", "defense", "protocol"),
    [  # every two of a kind meet
        (COSINE, "precode:k=8", "one step"),
        (COSINE, "dropout:0.3", "two steps"),
        (COSINE, "precode:k=8,then,dropout:0.3", "one step"),
        (L1, "precode:k=8", "two steps"),
        (L1, "dropout:0.3", "one step"),
        (L1, "precode:k=8,then,dropout:0.3", "two steps"),
        (LABELS, "precode:k=8", "one step"),
        (LABELS, "dropout:0.3", "two steps"),
        (LABELS, "precode:k=8,then,dropout:0.3", "two steps"),
    ],
)
def test_the_same_generator_finds_the_same_whatever_state_torch_is_in(
    attack: Attack, defense: str, protocol: str
) -> None:
    victims = seen("lenet", defense, PROTOCOLS[protocol])
    first, again, other = (
        at(0, attack, victims),
        at(1, attack, victims),
        at(0, attack, victims, seed=6),
    )
    assert same(first, again)
    assert not same(first, other)


@pytest.mark.parametrize(
    ("name", "defense"),
    [("joint-noise", "precode:k=8,then,dropout:0.3"), ("joint-masks", "dropout:0.3")],
)
@pytest.mark.parametrize("prior", [TotalVariation(1e-4), LabelTerm(1e-3)])
def test_an_attack_that_looks_for_draws_depends_on_its_generator_alone(
    name: str, defense: str, prior: Prior
) -> None:
    victims, attack = seen("lenet", defense), short(name, prior=prior)
    assert same(at(0, attack, victims), at(1, attack, victims))


@pytest.mark.parametrize(
    ("attack", "defense"),
    [
        (short("adam-cosine", steps=4), "precode:k=8"),
        (short("adam-cosine", steps=4), "none"),
        (short("dlg", steps=2), "dropout:0.3"),
        (short("joint-noise", steps=4), "precode:k=8,then,dropout:0.3"),
    ],
)
def test_steps_that_are_replayed_read_draws_that_were_made_before_them(
    attack: Attack, defense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims, refill = seen("lenet", defense), FreshDraws.refill
    plain = attack(victims, generator(5))

    def made_before(fresh: FreshDraws, draws: dict[str, Tensor]) -> None:
        assert not (draws and toys.AsReplayed.inside), "a capture does not know the generator"
        refill(fresh, draws)

    monkeypatch.setattr(FreshDraws, "refill", made_before)
    for module in (optimizers, lbfgs):
        monkeypatch.setattr(module, "Replayed", toys.AsReplayed)
    monkeypatch.setattr(Problem, "_replayable", lambda _: True)
    assert same(plain, attack(victims, generator(5)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["adam-cosine", "dlg"])
@pytest.mark.parametrize("defense", ["none", "precode:k=8", "dropout:0.3"])
def test_a_gpu_finds_the_same_by_replayed_steps(
    name: str, defense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.built("lenet", 1, 12, mean=(0.2,), std=(0.4,)).float().cuda()
    batch = toys.fashion(COUNT, dtype=torch.float32)
    there = Batch(batch.images.cuda(), batch.labels.cuda())
    victims = toys.observe_each(model, there, defense, seed=1)
    attack = short(name, steps=12 if name == "adam-cosine" else 2)
    replayed = attack(victims, generator(5))
    monkeypatch.setattr(Problem, "_replayable", lambda _: False)
    for one, other in zip(replayed, attack(victims, generator(5)), strict=True):
        torch.testing.assert_close(one.images, other.images, rtol=0, atol=1e-3)


@pytest.mark.parametrize("defense", ["precode:k=8", "dropout:0.3"])
def test_the_distance_of_the_closed_form_comes_from_its_generator_without_a_warning(
    defense: str,
) -> None:
    victims = seen("mlp", defense)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, again, other = (
            at(0, find("closed-form"), victims),
            at(1, find("closed-form"), victims),
            at(0, find("closed-form"), victims, 6),
        )
    assert same(first, again)
    assert [one.distance for one in first] != [one.distance for one in other]
    assert all(
        torch.equal(one.images, another.images) for one, another in zip(first, other, strict=True)
    )


def test_draws_are_new_at_each_call_and_of_the_kind_that_the_module_draws() -> None:
    (one, _) = seen("lenet", "precode:k=200,then,dropout:0.3")
    fresh = FreshDraws(one, (), generator(2))
    first, second = fresh(50), fresh(50)
    assert len(first) == 2 and first.keys() == second.keys()
    for name, value in first.items():
        assert value.shape[:2] == (50, 1) and not torch.equal(value, second[name])
        normal = name.endswith("draw")
        mean, spread = (0.0, 1.0) if normal else (0.7, (0.7 * 0.3) ** 0.5)
        assert float(value.mean()) == pytest.approx(mean, abs=0.05) and float(
            value.std()
        ) == pytest.approx(spread, abs=0.05)
        assert normal or set(value.unique().tolist()) == {0.0, 1.0}
    assert not FreshDraws(one, list(first), generator(2)).shapes


def test_each_evaluation_of_a_search_draws_anew() -> None:
    for protocol in PROTOCOLS.values():
        problem = Problem.draw(
            short("adam-cosine"), seen("lenet", "precode:k=8", protocol), generator(3)
        )
        first, second = problem.distances(*problem.variables), problem.distances(*problem.variables)
        assert not torch.equal(first, second)


def test_a_model_that_draws_nothing_takes_nothing_from_the_generator() -> None:
    (one, _) = seen("lenet", "none")
    rng = generator(4)
    fresh = FreshDraws(one, (), rng)
    assert fresh(3) == {} and torch.equal(rng.get_state(), generator(4).get_state())


def test_draws_of_model_and_policy_both_come_from_the_generator() -> None:
    def jitter(images: Tensor, rng: Generator) -> Tensor:
        return images + 0.1 * torch.randn(images.shape, generator=rng)

    victims = [
        replace(one, knowledge=replace(one.knowledge, policy=jitter))
        for one in seen("lenet", "precode:k=8")
    ]
    attack = short("adam-cosine", view=ExpectedTransform(2))
    assert same(at(0, attack, victims), at(1, attack, victims))
