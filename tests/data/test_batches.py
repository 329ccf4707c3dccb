"""Batches: every image once, with its label, shuffled and prepared by the generator."""

import pytest
import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.data.images import BATCHES_AHEAD, Batches


def numbered(count: int) -> tuple[Tensor, Tensor]:
    """Image i is filled with i, and its label is i."""
    labels = torch.arange(count)
    return labels.to(torch.uint8)[:, None, None, None].expand(count, 1, 2, 2).contiguous(), labels


def flattened(batches: Batches) -> tuple[list[int], list[int]]:
    parts = list(batches)
    pixels = torch.cat([batch.images for batch in parts])[:, 0, 0, 0] * 255
    return pixels.round().int().tolist(), torch.cat([batch.labels for batch in parts]).tolist()


@pytest.mark.parametrize(
    ("count", "size"),
    [(10, 3), (10, 10), (10, 99), (1, 1), (BATCHES_AHEAD + 5, 1), (200, 3), (10, 10**20)],
)
def test_every_image_comes_once_with_its_label(count: int, size: int) -> None:
    images, labels = flattened(Batches(*numbered(count), size, generator(0)))
    assert images == labels and sorted(labels) == list(range(count))


@pytest.mark.parametrize(("count", "size"), [(10, 3), (10, 5), (3, 4), (BATCHES_AHEAD * 2 + 1, 2)])
def test_all_batches_but_the_last_are_full(count: int, size: int) -> None:
    batches = Batches(*numbered(count), size)
    sizes = [len(batch) for batch in batches]
    assert len(sizes) == len(batches) and sum(sizes) == count and set(sizes[:-1]) <= {size}


def test_without_a_generator_the_order_is_kept() -> None:
    assert flattened(Batches(*numbered(20), 3))[1] == list(range(20))


def test_the_order_is_a_permutation_drawn_first_from_the_generator() -> None:
    expected = torch.randperm(20, generator=generator(4)).tolist()
    assert flattened(Batches(*numbered(20), 3, generator(4)))[1] == expected


def test_the_batch_size_does_not_change_the_order() -> None:
    assert flattened(Batches(*numbered(50), 1, generator(4))) == flattened(
        Batches(*numbered(50), 50, generator(4))
    )


def test_a_second_pass_over_one_generator_has_another_order() -> None:
    batches = Batches(*numbered(50), 5, generator(0))
    assert flattened(batches) != flattened(batches)


def test_images_come_as_floats_from_zero_to_one() -> None:
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).view(3, 1, 1, 1)
    (batch,) = Batches(images, torch.zeros(3, dtype=torch.long), 3)
    assert batch.images.dtype == torch.float32
    torch.testing.assert_close(batch.images.flatten(), torch.tensor([0, 1, 0.2]))


def test_preparation_gets_shuffled_images_and_the_same_generator() -> None:
    rng, seen = generator(1), []

    def brighter(images: Tensor, given: Generator) -> Tensor:
        assert given is rng and images.dtype == torch.uint8
        seen.append(len(images))
        return images + 100

    images, labels = flattened(Batches(*numbered(BATCHES_AHEAD + 10), 1, rng, brighter))
    assert images == [label + 100 for label in labels] and labels != sorted(labels)
    assert seen == [BATCHES_AHEAD, 10]


def test_the_images_given_are_not_changed() -> None:
    images, labels = numbered(10)
    list(Batches(images, labels, 4))
    assert torch.equal(images, numbered(10)[0])


@pytest.mark.parametrize("size", [0, -3])
def test_a_batch_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(GradveilError, match=f"^batch size {size}: it must be at least 1$"):
        Batches(*numbered(4), size)


def test_random_preparation_without_a_generator_is_refused() -> None:
    with pytest.raises(GradveilError, match="needs a generator"):
        Batches(*numbered(4), 2, prepare=lambda images, _: images)


def test_images_and_labels_must_be_as_many_and_some() -> None:
    images, labels = numbered(4)
    with pytest.raises(GradveilError, match=r"^4 images and 3 labels"):
        Batches(images, labels[:3], 2)
    with pytest.raises(GradveilError, match=r"^0 images and 0 labels"):
        Batches(images[:0], labels[:0], 2)
