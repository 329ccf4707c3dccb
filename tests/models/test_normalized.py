"""A loader's normalization inside the model."""

import pytest
import torch
from torch import nn

import toys
from gradveil import models
from gradveil.core.errors import GradveilError
from gradveil.models.normalized import (
    KNOWN,
    Normalized,
    NormalizedName,
    normalized,
    plain_name,
    read_constants,
)

SPLIT = toys.split(4, 1)


def test_a_module_gets_what_its_loader_would_have_made_of_the_images() -> None:
    model, images = toys.mlp(channels=1, size=4).float(), toys.pictures(3, 1, 4).float()
    made = normalized(model, 0.5, [0.25])
    assert isinstance(made, Normalized)
    assert torch.equal(made(images), model((images - 0.5) / 0.25))
    assert made.model is not model and plain_name(made) == "Sequential"


def test_a_named_model_is_built_behind_its_normalization() -> None:
    made = normalized("toys:resnet18", (0.5,), (0.25,))
    assert made == NormalizedName("toys:resnet18", (0.5,), (0.25,))
    built = models.build_for(made, toys.split(4, 3, 16), check=False)
    assert isinstance(built, Normalized) and built.normalize.mean.flatten().tolist() == [0.5] * 3
    assert plain_name(made) == "toys:resnet18" and made.constants == "0.5,0.25"


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [
        ("0.5,0.25", (0.5,), (0.25,)),
        ("1,2,3,4,5,6", (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)),
        ("mnist", *KNOWN["mnist"]),
    ],
)
def test_constants_are_read(text: str, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    assert read_constants(text) == (mean, std)


@pytest.mark.parametrize("text", ["", "0.5", "1,2,3", "a,b", "imagnet", "0.5,,0.5,0.5"])
def test_constants_that_cannot_be_read_are_refused_with_the_choices(text: str) -> None:
    with pytest.raises(GradveilError, match=r"^normalize .* MEAN,STD, .*imagenet"):
        read_constants(text)


@pytest.mark.parametrize(
    ("name", "mean", "std", "says"),
    [
        ("lenet", (0.5,), (0.5,), r"lenet normalizes by .* data set"),
        ("toys:resnet18", (0.5,), (0.0,), r"every value must be above 0"),
        ("toys:resnet18", (0.5, 0.5), (1.0, 1.0, 1.0), r"expected one finite number for each"),
    ],
)
def test_constants_that_cannot_be_used_are_refused(
    name: str, mean: tuple[float, ...], std: tuple[float, ...], says: str
) -> None:
    with pytest.raises(GradveilError, match=says):
        NormalizedName(name, mean, std)


def test_a_model_for_other_images_is_refused_when_it_is_built() -> None:
    wide = NormalizedName("toys:mlp", KNOWN["imagenet"][0], KNOWN["imagenet"][1])
    with pytest.raises(GradveilError, match=r"expected one finite number for each of 1 channel"):
        models.build_for(wide, SPLIT)


def test_the_model_is_in_the_mode_of_the_module_given() -> None:
    assert not normalized(nn.Linear(2, 2).eval(), 0.5, 0.5).training  # type: ignore[union-attr]
