"""Every distance of the package against its formula, written out victim by victim.

Distances are found by introspection: a new one fails here until its formula stands in `FORMULAS`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks.dense_matching import MatchedFeatures
from gradveil.attacks.distances import (
    L1,
    L2,
    Angle,
    Cosine,
    Distance,
    FreeL1,
    Likelihood,
    cosine,
    l2,
    sum_rounds,
)
from gradveil.attacks.features import FeatureCosine
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Gradients, Knowledge, Observation
from gradveil.engine.gradients import cross_entropy

MODEL = nn.Linear(1, 1)
SHAPES = {
    "conv.weight": (4, 3, 3, 3),
    "conv.bias": (4,),
    "head.weight": (5, 7),
    "scale": (),
    "wide.weight": (150, 200),  # large enough for the engine's other way of summing
}
SCALE = 0.3
NOISE = ("gaussian", "laplacian")
LOOKING = FeatureCosine, MatchedFeatures


def gradients(
    seed: int, victims: int = 3, shapes: dict[str, tuple[int, ...]] | None = None
) -> Gradients:
    rng = generator(seed)
    return {
        name: torch.randn(victims, *shape, generator=rng, dtype=torch.double)
        for name, shape in (shapes or SHAPES).items()
    }


def few(seed: int) -> Gradients:
    return gradients(seed, 2, {"body.weight": (4, 3), "head.weight": (5,)})


def observe(known: Knowledge, shared: Gradients) -> list[Observation]:
    victims = len(next(iter(shared.values())))
    rows = [{name: value[victim] for name, value in shared.items()} for victim in range(victims)]
    return [
        Observation(MODEL, cross_entropy, row, (1, 1, 1), 1, 2, knowledge=known) for row in rows
    ]


Part = tuple[float, Tensor, Tensor]
"""The factor, the found and the observed gradient of one parameter."""


def inner(parts: Sequence[Part]) -> tuple[Tensor, Tensor, Tensor]:
    """<g', g>, <g', g'> and <g, g>."""
    dot = torch.stack([w * (f @ t) for w, f, t in parts]).sum()
    found = torch.stack([w * (f @ f) for w, f, _ in parts]).sum()
    return dot, found, torch.stack([w * (t @ t) for w, _, t in parts]).sum()


def cosine_formula(parts: Sequence[Part]) -> Tensor:
    dot, found, target = inner(parts)
    return 1 - dot / (found * target).sqrt()


def angle_formula(parts: Sequence[Part]) -> Tensor:
    return inner(parts)[2] * cosine_formula(parts)


def l2_formula(parts: Sequence[Part]) -> Tensor:
    return torch.stack([w * (f - t).square().sum() for w, f, t in parts]).sum()


def l1_formula(parts: Sequence[Part]) -> Tensor:
    return torch.stack([w * (f - t).abs().sum() for w, f, t in parts]).sum()


def free_l1_formula(parts: Sequence[Part]) -> Tensor:
    found = torch.cat([f for w, f, _ in parts if w > 0])
    target = torch.cat([t for w, _, t in parts if w > 0])
    length = (found @ target).abs() / (found @ found)
    return l1_formula([(w, f * length, t) for w, f, t in parts])


FORMULAS: dict[type[Distance], Callable[[Sequence[Part]], Tensor]] = {
    Cosine: cosine_formula,
    Angle: angle_formula,
    L2: l2_formula,
    L1: l1_formula,
    FreeL1: free_l1_formula,
}
LIKELIHOODS: dict[tuple[bool, str], tuple[type[Distance], float]] = {
    (False, "gaussian"): (L2, 2 * SCALE**2),
    (False, "laplacian"): (L1, SCALE),
    (True, "gaussian"): (Angle, SCALE**2),
    (True, "laplacian"): (FreeL1, SCALE),
}
"""By `free` and the kind of noise: the formula, and the divisor of its weights."""


def every_distance() -> Iterator[Distance]:
    """Every concrete distance of the package, with each of its yes-or-no settings both ways.

    Those in `LOOKING` look at images too, and have tests of their own.
    """
    kinds: list[type[Distance]] = []
    left = Distance.__subclasses__()
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        ours = kind.__module__.startswith("gradveil.") and kind not in LOOKING
        if ours and not inspect.isabstract(kind):
            kinds.append(kind)
    common = {setting.name for setting in fields(Distance)}
    for kind in sorted(set(kinds), key=lambda kind: kind.__name__):
        free = [s.name for s in fields(kind) if s.name not in common and s.type in (bool, "bool")]
        for values in product((False, True), repeat=len(free)):
            yield kind(**dict(zip(free, values, strict=True)))  # type: ignore[arg-type]


CASES = [
    (distance, kind)
    for distance in every_distance()
    for kind in (NOISE if "noise" in distance.needs else NOISE[:1])
]
"""With the kind of noise, for those that depend on it."""
IDS = [f"{type(distance).__name__}-{number}" for number, (distance, _) in enumerate(CASES)]


def formula(
    distance: Distance, kind: str, found: Gradients, target: Gradients, victim: int
) -> Tensor:
    factors = {"head.weight": 0.25, "conv.bias": 0.0} if distance.weights else {}
    simple, divisor = (
        LIKELIHOODS[distance.free, kind]
        if isinstance(distance, Likelihood)
        else (type(distance), 1.0)
    )
    parts = []
    for name in SHAPES:
        f, t = found[name][victim].flatten(), target[name][victim].flatten()
        if distance.nonzero:
            f = f * (t != 0)
        parts.append((factors.get(name, 1.0) / divisor, f, t))
    return FORMULAS[simple](parts)


@pytest.mark.parametrize(("distance", "kind"), CASES, ids=IDS)
@pytest.mark.parametrize("weights", [(), (("head.*", 0.25), ("*.bias", 0.0))])
@pytest.mark.parametrize("nonzero", [False, True])
def test_a_distance_and_its_slope_are_the_formulas(
    distance: Distance, kind: str, weights: tuple[tuple[str, float], ...], nonzero: bool
) -> None:
    distance = replace(distance, weights=weights, nonzero=nonzero)
    found, target = gradients(0), gradients(1)
    target["conv.weight"][:, 1] = 0
    found = {name: part.requires_grad_() for name, part in found.items()}
    values = distance.bind(observe(Knowledge(pruned=True, noise=(kind, SCALE)), target))(found)
    expected = torch.stack([formula(distance, kind, found, target, victim) for victim in range(3)])
    torch.testing.assert_close(values, expected)
    mix = torch.tensor([1.0, -2.0, 0.5]).double()
    slopes = [
        torch.autograd.grad(
            (v * mix).sum(), list(found.values()), allow_unused=True, materialize_grads=True
        )
        for v in (values, expected)
    ]
    for got, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("distance", "kind"), CASES, ids=IDS)
def test_equal_gradients_are_at_no_distance_and_others_are(distance: Distance, kind: str) -> None:
    target, other = gradients(0), gradients(1)
    measure = distance.bind(observe(Knowledge(noise=(kind, SCALE)), target))
    scale = measure(other)
    assert bool((scale > 0).all())
    torch.testing.assert_close(measure(target) / scale, torch.zeros(3).double())


@pytest.mark.parametrize(("distance", "kind"), CASES, ids=IDS)
def test_each_restart_is_measured_against_its_victim(distance: Distance, kind: str) -> None:
    target, found = gradients(0, 2), gradients(1, 2)
    seen = observe(Knowledge(noise=(kind, SCALE)), target)
    twice = {name: part.repeat_interleave(2, 0) for name, part in found.items()}
    torch.testing.assert_close(
        distance.bind(seen, restarts=2)(twice), distance.bind(seen)(found).repeat_interleave(2, 0)
    )


def test_cosine_does_not_see_the_length_of_a_gradient() -> None:
    found, seen = gradients(0), observe(Knowledge(), gradients(1))
    longer = {name: 7 * part for name, part in found.items()}
    torch.testing.assert_close(cosine.bind(seen)(longer), cosine.bind(seen)(found))


def test_weights_that_leave_nothing_are_refused() -> None:
    with pytest.raises(GradveilError, match="no parameter to match"):
        Cosine(weights=(("*", 0.0),)).bind(observe(Knowledge(), gradients(0)))


@pytest.mark.parametrize(
    ("kind", "density"),
    [
        ("gaussian", torch.distributions.Normal(0.0, SCALE)),
        ("laplacian", torch.distributions.Laplace(0.0, SCALE)),
    ],
)
def test_a_likelihood_is_minus_the_log_density_of_the_noise(
    kind: str, density: torch.distributions.Distribution
) -> None:
    found, observed = few(1), few(2)
    measure = Likelihood().bind(observe(Knowledge(noise=(kind, SCALE)), observed))

    def surprise(difference: Tensor) -> Tensor:
        return -(density.log_prob(difference) - density.log_prob(torch.zeros(1))).flatten(1).sum(1)

    expected = sum((surprise(found[name] - observed[name]) for name in found), torch.zeros(2))
    torch.testing.assert_close(measure(found), expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "power"), [("gaussian", 2), ("laplacian", 1)])
def test_a_likelihood_that_leaves_the_length_free_sees_no_length_and_agrees_near_a_match(
    kind: str, power: int
) -> None:
    observed, off = few(2), few(5)
    near = {name: value + 1e-4 * off[name] for name, value in observed.items()}
    measure = Likelihood(free=True).bind(observe(Knowledge(noise=(kind, SCALE)), observed))
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
    expected = (left.pow(power) / (2 * SCALE**2 if power == 2 else SCALE)).sum(1)
    torch.testing.assert_close(measure(near), expected, rtol=1e-3, atol=0)
    opposite = {name: -value for name, value in near.items()}
    assert bool((measure(opposite) > 1e3 * measure(near)).all())


def test_a_likelihood_counts_layers_as_asked() -> None:
    found, observed = few(1), few(2)
    known = Knowledge(noise=("gaussian", 0.5), random_layers=("head.*",))
    distance = Likelihood(weights=(("body.*", 3.0),), leave_out="random")
    torch.testing.assert_close(
        distance.bind(observe(known, observed))(found),
        6 * (found["body.weight"] - observed["body.weight"]).square().flatten(1).sum(1),
    )
    with pytest.raises(GradveilError, match=r"noise of scale 0\.0"):
        Likelihood().bind(observe(Knowledge(noise=("gaussian", 0.0)), observed))


@pytest.mark.parametrize("kind", ["random", "defended"])
def test_layers_known_to_mislead_are_left_out(kind: Literal["random", "defended"]) -> None:
    found, observed = few(1), few(2)
    known = (
        Knowledge(random_layers=("head.*",))
        if kind == "random"
        else Knowledge(defended_layers=("head.weight",))
    )
    measure = replace(cosine, leave_out=kind).bind(observe(known, observed))
    ours, theirs = (part["body.weight"].flatten(1) for part in (found, observed))
    torch.testing.assert_close(measure(found), 1 - torch.cosine_similarity(ours, theirs))
    everything = Knowledge(random_layers=("*",), defended_layers=("*",))
    with pytest.raises(
        GradveilError,
        match=f"^every layer with a gradient is {kind}: .* leave no parameter to match$",
    ):
        replace(cosine, leave_out=kind).bind(observe(everything, observed))


def test_layers_that_are_random_and_those_that_are_defended_can_be_left_out_together() -> None:
    found, observed = few(1), few(2)
    found["third"] = observed["third"] = torch.ones(2, 2, dtype=torch.double)
    seen = observe(Knowledge(random_layers=("head.*",), defended_layers=("body.weight",)), observed)
    both = replace(l2, leave_out="both")
    assert both.needs == ("random_layers", "defended_layers")
    assert float(both.bind(seen)(found).max()) == 0
    for kind in ("random", "defended"):
        assert float(replace(l2, leave_out=kind).bind(seen)(found).min()) > 0.1


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_the_total_of_rounds_contains_the_gradient_as_often_as_stated(
    momentum: float | None,
) -> None:
    """Entries are cut off at random here, so that each has a history of its own."""
    gradient, rng, m = few(3), generator(4), momentum or 0.0
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
    for number, victim in enumerate(observe(Knowledge(momentum=momentum), shared[-1])):
        earlier = tuple(
            {name: value[number] for name, value in round_.items()} for round_ in shared[:-1]
        )
        victims.append(replace(victim, knowledge=replace(victim.knowledge, earlier=earlier)))
    total, times = sum_rounds(victims)
    for name, value in gradient.items():
        torch.testing.assert_close(total[name], times[name] * value)
        never = torch.stack([round_[name] == 0 for round_ in shared]).all(0)
        assert torch.equal(times[name] == 0, never)
        assert bool(never.any()) and bool((times[name] > 1).any())
    assert float(L2(rounds=True).bind(victims)(gradient).max()) < 1e-20
    assert float(l2.bind(victims)(gradient).min()) > 0.1
