"""A user's own tensors, pairs, data sets and loaders become images, or one line says why not."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gradveil.core.errors import GradveilError
from gradveil.data.images import Images, as_images

PIXELS = torch.arange(6 * 3 * 4 * 4).remainder(251).to(torch.uint8).view(6, 3, 4, 4)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
CHANNELS_LAST = PIXELS.permute(0, 2, 3, 1).numpy()


class Endless(Dataset[tuple[Tensor, int]]):
    """Answers any index, so that only its length says where it ends."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return PIXELS[index % 6], int(LABELS[index % 6])


class Broken(Endless):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise OSError("the disk\nis gone")


def pairs() -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(PIXELS, LABELS, strict=True)


@pytest.mark.parametrize(
    "given",
    [
        (PIXELS, LABELS),
        [PIXELS / 255, LABELS.tolist()],
        ((PIXELS / 255).double(), LABELS.int()),
        TensorDataset(PIXELS, LABELS),
        DataLoader(TensorDataset(PIXELS, LABELS), batch_size=4),
        DataLoader(TensorDataset(PIXELS / 255, LABELS), batch_size=None),
        (PIXELS.numpy(), LABELS.numpy()),
        (CHANNELS_LAST, LABELS.numpy().astype(np.int32)),
        [CHANNELS_LAST / 255, LABELS.tolist()],
        (np.broadcast_to(CHANNELS_LAST, (6, 4, 4, 3)), np.broadcast_to(LABELS.numpy(), 6)),
        (PIXELS.numpy()[::-1][::-1], LABELS),
        Endless(),
        list(pairs()),
        pairs(),
    ],
)
def test_every_form_gives_the_same_images(given: object) -> None:
    found = as_images(given, name="mine")
    assert torch.equal(found.images, PIXELS) and torch.equal(found.labels, LABELS)
    assert (found.images.dtype, found.labels.dtype) == (torch.uint8, torch.int64)
    assert (found.name, found.split, found.classes) == ("mine", "train", ("0", "1", "2"))


def test_images_and_labels_may_be_two_arguments() -> None:
    assert torch.equal(as_images(PIXELS, LABELS).images, PIXELS)


def test_mean_and_deviation_are_those_of_the_images_unless_given() -> None:
    found = as_images(PIXELS, LABELS)
    expected = (PIXELS.double() / 255).transpose(0, 1).flatten(1)
    assert found.mean == pytest.approx(expected.mean(1).tolist())
    assert found.std == pytest.approx(expected.std(1, correction=0).tolist())
    given = as_images(PIXELS, LABELS, mean=(0.1, 0.2, 0.3), std=(1, 2, 3), classes=("a", "b", "c"))
    assert (given.mean, given.std) == ((0.1, 0.2, 0.3), (1, 2, 3))
    assert given.classes == ("a", "b", "c")


def test_images_stay_the_same_and_take_the_classes_of_another_split() -> None:
    found = as_images(PIXELS, LABELS)
    assert as_images(found).images.data_ptr() == found.images.data_ptr()
    assert len(as_images(found, classes=7).classes) == 7


def test_a_loader_that_shuffles_gives_one_order_and_leaves_torch_s_generator_alone() -> None:
    loader = DataLoader(TensorDataset(PIXELS, LABELS), batch_size=2, shuffle=True)
    before = torch.get_rng_state()
    first, again = as_images(loader), as_images(loader)
    assert torch.equal(first.images, again.images)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        ([1, 2, 3], None, "mine: item 0 is int; expected an image tensor (C, H, W) and its label"),
        ("cifar100", None, "mine: a text; expected a tensor (N, C, H, W) or NumPy array, a pair"),
        (None, None, "mine: None; expected a tensor"),
        (PIXELS.numpy(), None, "mine: a NumPy array of images without labels; give labels too"),
        (PIXELS.numpy()[..., :3], LABELS, "mine: images of 4 x 3 pixels; expected square ones"),
        (PIXELS.numpy()[0], LABELS, "mine: images of shape (3, 4, 4); expected (N, C, H, W)"),
        (PIXELS.numpy().astype("O"), LABELS, "mine: images of type object; expected uint8, or"),
        (PIXELS.numpy().astype(">f4"), LABELS, "mine: images of type >f4; expected uint8, or"),
        (PIXELS, None, "mine: a tensor of images without labels; give labels too"),
        (PIXELS[0], LABELS, "mine: images of shape (3, 4, 4); expected (N, C, H, W)"),
        (PIXELS[:0], LABELS[:0], "mine: images of shape (0, 3, 4, 4); expected (N, C, H, W)"),
        (PIXELS[..., :3], LABELS, "mine: images of 4 x 3 pixels; expected square ones"),
        (PIXELS.int(), LABELS, "mine: images of type torch.int32; expected uint8, or floating"),
        (PIXELS.float(), LABELS, "mine: images with values from 0 to 250; expected [0, 1]"),
        (PIXELS / 255 - 1, LABELS, "mine: images with values from -1 to "),
        (PIXELS / torch.nan, LABELS, "mine: images with values from nan to nan; expected [0, 1]"),
        (PIXELS, LABELS.float(), "mine: labels of type torch.float32; expected class indices"),
        (PIXELS, LABELS > 1, "mine: labels of type torch.bool; expected class indices"),
        (PIXELS, LABELS - 1, "mine: label -1; class indices start at 0"),
        (PIXELS, LABELS[:5], "mine: 6 images and labels of shape (5,); expected one class index"),
        (PIXELS, ["cat"] * 6, "mine: labels are a list; expected a tensor of class indices"),
        (PIXELS.numpy(), np.array(["cat"] * 6), "mine: labels are a NumPy array; expected"),
        (PIXELS, LABELS + 7, "mine: label 9; there are 9 classes, 0 to 8"),
        ([], None, "mine: it holds no images"),
        ([("path.png", 1)], None, "mine: item 0 is str and int; expected an image tensor"),
        ([(PIXELS, 1)] * 3, None, "mine: item 0 is shapes (6, 3, 4, 4) and (); expected an image"),
        (
            [(PIXELS[0], 0), (PIXELS[0, :1], 1), (PIXELS[0], 2)],
            None,
            "mine: images of shapes (1, 4, 4) and (3, 4, 4); expected all alike",
        ),
        (Broken(), None, "mine: it cannot be read: OSError: the disk is gone"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(images: object, labels: object, says: str) -> None:
    with pytest.raises(GradveilError, match="^" + re.escape(says)) as caught:
        as_images(images, labels, name="mine", classes=9)
    assert "\n" not in str(caught.value)


def test_labels_beside_images_that_have_theirs_are_refused() -> None:
    given: Images = as_images(PIXELS, LABELS)
    with pytest.raises(GradveilError, match="images: labels are given beside an Images"):
        as_images(given, LABELS)
