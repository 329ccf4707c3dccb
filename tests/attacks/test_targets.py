"""What gradients are measured against: densities, layers left out, and the total of several rounds."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import distances as targets
from gradveil.attacks.distances import L2, Likelihood, cosine, l2, likelihood, totals
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Gradients, Knowledge, Observation
from gradveil.engine.gradients import cross_entropy

MODEL = nn.Linear(1, 1)


def some(seed: int, victims: int = 2) -> Gradients:
    rng = generator(seed)
    shapes = {"body.weight": (4, 3), "head.weight": (5,)}
    return {
        name: torch.randn(victims, *shape, generator=rng, dtype=torch.double)
        for name, shape in shapes.items()
    }


def seen(known: Knowledge, shared: Gradients) -> list[Observation]:
    rows = [{name: value[victim] for name, value in shared.items()} for victim in range(2)]
    return [
        Observation(MODEL, cross_entropy, row, (1, 1, 1), 1, 2, knowledge=known) for row in rows
    ]


@pytest.mark.parametrize(
    ("kind", "density"),
    [
        ("gaussian", torch.distributions.Normal(0.0, 0.3)),
        ("laplacian", torch.distributions.Laplace(0.0, 0.3)),
    ],
)
def test_a_likelihood_is_minus_the_log_density_of_the_noise(
    kind: str, density: torch.distributions.Distribution
) -> None:
    found, observed = some(1), some(2)
    measure = targets.measure(likelihood, seen(Knowledge(noise=(kind, 0.3)), observed), 1)

    def surprise(difference: Tensor) -> Tensor:
        return -(density.log_prob(difference) - density.log_prob(torch.zeros(1))).flatten(1).sum(1)

    expected = sum((surprise(found[name] - observed[name]) for name in found), torch.zeros(2))
    torch.testing.assert_close(measure(found), expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "power"), [("gaussian", 2), ("laplacian", 1)])
def test_a_likelihood_that_leaves_the_length_free_sees_no_length_and_agrees_near_a_match(
    kind: str, power: int
) -> None:
    observed, off = some(2), some(5)
    near = {name: value + 1e-4 * off[name] for name, value in observed.items()}
    known = seen(Knowledge(noise=(kind, 0.3)), observed)
    measure = targets.measure(Likelihood(free=True), known, 1)
    for factor in (0.01, 7.0):
        torch.testing.assert_close(
            measure({name: factor * value for name, value in near.items()}),
            measure(near),
            rtol=1e-6,
            atol=0,
        )
    flat, whole = (
        torch.cat([part[name].flatten(1) for name in part], 1) for part in (near, observed)
    )
    best = (flat * whole).sum(1) / flat.square().sum(1)
    left = (best[:, None] * flat - whole).abs()
    expected = (left.pow(power) / (2 * 0.3**2 if power == 2 else 0.3)).sum(1)
    torch.testing.assert_close(measure(near), expected, rtol=1e-3, atol=0)
    assert bool(
        (measure({name: -value for name, value in near.items()}) > 1e3 * measure(near)).all()
    )


def test_a_likelihood_counts_layers_as_asked() -> None:
    found, observed = some(1), some(2)
    known = Knowledge(noise=("gaussian", 0.5), random_layers=("head.*",))
    measure = targets.measure(
        Likelihood(weights=(("body.*", 3.0),), leave_out="random"), seen(known, observed), 1
    )
    torch.testing.assert_close(
        measure(found),
        6 * (found["body.weight"] - observed["body.weight"]).square().flatten(1).sum(1),
    )
    with pytest.raises(GradveilError, match=r"noise of scale 0\.0"):
        targets.measure(likelihood, seen(Knowledge(noise=("gaussian", 0.0)), observed), 1)


@pytest.mark.parametrize("kind", ["random", "defended"])
def test_layers_known_to_mislead_are_left_out(kind: Literal["random", "defended"]) -> None:
    found, observed = some(1), some(2)
    known = (
        Knowledge(random_layers=("head.*",))
        if kind == "random"
        else Knowledge(defended_layers=("head.weight",))
    )
    measure = targets.measure(replace(cosine, leave_out=kind), seen(known, observed), 1)
    ours, theirs = (part["body.weight"].flatten(1) for part in (found, observed))
    torch.testing.assert_close(measure(found), 1 - torch.cosine_similarity(ours, theirs))
    everything = Knowledge(random_layers=("*",), defended_layers=("*",))
    with pytest.raises(
        GradveilError,
        match=f"^every layer with a gradient is {kind}: .* leave no parameter to match$",
    ):
        targets.measure(replace(cosine, leave_out=kind), seen(everything, observed), 1)


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_the_total_of_rounds_contains_the_gradient_as_often_as_stated(
    momentum: float | None,
) -> None:
    """Entries are cut off at random here, so that each has a history of its own."""
    gradient, rng, m = some(3), generator(4), momentum or 0.0
    speed, kept = (
        {name: torch.zeros_like(value) for name, value in gradient.items()} for _ in range(2)
    )
    shared = []
    for _ in range(7):
        speed = {name: m * speed[name] + value for name, value in gradient.items()}
        kept = {name: kept[name] + speed[name] for name in gradient}
        sent = {
            name: torch.rand(value.shape, generator=rng) < 0.2 for name, value in gradient.items()
        }
        shared.append({name: kept[name] * sent[name] for name in gradient})
        speed, kept = (
            {name: part[name] * ~sent[name] for name in gradient} for part in (speed, kept)
        )
    victims = []
    for victim, one in enumerate(seen(Knowledge(momentum=momentum), shared[-1])):
        earlier = tuple(
            {name: value[victim] for name, value in round_.items()} for round_ in shared[:-1]
        )
        victims.append(replace(one, knowledge=replace(one.knowledge, earlier=earlier)))
    total, times = totals(victims)
    for name, value in gradient.items():
        torch.testing.assert_close(total[name], times[name] * value)
        never = torch.stack([round_[name] == 0 for round_ in shared]).all(0)
        assert torch.equal(times[name] == 0, never)
        assert bool(never.any()) and bool((times[name] > 1).any())
    assert float(targets.measure(L2(rounds=True), victims, 1)(gradient).max()) < 1e-20
    assert float(targets.measure(l2, victims, 1)(gradient).min()) > 0.1


def test_layers_that_are_random_and_those_that_are_defended_can_be_left_out_together() -> None:
    found, observed = some(1), some(2)
    found["third"] = observed["third"] = torch.ones(2, 2, dtype=torch.double)
    known = Knowledge(random_layers=("head.*",), defended_layers=("body.weight",))
    both = replace(l2, leave_out="both")
    assert both.needs == ("random_layers", "defended_layers")
    assert float(targets.measure(both, seen(known, observed), 1)(found).max()) == 0
    for kind in ("random", "defended"):
        assert (
            float(
                targets.measure(replace(l2, leave_out=kind), seen(known, observed), 1)(found).min()
            )
            > 0.1
        )
