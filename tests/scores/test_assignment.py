"""Lining reconstructions up with the images of a batch."""

from itertools import permutations

import pytest
import torch

import toys
from gradveil import scores
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    return toys.pictures(count, size=6, seed=seed)


def test_assign_recovers_a_permutation_under_noise() -> None:
    truth = pictures(16)
    order = torch.randperm(16, generator=generator(1))
    found = truth[order] + 0.2 * pictures(16, 1)
    assert found[scores.assign(found, truth)].equal(found[order.argsort()])


def test_assign_reaches_the_least_total_error_of_all_permutations() -> None:
    found, truth = pictures(5, 2), pictures(5)
    best = min(
        float(scores.mse(found[list(order)], truth).sum()) for order in permutations(range(5))
    )
    assert float(scores.mse(found[scores.assign(found, truth)], truth).sum()) == pytest.approx(
        best, rel=1e-12
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_broken_reconstructions_take_the_places_left_over(bad: float) -> None:
    truth = pictures(4)
    found = truth.flip(0).clone()
    found[1, 0, 0, 0] = bad
    assert scores.assign(found, truth).tolist() == [3, 2, 1, 0]
    assert sorted(scores.assign(torch.full_like(truth, bad), truth).tolist()) == [0, 1, 2, 3]


def test_batches_of_different_lengths_are_refused() -> None:
    with pytest.raises(
        GradveilError, match=r"found has shape \(3, 3, 6, 6\) and truth \(4, 3, 6, 6\)"
    ):
        scores.assign(pictures(3, 2), pictures(4))
