"""Image scores against scikit-image and numpy, and what must hold for any images."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import skimage.metrics
import torch
from torch import Tensor

from gradveil import scores
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator

oracle: Any = skimage.metrics
Score = Callable[[Tensor, Tensor], Tensor]
SHAPES = [(3, 32, 32), (1, 28, 28), (3, 64, 64), (1, 11, 17), (4, 12, 12)]
SMALL = (3, 8, 8)
ALL: list[Score] = [scores.mse, scores.psnr, scores.ssim, scores.psnr_affine]


def images(shape: tuple[int, int, int], count: int = 4, name: str = "truth") -> Tensor:
    return torch.rand(count, *shape, generator=generator(0, name), dtype=torch.float64)


def pairs(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Truth with noise of growing strength, the last row unrelated."""
    truth, other = images(shape), images(shape, name="other")
    share = torch.tensor([0.02, 0.2, 0.6, 1.0], dtype=torch.float64).view(-1, 1, 1, 1)
    return truth + share * (other - truth), truth


@pytest.mark.parametrize("shape", SHAPES)
def test_mse_and_psnr_equal_scikit_image(shape: tuple[int, int, int]) -> None:
    found, truth = pairs(shape)
    both = list(zip(found.numpy(), truth.numpy(), strict=True))
    np.testing.assert_allclose(
        scores.mse(found, truth).numpy(),
        [oracle.mean_squared_error(t, f) for f, t in both],
        rtol=1e-12,
    )
    np.testing.assert_allclose(
        scores.psnr(found, truth).numpy(),
        [oracle.peak_signal_noise_ratio(t, f, data_range=1) for f, t in both],
        rtol=1e-12,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_ssim_equals_scikit_image(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    found, truth = (x.to(dtype) for x in pairs(shape))
    settings = {
        "gaussian_weights": True,
        "sigma": 1.5,
        "use_sample_covariance": False,
        "data_range": 1,
        "channel_axis": 0,
    }
    expected = [
        oracle.structural_similarity(t, f, **settings)
        for f, t in zip(found.double().numpy(), truth.double().numpy(), strict=True)
    ]
    np.testing.assert_allclose(scores.ssim(found, truth).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "width"), [((1, 10, 10), 9), ((2, 9, 20), 9), ((1, 4, 4), 3), ((3, 1, 1), 1)]
)
def test_ssim_of_small_images_uses_the_largest_odd_window_that_fits(
    shape: tuple[int, int, int], width: int
) -> None:
    found, truth = pairs(shape)
    place = np.arange(width) - width // 2
    kernel = np.exp(-(place**2) / (2 * 1.5**2))
    kernel = np.outer(kernel, kernel) / kernel.sum() ** 2
    expected = []
    for f, t in zip(found.numpy(), truth.numpy(), strict=True):
        values = []
        for c in range(shape[0]):
            for row in range(shape[1] - width + 1):
                for column in range(shape[2] - width + 1):
                    x, y = (
                        plane[c, row : row + width, column : column + width] for plane in (f, t)
                    )
                    mx, my = (kernel * x).sum(), (kernel * y).sum()
                    vx, vy, cov = (
                        (kernel * (x - mx) ** 2).sum(),
                        (kernel * (y - my) ** 2).sum(),
                        (kernel * (x - mx) * (y - my)).sum(),
                    )
                    values.append(
                        (2 * mx * my + 1e-4)
                        * (2 * cov + 9e-4)
                        / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
                    )
        expected.append(np.mean(values))
    np.testing.assert_allclose(scores.ssim(found, truth).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_psnr_affine_equals_least_squares_image_by_image(shape: tuple[int, int, int]) -> None:
    found, truth = pairs(shape)
    expected = []
    for f, t in zip(found.numpy(), truth.numpy(), strict=True):
        design = np.concatenate([f.reshape(shape[0], -1), np.ones((1, f[0].size))]).T
        target = t.reshape(shape[0], -1).T
        solution = np.linalg.lstsq(design, target, rcond=None)[0]
        expected.append(-10 * np.log10(np.mean((design @ solution - target) ** 2)))
    np.testing.assert_allclose(scores.psnr_affine(found, truth).numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_psnr_affine_sees_through_any_mix_of_the_colors(dtype: torch.dtype) -> None:
    truth = images((3, 16, 16)).to(dtype)
    mix = torch.tensor([[0.2, 0.5, 0.1], [0.4, -0.3, 0.2], [0.0, 0.1, 0.6]], dtype=dtype)
    found = torch.einsum("dc,nchw->ndhw", mix, truth) + 0.1
    assert (scores.psnr_affine(found, truth) > 100).all() and (scores.psnr(found, truth) < 15).all()


@pytest.mark.parametrize(
    "kind", ["constant", "gray in color", "two colors", "tiny contrast", "unrelated"]
)
def test_psnr_affine_is_never_below_the_best_single_color(kind: str) -> None:
    truth = images((3, 16, 16)).float()
    plane = images((1, 16, 16), name="plane").float()
    found = {
        "constant": torch.full_like(truth, 0.3),
        "gray in color": plane.expand_as(truth),
        "two colors": (plane > 0.5).float() * torch.tensor([0.1, 0.9, 0.4]).view(1, 3, 1, 1),
        "tiny contrast": 0.5 + 1e-7 * plane.expand_as(truth),
        "unrelated": images((3, 16, 16), name="unrelated").float(),
    }[kind]
    best = scores.psnr(truth.double().mean(dim=(2, 3), keepdim=True).expand(truth.shape), truth)
    assert (scores.psnr_affine(found, truth) >= best - 1e-9).all()


def test_equal_images_score_the_best() -> None:
    truth = images((3, 16, 16))
    assert (scores.mse(truth, truth) == 0).all() and scores.psnr(truth, truth).isposinf().all()
    torch.testing.assert_close(scores.ssim(truth, truth), torch.ones(4, dtype=torch.float64))
    assert (scores.psnr_affine(truth, truth) > 200).all()


def test_mse_and_ssim_are_symmetric() -> None:
    found, truth = pairs((3, 16, 16))
    for score in (scores.mse, scores.ssim):
        torch.testing.assert_close(score(found, truth), score(truth, found))


@pytest.mark.parametrize("score", ALL)
def test_a_batch_scores_as_its_images_one_by_one(score: Score) -> None:
    found, truth = (x.float() for x in pairs((3, 20, 20)))
    alone = torch.cat([score(f[None], t[None]) for f, t in zip(found, truth, strict=True)])
    assert alone.shape == (4,) and alone.dtype == torch.float64
    torch.testing.assert_close(score(found, truth), alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e200])
@pytest.mark.parametrize("score", [scores.psnr, scores.ssim, scores.psnr_affine])
def test_a_broken_reconstruction_never_beats_a_blind_one_and_spoils_no_other(
    score: Score, bad: float
) -> None:
    found, truth = pairs((3, 16, 16))
    clean = score(found, truth)
    found[1, 0, 3, 3] = bad
    broken = score(found, truth)
    assert not broken[1] > score(torch.full_like(truth, 0.5), truth)[1]
    torch.testing.assert_close(broken[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_error_of_a_broken_reconstruction_is_not_finite(bad: float) -> None:
    truth = images((1, 4, 4))
    assert not scores.mse(torch.full_like(truth, bad), truth).isfinite().any()


@pytest.mark.parametrize("score", ALL)
def test_images_of_the_wrong_kind_are_refused(score: Score) -> None:
    truth = images((3, 16, 16))
    with pytest.raises(
        GradveilError, match=r"found has shape \(4, 3, 16, 16\) and truth \(2, 3, 16, 16\)"
    ):
        score(truth, truth[:2])
    with pytest.raises(
        GradveilError, match=r"found is uint8 of shape .*expected floats in \[0, 1\]"
    ):
        score((truth * 255).byte(), truth)
    with pytest.raises(GradveilError, match=r"truth is float64 of shape \(3, 16, 16\)"):
        score(truth, truth[0])


def test_over_blind_subtracts_the_best_guess_of_each_image() -> None:
    truth, found, guesses = images(SMALL, 3), images(SMALL, 3, "found"), images(SMALL, 5, "guesses")
    expected = [
        scores.psnr(found, truth)[i]
        - max(scores.psnr(g[None], truth[i : i + 1])[0] for g in guesses)
        for i in range(3)
    ]
    torch.testing.assert_close(scores.over_blind(found, truth, guesses), torch.stack(expected))


def test_guesses_for_each_image_equal_the_same_guesses_for_all() -> None:
    truth, found, guesses = images(SMALL, 3), images(SMALL, 3, "found"), images(SMALL, 5, "guesses")
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
        images(SMALL, 3),
        torch.full((1, 3, 8, 8), 0.5, dtype=torch.float64),
        images(SMALL, 4, "more"),
    )
    found = guess.expand_as(truth)
    assert (scores.over_blind(found, truth, guess) == 0).all()
    assert (scores.over_blind(found, truth, torch.cat([guess, more])) <= 0).all()


def test_exact_and_broken_reconstructions_have_a_defined_score_over_blind() -> None:
    truth = torch.full((4, 3, 8, 8), 0.5)
    found = truth.clone()
    found[1, 0, 0, 0], found[2, 0, 0, 0], found[3, 0, 0, 0] = 0.4, torch.nan, torch.inf
    result = scores.over_blind(found, truth, truth[:1])
    assert (
        result[0] == 0 and result[1] == -torch.inf and result[2].isnan() and result[3] == -torch.inf
    )


def test_guesses_of_another_shape_are_refused() -> None:
    truth = images(SMALL, 3)
    for guesses in (
        images(SMALL, 2)[:, :1],
        images(SMALL, 2)[0],
        images(SMALL, 2).expand(2, -1, -1, -1, -1),
        images(SMALL, 0),
    ):
        with pytest.raises(
            GradveilError, match=r"guesses has shape .*expected \(guesses, 3, 8, 8\)"
        ):
            scores.over_blind(truth, truth, guesses)
