"""Starts: a contract for all of them, their looks in pixels, and what is refused."""

import pytest
import torch
from torch import Generator, Tensor

from gradveil.attacks.starts import AWAY, ClassMean, Given, Normal, Patterned, Start
from gradveil.core.errors import GradveilError
from gradveil.core.types import Knowledge, Observation
from gradveil.engine.gradients import cross_entropy
from gradveil.models import Normalize

SHAPE = (2, 3, 9, 6)
MEAN, STD = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.5, 2.0]).view(3, 1, 1)
IMAGES = torch.rand(5, *SHAPE, generator=Generator().manual_seed(3))
STARTS: dict[str, Start] = {
    "normal": Normal(),
    "patterned": Patterned(),
    "given": Given(IMAGES[0]),
    "class mean": ClassMean(),
}
DRAWN = ("normal", "patterned")
CLASSES = 4


def victims(
    count: int, shape: tuple[int, int, int, int] = SHAPE, dtype: torch.dtype = torch.float32
) -> list[Observation]:
    channels = shape[1]
    model = Normalize(
        channels, MEAN[:channels].flatten().tolist(), STD[:channels].flatten().tolist()
    )
    means = torch.rand(CLASSES, *shape[1:], generator=Generator().manual_seed(4))
    one = Observation(
        model,
        cross_entropy,
        {"weight": torch.zeros(1, dtype=dtype)},
        (shape[1], shape[2], shape[3]),
        shape[0],
        CLASSES,
        knowledge=Knowledge(means=means),
    )
    return [one] * count


def bind(
    start: Start,
    rows: int = 5,
    shape: tuple[int, int, int, int] = SHAPE,
    seed: int = 0,
    restarts: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    labels = torch.arange(rows * shape[0]).view(rows, -1) % CLASSES
    seen = victims(rows // restarts, shape, dtype)
    return start.bind(seen, Generator().manual_seed(seed), restarts, labels)


def pixels(z: Tensor) -> Tensor:
    return z * STD + MEAN


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STARTS)
def test_every_start_has_a_row_for_each_restart_and_the_type_of_the_gradients(
    name: str, dtype: torch.dtype
) -> None:
    found = bind(STARTS[name], 4, restarts=2, dtype=dtype)
    assert found.shape == (4, *SHAPE) and found.dtype == dtype and bool(found.isfinite().all())


@pytest.mark.parametrize("name", STARTS)
def test_the_same_generator_gives_the_same_start(name: str) -> None:
    assert torch.equal(bind(STARTS[name]), bind(STARTS[name]))


@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 3, 1), (1, 3, 2, 2)])
@pytest.mark.parametrize("name", DRAWN)
def test_a_row_does_not_depend_on_how_many_follow(
    name: str, shape: tuple[int, int, int, int]
) -> None:
    three, five = (bind(STARTS[name], rows, shape) for rows in (3, 5))
    assert torch.equal(five[:3], three)


@pytest.mark.parametrize("name", DRAWN)
def test_random_starts_differ_from_row_to_row_from_image_to_image_and_by_seed(name: str) -> None:
    found = bind(STARTS[name]).flatten(0, 1)
    assert len({float(image.sum()) for image in found}) == len(found)
    assert not torch.equal(bind(STARTS[name], seed=1), bind(STARTS[name]))


def test_normal_starts_are_standard_in_the_normalized_space() -> None:
    z = bind(Normal(), rows=100)
    assert abs(float(z.mean())) < 0.02 and abs(float(z.std()) - 1) < 0.02


@pytest.mark.parametrize("tile", [1, 2, 4, 20])
def test_patterned_starts_repeat_a_tile_within_the_pixel_range(tile: int) -> None:
    found = pixels(bind(Patterned(tile)))
    assert float(found.min()) > -1e-6 and float(found.max()) < 1 + 1e-6
    assert torch.equal(found[..., tile:, :], found[..., :-tile, :]) and torch.equal(
        found[..., tile:], found[..., :-tile]
    )
    first = found[0, 0, 0, :tile, :tile]
    assert len(first.unique()) == first.numel()


def test_given_images_are_spread_over_the_rows() -> None:
    torch.testing.assert_close(pixels(bind(Given(IMAGES))), IMAGES)
    torch.testing.assert_close(pixels(bind(Given(IMAGES[0]))), IMAGES[:1].expand(5, *SHAPE))
    torch.testing.assert_close(pixels(bind(Given(IMAGES[0, 0]))), IMAGES[0, 0].expand(5, *SHAPE))


def test_class_means_are_those_of_the_labels() -> None:
    means = victims(1)[0].knowledge.means
    assert means is not None
    labels = torch.arange(10).view(5, 2) % CLASSES
    torch.testing.assert_close(pixels(bind(ClassMean())), means[labels])


def test_further_restarts_from_a_class_mean_start_at_other_images_around_it() -> None:
    means = victims(1)[0].knowledge.means
    assert means is not None
    labels = torch.arange(12).view(6, 2) % CLASSES
    away = (pixels(bind(ClassMean(), rows=6, restarts=3)) - means[labels]).view(2, 3, -1)
    torch.testing.assert_close(away[:, 0], torch.zeros_like(away[:, 0]))
    assert ((away[:, 1:].std(dim=2) - AWAY).abs() < 0.05).all()
    assert len(away[:, 1:].flatten(0, 1).unique(dim=0)) == 4


def test_a_start_can_be_changed_without_harm_to_the_images_given() -> None:
    before = IMAGES.clone()
    bind(Given(IMAGES)).zero_()
    assert torch.equal(IMAGES, before)


def test_starts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        GradveilError,
        match=r"shape \(5, 2, 3, 9, 6\): expected \(3, 9, 6\), \(2, 3, 9, 6\) or \(4, 2, 3, 9, 6\)",
    ):
        bind(Given(IMAGES), rows=4)
    with pytest.raises(GradveilError, match="tile 0"):
        Patterned(0)
    with pytest.raises(GradveilError, match="cannot be optimized along"):
        ClassMean().bind(victims(1), Generator(), 1, torch.zeros(1, 2, CLASSES))
