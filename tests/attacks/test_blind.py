"""Blind guesses: what each of them shows, how they are made from public images, what is refused.

What they have in common with all attacks is tested in `tests/contracts/test_attacks.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.blind import (
    Blind,
    BlindClassMean,
    BlindGray,
    BlindImage,
    BlindNoise,
    PublicMeans,
    find_means,
    make_blind_attacks,
    stack_guesses,
)
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Gradients, Knowledge, Observation
from gradveil.engine.gradients import cross_entropy

SHAPE = (3, 4, 5)
CLASSES = 6
MEANS = torch.rand(CLASSES, *SHAPE, generator=Generator().manual_seed(9))
COLOR = torch.tensor([0.2, 0.4, 0.6]).view(3, 1, 1).expand(SHAPE)
ATTACKS = make_blind_attacks(PublicMeans(MEANS, MEANS.mean(0), COLOR))


def rng() -> Generator:
    return Generator().manual_seed(0)


def victims(
    *labels: list[int], fill: float = 1.0, dtype: torch.dtype = torch.float32
) -> list[Observation]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(SHAPE), CLASSES))
    gradients: Gradients = {
        name: torch.full_like(p, fill, dtype=dtype) for name, p in model.named_parameters()
    }
    return [
        Observation(
            model,
            cross_entropy,
            gradients,
            SHAPE,
            len(own),
            CLASSES,
            knowledge=Knowledge(torch.tensor(own)),
        )
        for own in labels
    ]


def images(attack: Blind, seen: list[Observation]) -> Tensor:
    return torch.stack([found.images for found in attack(seen, rng())])


def test_blind_attacks_have_the_names_of_the_table() -> None:
    names = ["blind: noise", "blind: gray", "blind: mean color", "blind: class mean"]
    assert list(ATTACKS) == [str(attack) for attack in ATTACKS.values()] == names
    assert list(make_blind_attacks()) == names[:2]


@pytest.mark.parametrize("name", ATTACKS)
def test_no_blind_attack_looks_at_the_gradient_or_claims_a_distance(name: str) -> None:
    assert torch.equal(
        images(ATTACKS[name], victims([1], [2])),
        images(ATTACKS[name], victims([1], [2], fill=math.nan)),
    )
    (seen,) = victims([1, 5], dtype=torch.float64)
    found = ATTACKS[name](seen, 0)
    assert found.distance == math.inf and found.labels is seen.knowledge.labels
    assert found.images.dtype == torch.float64


@pytest.mark.parametrize("name", ATTACKS)
def test_a_guess_does_not_depend_on_the_victims_that_follow(name: str) -> None:
    alone = images(ATTACKS[name], victims([1, 2]))
    among = images(ATTACKS[name], victims([1, 2], [3, 3], [4, 0]))
    assert torch.equal(alone[0], among[0])


@pytest.mark.parametrize("name", ATTACKS)
def test_guesses_can_be_changed_without_harm_to_the_next(name: str) -> None:
    first = images(ATTACKS[name], victims([1]))
    (found,) = ATTACKS[name](victims([1]), rng())
    found.images.zero_()
    assert torch.equal(images(ATTACKS[name], victims([1])), first)


def test_noise_is_uniform_and_differs_from_image_to_image() -> None:
    found = images(BlindNoise(), victims(*[[0] * 10] * 10)).flatten(0, 1)
    assert abs(float(found.mean()) - 0.5) < 0.02 and abs(float(found.var()) - 1 / 12) < 0.005
    assert len({float(image.sum()) for image in found}) == 100


def test_gray_mean_color_and_class_means_are_shown_as_they_are() -> None:
    seen = victims([1, 5])
    assert bool((images(BlindGray(), seen) == 0.5).all())
    assert torch.equal(images(ATTACKS["blind: mean color"], seen), COLOR.expand(1, 2, *SHAPE))
    assert torch.equal(images(ATTACKS["blind: class mean"], seen)[0], MEANS[[1, 5]])


def test_class_means_need_labels_and_the_others_do_not() -> None:
    seen = [replace(victim, knowledge=Knowledge()) for victim in victims([1])]
    for name, attack in ATTACKS.items():
        if name == "blind: class mean":
            with pytest.raises(GradveilError, match="blind: class mean needs to know the labels"):
                attack(seen, rng())
        else:
            assert attack(seen, rng())[0].labels is None


def test_images_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        GradveilError,
        match=r"'blind: mean' got images of shape \(3, 2, 2\): the victims need \(3, 4, 5\)",
    ):
        BlindImage("mean", torch.rand(3, 2, 2))(victims([1]), rng())
    with pytest.raises(
        GradveilError, match=r"shape \(5, 3, 4, 5\): the victims need \(6, 3, 4, 5\)"
    ):
        BlindClassMean(MEANS[:5])(victims([1]), rng())
    with pytest.raises(GradveilError, match="class indices from 0 to 5"):
        BlindClassMean(MEANS)(victims([6]), rng())


@pytest.mark.parametrize(
    "bad",
    [torch.full(SHAPE, 1.5), torch.full(SHAPE, math.nan), torch.full(SHAPE, 1, dtype=torch.uint8)],
)
def test_images_out_of_range_are_refused(bad: Tensor) -> None:
    with pytest.raises(GradveilError, match=r"expected floating point in \[0, 1\]"):
        BlindImage("mean", bad)


def public(count: int = 40) -> tuple[Tensor, Tensor]:
    """Bytes, with no image of class 2."""
    labels = torch.randint(CLASSES, (count,), generator=generator(1))
    labels[labels == 2] = 3
    return (
        torch.randint(256, (count, *SHAPE), generator=generator(2), dtype=torch.uint8),
        labels,
    )


def test_means_are_those_of_a_plain_loop_and_an_absent_class_gets_the_mean_of_all() -> None:
    images, labels = public()
    means = find_means(images, labels, CLASSES)
    pixels = images.double() / 255
    for label in range(CLASSES):
        of_class = [
            pixel for pixel, own in zip(pixels, labels, strict=True) if label in (int(own), 2)
        ]
        torch.testing.assert_close(means.classes[label], torch.stack(of_class).mean(0).float())
    torch.testing.assert_close(means.image, pixels.mean(0).float())
    torch.testing.assert_close(
        means.color, pixels.mean((0, 2, 3)).float()[:, None, None].expand(SHAPE)
    )
    assert {part.dtype for part in (means.classes, means.image, means.color)} == {torch.float32}


def test_bytes_and_floats_give_the_same_means() -> None:
    images, labels = public()
    ours, theirs = (find_means(some, labels, CLASSES) for some in (images, images.double() / 255))
    torch.testing.assert_close(ours.classes, theirs.classes)
    torch.testing.assert_close(ours.color, theirs.color)


def test_guesses_are_stacked_image_by_image_each_with_a_generator() -> None:
    labels = torch.tensor([4, 1, 1])
    found = stack_guesses(
        list(ATTACKS.values()), SHAPE, labels, [generator(3, number) for number in range(3)]
    )
    assert found.shape == (3, 4, *SHAPE)
    for number in range(3):
        drawn = torch.rand(1, *SHAPE, generator=generator(3, number))[0]
        expected = torch.stack([drawn, torch.full(SHAPE, 0.5), COLOR, MEANS[labels[number]]])
        assert torch.equal(found[number], expected)


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (torch.zeros(0, *SHAPE), torch.zeros(0).long(), "at least one"),
        (torch.zeros(SHAPE), torch.zeros(3).long(), r"shape \(3, 4, 5\): expected \(N, C, H, W\)"),
        (torch.zeros(2, *SHAPE).int(), torch.zeros(2).long(), "int32: expected uint8, or floating"),
        (torch.zeros(2, *SHAPE), torch.zeros(3).long(), "class index for each of 2 images"),
        (torch.zeros(2, *SHAPE), torch.zeros(2), "float32: expected one class index"),
        (torch.zeros(2, *SHAPE), torch.tensor([0, 6]), "from 0 to 6: expected .* from 0 to 5"),
    ],
)
def test_public_images_that_cannot_be_averaged_are_refused(
    images: Tensor, labels: Tensor, says: str
) -> None:
    with pytest.raises(GradveilError, match=says):
        find_means(images, labels, CLASSES)
