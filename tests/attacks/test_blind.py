"""Blind guesses: a contract for all of them, what each of them shows, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.blind import Blind, BlindClassMean, BlindGrey, BlindImage, BlindNoise
from gradveil.core.errors import GradveilError
from gradveil.core.types import Gradients, Knowledge, Observation
from gradveil.engine.gradients import cross_entropy

SHAPE = (3, 4, 5)
CLASSES = 6
MEANS = torch.rand(CLASSES, *SHAPE, generator=Generator().manual_seed(9))
COLOR = torch.tensor([0.2, 0.4, 0.6]).view(3, 1, 1).expand(SHAPE)
ATTACKS: dict[str, Blind] = {
    "blind: noise": BlindNoise(),
    "blind: grey": BlindGrey(),
    "blind: mean color": BlindImage("mean color", COLOR),
    "blind: class mean": BlindClassMean(MEANS),
}


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


def images(found: Blind, seen: list[Observation]) -> Tensor:
    return torch.stack([one.images for one in found(seen, rng())])


@pytest.mark.parametrize("name", ATTACKS)
def test_every_blind_attack_gives_images_in_range_and_claims_no_distance(name: str) -> None:
    attack = ATTACKS[name]
    seen = victims([1, 5], [0, 0], dtype=torch.float64)
    found = attack(seen, rng())
    assert str(attack) == name
    for one, own in zip(found, seen, strict=True):
        assert one.images.shape == (2, *SHAPE) and one.images.dtype == torch.float64
        assert bool(((one.images >= 0) & (one.images <= 1)).all())
        assert one.distance == math.inf and one.status == "ok"
        assert one.labels is own.knowledge.labels


@pytest.mark.parametrize("name", ATTACKS)
def test_no_blind_attack_looks_at_the_gradient(name: str) -> None:
    assert torch.equal(
        images(ATTACKS[name], victims([1], [2])),
        images(ATTACKS[name], victims([1], [2], fill=math.nan)),
    )


@pytest.mark.parametrize("name", ATTACKS)
def test_a_guess_does_not_depend_on_the_victims_that_follow(name: str) -> None:
    alone, among = (
        images(ATTACKS[name], victims([1, 2])),
        images(ATTACKS[name], victims([1, 2], [3, 3], [4, 0])),
    )
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
    assert len({float(one.sum()) for one in found}) == 100


def test_grey_mean_color_and_class_means_are_shown_as_they_are() -> None:
    seen = victims([1, 5])
    assert bool((images(BlindGrey(), seen) == 0.5).all())
    assert torch.equal(images(ATTACKS["blind: mean color"], seen), COLOR.expand(1, 2, *SHAPE))
    assert torch.equal(images(ATTACKS["blind: class mean"], seen)[0], MEANS[[1, 5]])


def test_class_means_need_labels_and_the_others_do_not() -> None:
    seen = [replace(one, knowledge=Knowledge()) for one in victims([1])]
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
