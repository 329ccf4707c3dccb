"""Victims are spread over the classes, apart from what a score saw, each in a fair line-up."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Generator

from gradveil.audits.victims import (
    drawn_again,
    find_victims,
    mixed_classes,
    passed_over_words,
)
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.data import Images, load
from gradveil.defenses import Defense, parse
from gradveil.scores.lineup import draw_victims, replay


@pytest.fixture(scope="module")
def split() -> Images:
    return load("fashion-mnist-mini", "test")


@pytest.fixture(scope="module")
def by_class(split: Images) -> Images:
    """The same images, all of one class after all of another, as many folders hold them."""
    return split.select(split.labels.argsort(stable=True).tolist())


def test_victims_are_spread_over_the_classes_whatever_the_order_of_the_split(
    by_class: Images,
) -> None:
    for count in (5, 10, 24):
        labels = by_class.labels[find_victims(by_class, count, 1, None, 3).numbers]
        most, least = labels.bincount(minlength=10).max(), labels.bincount(minlength=10).min()
        assert len(labels) == count and int(most - least) <= 1
    first = by_class.labels[find_victims(by_class, 24, 1, 0, 3).numbers]
    assert mixed_classes(first.tolist()) == "1 class only, 24 images"


def test_victims_follow_the_seed_and_are_none_of_those_apart(split: Images) -> None:
    one, again, other = (find_victims(split, 20, 1, None, seed).numbers for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert len(one.unique()) == 20
    apart = range(100, 500)
    assert int(find_victims(split, 20, 1, None, 1, apart=apart).numbers.max()) < 100


def test_a_class_too_small_for_a_line_up_is_not_drawn_from_and_named_where_it_must_be(
    split: Images,
) -> None:
    few = (split.labels == 4).nonzero().flatten()[12:]
    kept = torch.ones(len(split), dtype=torch.bool)
    kept[few] = False
    small = split.select(kept.nonzero().flatten().tolist())
    drawn = find_victims(small, 30, 1, None, 0)
    assert drawn.lineups is not None and 4 not in small.labels[drawn.numbers].tolist()
    assert drawn.passed_over == {small.classes[4]: 12}
    assert find_victims(split, 8, 1, None, 0).passed_over == {}  # not drawn from, and large enough
    image = int((small.labels == 4).nonzero()[0])
    forced = find_victims(small, 1, 1, image, 0)
    assert forced.lineups is None and forced.passed_over == {}
    assert forced.reason == (
        f"class {small.classes[4]!r} has 12 distinct images in the test split, and a line-up "
        "needs 20"
    )


def test_pictures_that_nearly_equal_a_victim_stand_in_no_line_up(split: Images) -> None:
    images = split.images.clone()
    same = (split.labels == split.labels[0]).nonzero().flatten()[1:6]
    images[same] = images[0].clone()
    doubled = replace(split, images=images)
    found = find_victims(doubled, 1, 1, 0, 0)
    assert found.lineups is not None
    assert not set(found.lineups.candidates.flatten().tolist()) & set(same.tolist())
    drawn = find_victims(doubled, 200, 1, None, 0).numbers.tolist()
    assert not set(drawn) & set(same.tolist())


def test_classes_that_are_drawn_from_after_all_or_hold_no_image_are_not_passed_over(
    split: Images,
) -> None:
    tiny = split.select(
        [i for k in range(3) for i in (split.labels == k).nonzero().flatten()[:12].tolist()]
    )
    assert find_victims(tiny, 4, 1, None, 0).passed_over == {}
    empty = split.select((split.labels != 4).nonzero().flatten().tolist())
    assert find_victims(empty, 30, 1, None, 0).passed_over == {}


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        ({"b": 12}, "class 'b' with 12 distinct images"),
        ({"b": 1, "c": 19}, "2 classes, 'b' with 1 distinct image, 'c' with 19"),
        (
            {"b" * 90: 3} | {str(k): k for k in range(5)},
            f"6 classes, such as '{'b' * 15}...{'b' * 15}' with 3 distinct images, '0' with 0, "
            "'1' with 1",
        ),
    ],
)
def test_classes_passed_over_are_named_in_a_short_line(classes: dict[str, int], says: str) -> None:
    assert passed_over_words(classes) == f"no image was drawn of {says}: a line-up needs 20"


@pytest.mark.parametrize("batch_size", [1, 2])
def test_copies_of_victims_stand_in_none_of_their_line_ups_from_a_first_image_on_either(
    split: Images, batch_size: int
) -> None:
    same = (split.labels == 3).nonzero().flatten()
    order = [*same.tolist(), *(split.labels != 3).nonzero().flatten().tolist()]
    images = split.images[order].clone()
    images[10] = (images[2].float() + 2).clamp(0, 255).byte()  # a victim, of an earlier image
    images[14] = images[40] = images[11]  # two victims, and an image after them
    doubled = replace(split, images=images, labels=split.labels[order])
    copies = {10: {2}, 11: {14, 40}, 14: {11, 40}}
    for seed in range(20):
        found = find_victims(doubled, 8, batch_size, 8, seed)
        assert found.numbers.tolist() == [*range(8, 16)] and found.lineups is not None
        rows = dict(zip(range(8, 16), found.lineups.candidates.tolist(), strict=True))
        assert all(image in rows[image] for image in rows)
        assert all(not copies[image] & set(rows[image]) for image in copies)
        everyone = {image for row in rows.values() for image in row}
        assert not everyone & {2, 40} and not {2, 40} & set(found.lineups.spare[3].tolist())


def test_more_images_than_there_are_is_one_line(split: Images) -> None:
    for first, says in ((None, "images 0 to 500"), (490, "images 490 to 510")):
        count = 501 if first is None else 21
        with pytest.raises(GradveilError, match=f"{says}: fashion-mnist-mini test has 500"):
            find_victims(split, count, 1, first, 0)
    with pytest.raises(GradveilError, match="3 images to attack: there are 2"):
        draw_victims(split.labels[:2], 3, torch.ones(2, dtype=torch.bool), 0)


def test_the_mix_of_classes_is_said_in_words() -> None:
    assert mixed_classes([1, 1, 2, 2, 3, 3]) == "3 classes, 2 images each"
    assert mixed_classes([1, 1, 2]) == "2 classes, 1 to 2 images each"


@dataclass(frozen=True)
class Shifted(Defense):
    """Adds a drawn number to each image; it cannot tell its draws as a function."""

    acts_on: ClassVar = "batch"

    def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
        shift = 0.2 * torch.rand(len(batch), 1, 1, 1, generator=rng)
        return Batch((batch.images + shift).clamp(0, 1), batch.labels)


def test_a_defense_that_tells_no_draws_is_replayed_from_its_generator(split: Images) -> None:
    batch = Batch(split.images[:2].float() / 255, split.labels[:2])
    used = Shifted().protect_batch(batch, generator(7))
    again = drawn_again(Shifted(), batch.labels, generator(7))
    made = replay(again, batch.images, 1, batch.images)
    assert torch.equal(made[1], used.images[1]) and not torch.equal(made[0], used.images[0])
    policy = parse("3-1-7")
    known = policy.protect_batch(batch, generator(7)).images
    again = drawn_again(policy, batch.labels, generator(7))
    assert torch.equal(replay(again, batch.images, 0, batch.images)[0], known[0])
