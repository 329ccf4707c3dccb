"""Oracle: Pillow, one picture at a time, for every function, both signs, real pictures."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from gradveil.data import load
from gradveil.transforms import LIBRARY, OPERATIONS, Policy, Transform

COUNT = 50
FUNCTIONS = sorted(set(LIBRARY))
TREES = {"tiny-imagenet": "tiny-imagenet-200", "medical-mnist": "medical-mnist"}
REAL = {"cifar100": 32, "fashion-mnist": 28, "tiny-imagenet": 64, "medical-mnist": 64}


def pillow(transform: Transform, sign: int, picture: Image.Image) -> Image.Image:
    """Change a picture as the published code bases do, by Pillow's functions."""
    strength, (width, height) = transform.value, picture.size
    affine = {
        "shear_x": (1, strength * sign, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, strength * sign, 1, 0),
        "translate_x": (1, 0, strength * width * sign, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, strength * height * sign),
    }
    if transform.name in affine:
        smooth = transform.name.startswith("shear")
        how = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
        return picture.transform(
            picture.size, Image.Transform.AFFINE, affine[transform.name], how, fillcolor=(0, 0, 0)
        )
    if transform.name == "rotate":
        turned = picture.convert("RGBA").rotate(strength)
        return Image.composite(turned, Image.new("RGBA", turned.size, (128,) * 4), turned).convert(
            picture.mode
        )
    if transform.name in ("color", "contrast", "sharpness", "brightness"):
        enhancer = getattr(ImageEnhance, transform.name.capitalize())(picture)
        return enhancer.enhance(1 + strength * sign)  # type: ignore[no-any-return]
    if transform.name == "posterize":
        return ImageOps.posterize(picture, int(strength))
    if transform.name == "solarize":
        # Pillow only compares with the threshold, so a float is as good as an int.
        return ImageOps.solarize(picture, strength)  # type: ignore[arg-type]
    change = {
        "invert": ImageOps.invert,
        "autocontrast": ImageOps.autocontrast,
        "equalize": ImageOps.equalize,
    }[transform.name]
    return change(picture)


def expected(transform: Transform, sign: int, images: Tensor) -> Tensor:
    """Pass gray pictures through Pillow as RGB with equal channels, and back."""
    out = []
    for image in images:
        picture = Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
        changed = torch.from_numpy(np.array(pillow(transform, sign, picture))).permute(2, 0, 1)
        assert image.shape[0] == 3 or bool((changed == changed[:1]).all())
        out.append(changed[: image.shape[0]])
    return torch.stack(out)


def differences(transform: Transform, images: Tensor) -> int:
    signs = (-1, 1) if transform.signed else (1,)
    pairs = (
        (
            transform.apply(images, torch.full((len(images),), sign)),
            expected(transform, sign, images),
        )
        for sign in signs
    )
    return sum(int((got != wanted).sum()) for got, wanted in pairs)


@cache
def embedded(channels: int, size: int) -> Tensor:
    """Make pictures of real pixels, enlarged: three gray ones give a colored one."""
    count = COUNT * channels
    gray = load("fashion-mnist-mini", "train").images[:: 2000 // count][:count]
    sheet = gray.reshape(COUNT, channels, 28, 28).float()
    large = torch.nn.functional.interpolate(sheet, size=(size, size), mode="bicubic")
    return large.clamp(0, 255).round().to(torch.uint8)


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (3, 64)])
@pytest.mark.parametrize(("name", "magnitude"), FUNCTIONS)
def test_every_function_gives_pillows_pixels_on_the_embedded_pictures(
    name: str, magnitude: int, channels: int, size: int
) -> None:
    assert differences(Transform(name, magnitude), embedded(channels, size)) == 0


@pytest.mark.parametrize("dataset", REAL)
@pytest.mark.parametrize(("name", "magnitude"), FUNCTIONS)
def test_every_function_gives_pillows_pixels_on_real_data_sets(
    name: str, magnitude: int, dataset: str, data_root: Path
) -> None:
    images = _real(dataset, data_root)
    assert len(images) == COUNT and images.shape[2] == REAL[dataset]
    assert differences(Transform(name, magnitude), images) == 0


@cache
def _real(dataset: str, root: Path) -> Tensor:
    """Return some test images; of picture files only those that are needed are decoded."""
    if dataset not in TREES:
        images = load(dataset, "test").images
        return images[:: len(images) // COUNT][:COUNT].clone()
    files = sorted((root / TREES[dataset]).rglob("*.[jJ][pP]*[gG]"))
    pictures = [Image.open(file) for file in files[:: len(files) // COUNT][:COUNT]]
    mode = max((picture.mode for picture in pictures), key=len)
    pixels = np.stack([np.asarray(picture.convert(mode)) for picture in pictures])
    return torch.from_numpy(pixels.reshape(*pixels.shape[:3], -1)).movedim(3, 1).contiguous()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("magnitude", range(10))
def test_every_magnitude_gives_pillows_pixels_on_extreme_and_oblong_pictures(
    name: str, magnitude: int
) -> None:
    rng = torch.Generator().manual_seed(magnitude)
    shape = (3, 17, 23)
    extremes = [torch.full(shape, value) for value in (0, 1, 127, 128, 254, 255)]
    extremes += [
        torch.randint(0, 256, shape, generator=rng),
        torch.randint(0, 2, shape, generator=rng) * 255,
    ]
    extremes += [
        torch.randint(100, 103, shape, generator=rng),
        torch.arange(3 * 17 * 23).reshape(shape) % 256,
    ]
    assert differences(Transform(name, magnitude), torch.stack(extremes).to(torch.uint8)) == 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tiny_pictures_are_handled_as_pillow_does(size: int) -> None:
    images = torch.randint(
        0, 256, (20, 3, size, size), generator=torch.Generator().manual_seed(0)
    ).to(torch.uint8)
    for name, magnitude in FUNCTIONS:
        assert differences(Transform(name, magnitude), images) == 0, name


def test_a_policy_is_its_functions_in_order_one_sign_for_each_image() -> None:
    images = embedded(3, 32)
    policy = Policy.parse("3-1-7")
    got = policy(images, torch.Generator().manual_seed(0))
    every = [
        expected(
            policy.members[0][2],
            third,
            expected(policy.members[0][1], second, expected(policy.members[0][0], first, images)),
        )
        for first in (-1, 1)
        for second in (-1, 1)
        for third in (-1, 1)
    ]
    choice = torch.stack([(got == candidate).flatten(1).all(1) for candidate in every])
    assert bool(choice.any(0).all())
    assert len(set(choice.int().argmax(0).tolist())) == 8
