"""Crop and flip against every window that there is, and the policy after them."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.transforms import Policy, Preparation
from gradveil.transforms.preparation import crop_and_flip


def pictures(count: int, channels: int = 3, height: int = 6, width: int = 5) -> Tensor:
    return torch.randint(
        1, 256, (count, channels, height, width), generator=generator(0, "pictures")
    ).to(torch.uint8)


def windows(image: Tensor, padding: int) -> dict[tuple[int, int, bool], Tensor]:
    """Every possible result for one image: top, left, mirrored."""
    height, width = image.shape[1:]
    padded = pad(image, (padding,) * 4)
    return {
        (top, left, mirrored): crop.flip(2) if mirrored else crop
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
        for crop in [padded[:, top : top + height, left : left + width]]
        for mirrored in (False, True)
    }


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("channels", [1, 3])
def test_each_image_is_a_window_of_itself_in_a_black_border_perhaps_mirrored(
    padding: int, channels: int
) -> None:
    images = pictures(40, channels)
    for before, after in zip(
        images, crop_and_flip(images, padding, True, generator(1)), strict=True
    ):
        assert any(torch.equal(after, window) for window in windows(before, padding).values())


def test_all_places_and_both_directions_are_drawn_equally_often() -> None:
    count, padding = 18_000, 1
    image = pictures(1)
    results = crop_and_flip(image.expand(count, -1, -1, -1), padding, True, generator(2)).flatten(1)
    hits = torch.stack(
        [
            (results == window.flatten()).all(1).sum()
            for window in windows(image[0], padding).values()
        ]
    )
    assert int(hits.sum()) == count
    assert float((hits - 1_000).abs().max()) < 5 * 1_000**0.5  # 18 equal cells


def test_images_of_a_batch_are_drawn_independently() -> None:
    results = crop_and_flip(pictures(1).expand(50, -1, -1, -1), 4, True, generator(0))
    assert len({tuple(result.flatten().tolist()) for result in results}) > 20


def test_without_padding_and_flip_nothing_changes() -> None:
    images = pictures(5)
    assert torch.equal(Preparation(padding=0, flip=False)(images, generator(0)), images)


def test_without_flip_no_image_is_mirrored() -> None:
    image = pictures(1)
    upright = [window for (_, _, mirrored), window in windows(image[0], 2).items() if not mirrored]
    for result in crop_and_flip(image.expand(60, -1, -1, -1), 2, False, generator(0)):
        assert any(torch.equal(result, window) for window in upright)


def test_one_generator_state_gives_one_result() -> None:
    images, prepare = pictures(30), Preparation(policy=Policy.parse("3-1-7+43-18-18"))
    assert torch.equal(prepare(images, generator(5)), prepare(images, generator(5)))
    assert not torch.equal(prepare(images, generator(5)), prepare(images, generator(6)))


def test_the_policy_comes_after_crop_and_flip_and_replaces_the_image() -> None:
    images, policy = pictures(20), Policy.parse("invert(0)")
    prepared = Preparation(padding=2, policy=policy)(images, generator(3))
    assert torch.equal(prepared, 255 - crop_and_flip(images, 2, True, generator(3)))
    assert prepared.dtype == torch.uint8 and prepared.shape == images.shape


def test_the_images_given_are_not_changed_by_preparation() -> None:
    images = pictures(10)
    Preparation(policy=Policy.parse("invert(0)"))(images, generator(0))
    assert torch.equal(images, pictures(10))


def test_negative_padding_is_refused() -> None:
    with pytest.raises(GradveilError, match=r"^padding -1: it cannot be negative$"):
        Preparation(padding=-1)


def test_images_that_share_their_draws_have_the_same_window() -> None:
    images = pictures(12).unflatten(0, (4, 3))
    together = crop_and_flip(images.flatten(0, 1), 2, True, generator(5), alike=3).view_as(images)
    for column in range(3):
        assert torch.equal(
            together[:, column], crop_and_flip(images[:, column], 2, True, generator(5))
        )
