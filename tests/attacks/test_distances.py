"""Distances against their formulas, written out victim by victim."""

import pytest
import torch
from torch import Tensor

from gradveil.attacks.distances import L1, L2, Cosine, Distance, LayerCosine
from gradveil.core.errors import GradveilError
from gradveil.core.types import Gradients

SHAPES = {
    "conv.weight": (4, 3, 3, 3),
    "conv.bias": (4,),
    "head.weight": (5, 7),
    "scale": (),
    "wide.weight": (150, 200),
}  # one is large


def gradients(seed: int, victims: int = 3) -> Gradients:
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(victims, *shape, generator=rng, dtype=torch.double)
        for name, shape in SHAPES.items()
    }


def plain(distance: Distance, found: Gradients, target: Gradients, victim: int) -> Tensor:
    factors = {"head.weight": 0.25, "conv.bias": 0.0} if distance.weights else {}
    parts = []
    for name in SHAPES:
        f, t = found[name][victim].flatten(), target[name][victim].flatten()
        if distance.nonzero:
            f = f * (t != 0)
        parts.append((factors.get(name, 1.0), f, t))
    match distance:
        case Cosine():
            dot = sum(w * (f @ t) for w, f, t in parts)
            return torch.as_tensor(
                1
                - dot
                / (sum(w * (f @ f) for w, f, _ in parts) * sum(w * (t @ t) for w, _, t in parts))
                ** 0.5
            )
        case LayerCosine():
            each = [w * (1 - (f @ t) / (f.norm() * t.norm())) for w, f, t in parts]
            return torch.as_tensor(sum(each) / sum(w for w, _, _ in parts))
        case L2():
            return torch.as_tensor(sum(w * (f - t).square().sum() for w, f, t in parts))
        case _:
            return torch.as_tensor(sum(w * (f - t).abs().sum() for w, f, t in parts))


@pytest.mark.parametrize("kind", [Cosine, LayerCosine, L1, L2])
@pytest.mark.parametrize("weights", [(), (("head.*", 0.25), ("*.bias", 0.0))])
@pytest.mark.parametrize("nonzero", [False, True])
def test_a_distance_and_its_slope_are_the_formulas(
    kind: type[Distance], weights: tuple[tuple[str, float], ...], nonzero: bool
) -> None:
    distance = kind(weights=weights, nonzero=nonzero)
    found, target = gradients(0), gradients(1)
    target["conv.weight"][:, 1] = 0
    found = {name: part.requires_grad_() for name, part in found.items()}
    values = distance.against(target)(found)
    expected = torch.stack([plain(distance, found, target, victim) for victim in range(3)])
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


@pytest.mark.parametrize("kind", [Cosine, LayerCosine, L1, L2])
def test_equal_gradients_are_at_no_distance(kind: type[Distance]) -> None:
    target = gradients(0)
    torch.testing.assert_close(kind().against(target)(target), torch.zeros(3).double())


def test_cosine_does_not_see_the_length_of_a_gradient() -> None:
    found, target = gradients(0), gradients(1)
    longer = {name: 7 * part for name, part in found.items()}
    torch.testing.assert_close(Cosine().against(target)(longer), Cosine().against(target)(found))


def test_weights_that_leave_nothing_are_refused() -> None:
    with pytest.raises(GradveilError, match="no parameter to match"):
        Cosine(weights=(("*", 0.0),)).against(gradients(0))
