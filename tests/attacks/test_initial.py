"""Starts: a contract for all of them, what each of them looks like in pixels, and what is refused."""

import pytest
import torch
from torch import Generator, Tensor

from gradveil.attacks.starts import Given, Initial, Normal, Patterned, Uniform, Zeros
from gradveil.core.errors import GradveilError

SHAPE = (2, 3, 9, 6)
MEAN, STD = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.5, 2.0]).view(3, 1, 1)
IMAGES = torch.rand(5, *SHAPE, generator=Generator().manual_seed(3))
INITIALS: dict[str, Initial] = {
    "normal": Normal(),
    "uniform": Uniform(),
    "zeros": Zeros(),
    "patterned": Patterned(),
    "given": Given(IMAGES[0]),
}
DRAWN = ("normal", "uniform", "patterned")


def start(
    initial: Initial, rows: int = 5, shape: tuple[int, int, int, int] = SHAPE, seed: int = 0
) -> Tensor:
    return initial(rows, shape, Generator().manual_seed(seed), (MEAN, STD))


def pixels(z: Tensor) -> Tensor:
    return z * STD + MEAN


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", INITIALS)
def test_every_start_has_the_shape_asked_for_and_the_type_of_the_frame(
    name: str, dtype: torch.dtype
) -> None:
    found = INITIALS[name](4, SHAPE, Generator().manual_seed(0), (MEAN.to(dtype), STD.to(dtype)))
    assert found.shape == (4, *SHAPE) and found.dtype == dtype and bool(found.isfinite().all())


@pytest.mark.parametrize("name", INITIALS)
def test_the_same_generator_gives_the_same_start(name: str) -> None:
    assert torch.equal(start(INITIALS[name]), start(INITIALS[name]))


@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 3, 1), (1, 3, 2, 2)])
@pytest.mark.parametrize("name", DRAWN)
def test_a_row_does_not_depend_on_how_many_follow(
    name: str, shape: tuple[int, int, int, int]
) -> None:
    frame = MEAN[: shape[1]], STD[: shape[1]]
    three, five = (
        INITIALS[name](rows, shape, Generator().manual_seed(0), frame) for rows in (3, 5)
    )
    assert torch.equal(five[:3], three)


@pytest.mark.parametrize("name", DRAWN)
def test_random_starts_differ_from_row_to_row_from_image_to_image_and_by_seed(name: str) -> None:
    found = start(INITIALS[name]).flatten(0, 1)
    assert len({float(one.sum()) for one in found}) == len(found)
    assert not torch.equal(start(INITIALS[name], seed=1), start(INITIALS[name]))


def test_normal_starts_are_standard_in_the_normalized_space() -> None:
    z = start(Normal(), rows=100)
    assert abs(float(z.mean())) < 0.02 and abs(float(z.std()) - 1) < 0.02


def test_uniform_starts_fill_the_pixel_range() -> None:
    found = pixels(start(Uniform(), rows=100))
    assert float(found.min()) > -1e-6 and float(found.max()) < 1 + 1e-6
    assert abs(float(found.mean()) - 0.5) < 0.01 and abs(float(found.var()) - 1 / 12) < 0.003


def test_zeros_are_the_mean_color() -> None:
    assert torch.equal(pixels(start(Zeros())), MEAN.expand(5, *SHAPE))


@pytest.mark.parametrize("tile", [1, 2, 4, 20])
def test_patterned_starts_repeat_a_tile_within_the_pixel_range(tile: int) -> None:
    found = pixels(start(Patterned(tile)))
    assert float(found.min()) > -1e-6 and float(found.max()) < 1 + 1e-6
    assert torch.equal(found[..., tile:, :], found[..., :-tile, :]) and torch.equal(
        found[..., tile:], found[..., :-tile]
    )
    own = found[0, 0, 0, :tile, :tile]
    assert len(own.unique()) == own.numel()


def test_given_images_are_spread_over_the_rows() -> None:
    torch.testing.assert_close(pixels(start(Given(IMAGES))), IMAGES)
    torch.testing.assert_close(pixels(start(Given(IMAGES[0]))), IMAGES[:1].expand(5, *SHAPE))
    torch.testing.assert_close(pixels(start(Given(IMAGES[0, 0]))), IMAGES[0, 0].expand(5, *SHAPE))


def test_a_start_can_be_changed_without_harm_to_the_images_given() -> None:
    before = IMAGES.clone()
    Given(IMAGES)(5, SHAPE, Generator(), (torch.zeros(3, 1, 1), torch.ones(3, 1, 1))).zero_()
    assert torch.equal(IMAGES, before)


def test_starts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        GradveilError,
        match=r"shape \(5, 2, 3, 9, 6\): expected \(3, 9, 6\), \(2, 3, 9, 6\) or \(4, 2, 3, 9, 6\)",
    ):
        start(Given(IMAGES), rows=4)
    with pytest.raises(GradveilError, match="tile 0"):
        Patterned(0)
