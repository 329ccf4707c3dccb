"""Policies as values: text, names, inputs of every kind, randomness as an argument."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

import toys
from gradveil.core.errors import GradveilError
from gradveil.transforms import LIBRARY, OPERATIONS, Policy, Transform

HYBRID = "3-1-7+43-18-18"


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def pictures(count: int = 64, channels: int = 3, size: int = 32) -> Tensor:
    return toys.pixels(count, channels, size)


@pytest.mark.parametrize("channels", [1, 3])
def test_idle_transformations_are_those_that_change_no_image(channels: int) -> None:
    images = pictures(channels=channels)
    for name in OPERATIONS:
        for magnitude in range(10):
            one = Transform(name, magnitude)
            same = all(
                torch.equal(one.apply(images, torch.full((len(images),), sign)), images)
                for sign in (-1, 1)
            )
            assert one.idle(channels) == same, one


@pytest.mark.parametrize(
    "text", [HYBRID, "0", "49-49-49", "translate_x(9)-contrast(6)", "3-posterize(0)+none", "none"]
)
def test_a_policys_text_reads_back_as_the_same_policy(text: str) -> None:
    assert str(Policy.parse(text)) == text
    assert Policy.parse(str(Policy.parse(text))) == Policy.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3-99", "0 to 49"),
        ("50", "0 to 49"),
        ("", "is no transformation"),
        ("3--1", "is no transformation"),
        ("3-1-7+", "is no transformation"),
        ("-3", "is no transformation"),
        ("3.5", "is no transformation"),
        ("blur(3)", "choose from shear_x"),
        ("translate_x(10)", "choose 0 to 9"),
        ("translate_x", "is no transformation"),
        ("1-2-3-4", "at most 3"),
    ],
)
def test_a_wrong_policy_is_one_line_that_names_the_choices(text: str, says: str) -> None:
    assert says in toys.refused(Policy.parse, text)


def test_the_library_holds_the_published_fifty() -> None:
    assert len(LIBRARY) == 50
    assert LIBRARY[3] == ("translate_x", 9)
    assert LIBRARY[15] == ("brightness", 9)
    assert LIBRARY[18] == ("contrast", 7)
    assert LIBRARY[37] == ("solarize", 4)
    assert LIBRARY[43] == ("translate_y", 3)
    counts = {name: sum(entry[0] == name for entry in LIBRARY) for name in OPERATIONS}
    assert counts["equalize"] == 9
    assert counts["shear_x"] == 0


def test_magnitudes_are_the_published_lines() -> None:
    assert OPERATIONS["translate_x"].magnitudes[9] == 150 / 331
    assert OPERATIONS["rotate"].magnitudes[2] == pytest.approx(30 * 2 / 9)
    assert [int(bits) for bits in OPERATIONS["posterize"].magnitudes] == np.round(
        np.linspace(8, 4, 10)
    ).astype(int).tolist()
    assert OPERATIONS["solarize"].magnitudes[0] == 256


@pytest.mark.parametrize("name", OPERATIONS)
def test_shape_type_and_range_are_kept(name: str) -> None:
    for channels in (1, 3):
        for images in (
            pictures(5, channels, 28),
            pictures(5, channels, 28).float() / 255,
            pictures(1, channels, 28)[0],
        ):
            out = Policy(((Transform(name, 7),),))(images, seeded())
            assert out.shape == images.shape
            assert out.dtype == images.dtype
            assert float(out.min()) >= 0
            assert float(out.max()) <= (255 if images.dtype == torch.uint8 else 1)


def test_floats_and_bytes_give_the_same_picture() -> None:
    images = pictures()
    policy = Policy.parse(HYBRID)
    floats = policy(images.float() / 255, seeded())
    assert torch.equal((floats * 255).round().to(torch.uint8), policy(images, seeded()))
    assert policy(images.double() / 255, seeded()).dtype == torch.double


def test_the_input_is_never_written_to() -> None:
    images = pictures()
    before = images.clone()
    for index in range(50):
        Policy.parse(str(index))(images, seeded())
    assert torch.equal(images, before)


def test_the_same_generator_gives_the_same_pictures_and_another_gives_others() -> None:
    images, policy = pictures(), Policy.parse(HYBRID)
    assert torch.equal(policy(images, seeded(5)), policy(images, seeded(5)))
    assert not torch.equal(policy(images, seeded(5)), policy(images, seeded(6)))


def test_no_policy_changes_nothing_and_draws_nothing() -> None:
    rng = seeded()
    state = rng.get_state()
    assert torch.equal(Policy.parse("none")(pictures(), rng), pictures())
    assert torch.equal(rng.get_state(), state)


@pytest.mark.parametrize(
    "name",
    [
        "shear_x",
        "shear_y",
        "translate_x",
        "translate_y",
        "rotate",
        "color",
        "contrast",
        "sharpness",
        "brightness",
        "posterize",
    ],
)
def test_zero_strength_is_the_identity(name: str) -> None:
    assert torch.equal(Policy(((Transform(name, 0),),))(pictures(), seeded()), pictures())


def test_each_image_draws_its_own_sign() -> None:
    images = torch.full((1000, 1, 8, 8), 100, dtype=torch.uint8)
    brighter = (Policy.parse("15")(images, seeded())[:, 0, 0, 0] > 100).float().mean()
    assert 0.45 < float(brighter) < 0.55


def test_a_hybrid_gives_each_member_its_share() -> None:
    images = torch.full((3000, 1, 8, 8), 100, dtype=torch.uint8)
    out = Policy.parse("invert(0)+posterize(9)+none")(images, seeded())[:, 0, 0, 0]
    for value in (155, 96, 100):
        assert 0.30 < float((out == value).float().mean()) < 0.37


def test_many_images_are_treated_as_few_are() -> None:
    """Larger batches are worked on in pieces, which must not show."""
    images = pictures(600)
    whole = Policy.parse("0-22-37")(images, seeded())
    assert torch.equal(
        whole,
        torch.cat(
            [
                Policy.parse("0-22-37")(images[:300], seeded()),
                Policy.parse("0-22-37")(images[300:], seeded()),
            ]
        ),
    )


def test_an_empty_batch_comes_back_empty() -> None:
    assert Policy.parse(HYBRID)(pictures(0)).shape == (0, 3, 32, 32)


def test_a_picture_gives_the_pixels_its_tensor_gives() -> None:
    policy = Policy.parse(HYBRID)
    color, gray = pictures(1)[0], pictures(1, 1)[0]
    as_picture = policy(Image.fromarray(color.permute(1, 2, 0).numpy()), seeded())
    assert torch.equal(
        torch.from_numpy(np.array(as_picture)).permute(2, 0, 1), policy(color, seeded())
    )
    as_picture = policy(Image.fromarray(gray[0].numpy()), seeded())
    assert as_picture.mode == "L"
    assert torch.equal(torch.from_numpy(np.array(as_picture))[None], policy(gray, seeded()))


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(2, 3, 8, 8, dtype=torch.long),
        torch.zeros(8, 8),
        torch.zeros(1, 4, 8, 8),
        Image.new("RGBA", (8, 8)),
        "x",
    ],
)
def test_other_inputs_are_refused_with_what_is_taken(bad: Tensor) -> None:
    with pytest.raises(GradveilError, match="a policy takes"):
        Policy.parse("0")(bad)


class Pictures(Dataset[Tensor]):
    """A user's data set with a transform, as torchvision's are."""

    def __init__(self, transform: Policy) -> None:
        self.images, self.transform = pictures(16), transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(self.images[index])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_policy_works_inside_a_data_loader(workers: int) -> None:
    loader = DataLoader(Pictures(Policy.parse("0-22")), batch_size=8, num_workers=workers)
    assert torch.equal(torch.cat(list(loader)), Policy.parse("0-22")(pictures(16)))


def test_a_policy_can_be_pickled_hashed_and_compared() -> None:
    policy = Policy.parse(HYBRID)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert len({policy, Policy.parse(HYBRID), Policy.parse("3")}) == 2


def test_a_description_names_operation_magnitude_and_unit() -> None:
    assert Transform.parse("3").describe() == "translate_x(9): ±0.4532 of the width"
    assert Transform.parse("2").describe() == "rotate(2): 6.667 degrees"
    assert Transform.parse("0").describe() == "invert(7)"


@pytest.mark.parametrize("text", ["3-1-7", f"{HYBRID}+2", "none"])
def test_images_that_share_their_draws_are_each_treated_as_alone_in_that_place(text: str) -> None:
    policy, images = Policy.parse(text), pictures(12).unflatten(0, (4, 3))
    together = policy(images.flatten(0, 1), seeded(5), alike=3).view_as(images)
    for column in range(3):
        assert torch.equal(together[:, column], policy(images[:, column], seeded(5)))


@pytest.mark.parametrize("alike", [0, 5])
def test_images_that_cannot_share_draws_are_refused(alike: int) -> None:
    with pytest.raises(GradveilError, match=f"12 images: they cannot share draws by {alike}"):
        Policy.parse("3")(pictures(12), seeded(), alike=alike)
