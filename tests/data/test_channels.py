"""Gray images as color ones, and color ones as gray."""

import pytest
import torch

import toys
from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.data.images import with_channels


def test_gray_images_get_three_equal_planes_and_their_statistics() -> None:
    gray, color = (load("fashion-mnist-mini", "test", channels=planes) for planes in (None, 3))
    assert color.channels == 3 and color.mean == gray.mean * 3 and color.std == gray.std * 3
    assert all(torch.equal(color.images[:, plane], gray.images[:, 0]) for plane in range(3))
    assert with_channels(gray, 1) is gray


def test_color_images_become_gray_and_equal_planes_stay_as_they_are() -> None:
    gray = toys.split(4, 1)
    again = with_channels(with_channels(gray, 3), 1)
    assert torch.equal(again.images, gray.images) and len(again.mean) == 1


@pytest.mark.parametrize(("channels", "says"), [(2, "choose 1, gray, or 3"), (3, "toy has 4")])
def test_other_numbers_of_channels_are_refused(channels: int, says: str) -> None:
    with pytest.raises(GradveilError, match=says):
        with_channels(toys.split(2, 4), channels)
