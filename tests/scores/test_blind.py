"""Decibels above blind guesses."""

import pytest
import torch
from torch import Tensor

from gradveil import scores
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator


def images(count: int = 3, name: str = "truth") -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=generator(0, name), dtype=torch.float64)


def test_over_blind_subtracts_the_best_guess_of_each_image() -> None:
    truth, found, guesses = images(), images(name="found"), images(5, "guesses")
    expected = [
        scores.psnr(found, truth)[i]
        - max(scores.psnr(g[None], truth[i : i + 1])[0] for g in guesses)
        for i in range(3)
    ]
    torch.testing.assert_close(scores.over_blind(found, truth, guesses), torch.stack(expected))


def test_guesses_for_each_image_equal_the_same_guesses_for_all() -> None:
    truth, found, guesses = images(), images(name="found"), images(5, "guesses")
    shared = scores.over_blind(found, truth, guesses)
    torch.testing.assert_close(
        scores.over_blind(found, truth, guesses.expand(3, -1, -1, -1, -1)), shared
    )
    own = torch.stack([guesses, guesses.flip(0), truth.mean(0).expand_as(guesses)])
    assert scores.over_blind(found, truth, own)[:2].equal(shared[:2]) and not torch.isclose(
        scores.over_blind(found, truth, own)[2], shared[2]
    )


def test_a_guess_is_not_over_itself_and_more_guesses_never_help() -> None:
    truth, guess, more = (
        images(),
        torch.full((1, 3, 8, 8), 0.5, dtype=torch.float64),
        images(4, "more"),
    )
    found = guess.expand_as(truth)
    assert (scores.over_blind(found, truth, guess) == 0).all()
    assert (scores.over_blind(found, truth, torch.cat([guess, more])) <= 0).all()


def test_exact_and_broken_reconstructions_have_defined_scores() -> None:
    truth = torch.full((4, 3, 8, 8), 0.5)
    found = truth.clone()
    found[1, 0, 0, 0], found[2, 0, 0, 0], found[3, 0, 0, 0] = 0.4, torch.nan, torch.inf
    result = scores.over_blind(found, truth, truth[:1])
    assert (
        result[0] == 0 and result[1] == -torch.inf and result[2].isnan() and result[3] == -torch.inf
    )


def test_guesses_of_another_shape_are_refused() -> None:
    truth = images()
    for guesses in (images(2)[:, :1], images(2)[0], images(2).expand(2, -1, -1, -1, -1), images(0)):
        with pytest.raises(
            GradveilError, match=r"guesses has shape .*expected \(guesses, 3, 8, 8\)"
        ):
            scores.over_blind(truth, truth, guesses)
