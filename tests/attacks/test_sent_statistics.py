"""The prior on running statistics that clients send: its formula, and an attack that uses it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import toys
from gradveil.attacks import GradientMatching
from gradveil.attacks.matching import Problem
from gradveil.attacks.optimizers import Adam
from gradveil.attacks.priors import SentStatistics, Sum, TotalVariation
from gradveil.attacks.starts import Given
from gradveil.core.seeds import generator
from gradveil.core.types import Observation, Protocol

PROTOCOLS = {
    "one step": Protocol(train_mode=True),
    "three steps": Protocol(local_steps=3, local_lr=0.05, train_mode=True),
}
ATTACK = GradientMatching(prior=SentStatistics(2.0), optimizer=Adam(0.05), steps=3, boxed=False)


def network(momentum: float | None = 0.1) -> nn.Module:
    def make() -> nn.Module:
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.Tanh(), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(144, 10), nn.BatchNorm1d(10, momentum=0.5))

    return toys.seeded(make).double()


def observe(model: nn.Module, protocol: Protocol, seed: int = 0) -> Observation:
    return toys.observe(model, toys.batch(4, dtype=torch.double, seed=seed), protocol=protocol)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_penalty_is_the_mismatch_of_what_two_clients_send(name: str) -> None:
    model = network()
    seen, other = (observe(model, PROTOCOLS[name], seed) for seed in (0, 1))
    there, here = other.knowledge.statistics, seen.knowledge.statistics
    assert there is not None and here is not None
    steps = PROTOCOLS[name].local_steps
    expected = 0.0
    for key, rate in (("1", 0.1), ("5", 0.5)):
        share = 1 - (1 - rate) ** steps
        for part in ("running_mean", "running_var"):
            gap = (there[f"{key}.{part}"] - here[f"{key}.{part}"]) / share
            expected += float(gap.square().mean())
    images = toys.batch(4, dtype=torch.double, seed=1).images[None]
    for victim, value in ((seen, 2 * expected), (other, 0.0)):
        attack = replace(ATTACK, start=Given(images))
        problem = Problem.draw(attack, [victim], generator(0))
        found = attack.prior(images, replace(problem.state, labels=problem.labels))
        assert float(found.detach()) == pytest.approx(value, rel=1e-9, abs=1e-20)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_slope_of_the_penalty_is_the_difference_quotient(
    name: str, momentum: float | None
) -> None:
    seen = observe(network(momentum), PROTOCOLS[name])
    problem = Problem.draw(ATTACK, [seen], generator(0))
    guess = torch.rand(1, 4, 3, 8, 8, generator=generator(1), dtype=torch.double)
    step = 1e-6 * torch.rand(guess.shape, generator=generator(2), dtype=torch.double)
    penalty = partial(ATTACK.prior, state=replace(problem.state, labels=problem.labels))
    leaf = guess.clone().requires_grad_()
    (slope,) = torch.autograd.grad(penalty(leaf).sum(), leaf)
    quotient = (penalty(guess + step) - penalty(guess - step)).sum() / 2
    assert float((slope * step).sum()) == pytest.approx(float(quotient.detach()), rel=1e-5)


def test_with_the_prior_the_statistics_of_what_is_found_are_nearer_to_those_sent() -> None:
    seen = observe(network(), PROTOCOLS["one step"])
    gaps = []
    for weight in (0.0, 10.0):
        attack = replace(ATTACK, prior=SentStatistics(weight), steps=40, boxed=True)
        problem = Problem.draw(attack, [seen], generator(0))
        (found,) = attack([seen], generator(0))
        state = replace(problem.state, labels=problem.labels)
        gaps.append(float(ATTACK.prior(found.images[None].double(), state).detach()))
    assert gaps[1] < 0.5 * gaps[0]


def test_without_statistics_the_attack_is_refused_and_says_what_it_needs() -> None:
    seen = observe(network(), Protocol())
    assert seen.knowledge.statistics is None
    message = toys.refused(ATTACK, seen, 0)
    assert "statistics (running statistics after the client's steps)" in message


def test_a_sum_needs_what_its_parts_need() -> None:
    assert Sum((TotalVariation(1.0), SentStatistics(1.0))).needs == ("statistics",)
    assert replace(ATTACK, prior=Sum((SentStatistics(1.0),))).needs == ("labels", "statistics")
