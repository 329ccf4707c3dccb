"""The small models, pictures and updates that tests share: quick, and the same at every call.

Import it as `import toys`. By default a picture has 3 channels of 8 x 8 pixels and one of 10
classes. Models are float64 (`double`), where oracles need it; call `.float()` for float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation
from gradveil.data import Images, load
from gradveil.defenses import Defense, parse
from gradveil.models import build, zoo

CHANNELS, SIZE, CLASSES = 3, 8, 10


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Call `make` with torch's generator at this seed, and leave that generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()


def built(
    name: str = "lenet",
    channels: int = CHANNELS,
    size: int = SIZE,
    classes: int = CLASSES,
    *,
    seed: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Module:
    """A built-in model in eval mode, float64, that normalizes by `mean` and `std`."""
    return (
        build(name, channels=channels, size=size, classes=classes, mean=mean, std=std, seed=seed)
        .double()
        .eval()
    )


def narrow(make: Callable[[], nn.Module]) -> nn.Module:
    """Call `make` while built-in models have a quarter of their channels.

    Their layers stay the same, and oracles that take a row at a time are many times quicker.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "RESNET_WIDTHS", tuple(w // 4 for w in zoo.RESNET_WIDTHS))
        for name in ("CONVNET_WIDTHS", "CONVNET_9_WIDTHS"):
            stages = getattr(zoo, name)
            patch.setattr(zoo, name, tuple(tuple(w // 4 for w in stage) for stage in stages))
        patch.setattr(zoo, "MLP_WIDTH", zoo.MLP_WIDTH // 4)
        patch.setattr(zoo, "VIT_WIDTH", zoo.VIT_WIDTH // 4)
        return make()


def lenet(
    channels: int = CHANNELS, size: int = SIZE, classes: int = CLASSES, **more: Any
) -> nn.Module:
    """The smooth network that images come back from; `more` is passed on to `built`."""
    return built("lenet", channels, size, classes, **more)


def leaky(size: int = 12) -> nn.Module:
    """A lenet for the pictures of `fashion`: wide enough to tell an image from its gradient."""
    return lenet(1, size, 10, mean=(0.2,), std=(0.4,))


def mlp(
    *middle: nn.Module,
    channels: int = CHANNELS,
    size: int = SIZE,
    classes: int = CLASSES,
    width: int = 16,
    seed: int = 0,
) -> nn.Sequential:
    """Two linear layers with these modules in between, float64."""

    def make() -> nn.Module:
        first = nn.Linear(channels * size**2, width)
        return nn.Sequential(nn.Flatten(), first, *middle, nn.Linear(width, classes))

    made = seeded(make, seed).double()
    assert isinstance(made, nn.Sequential)
    return made


def conv_with_norm(
    channels: int = CHANNELS, size: int = SIZE, classes: int = CLASSES, *, seed: int = 0
) -> nn.Sequential:
    """A convolution, batch norm whose running statistics are not 0 and 1, and a head; float64."""

    def make() -> nn.Module:
        layers = nn.Conv2d(channels, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()
        model = nn.Sequential(*layers, nn.Linear(2 * (size - 2) ** 2, classes))
        model(pictures(8, channels, size, seed=1))
        return model

    made = seeded(make, seed).double().eval()
    assert isinstance(made, nn.Sequential)
    return made


def pixels(count: int, channels: int = CHANNELS, size: int = SIZE, *, seed: int = 0) -> Tensor:
    """Random pictures as bytes, uint8 (count, channels, size, size)."""
    shape = count, channels, size, size
    rng = generator(seed, "pixels")
    return torch.randint(0, 256, shape, generator=rng).to(torch.uint8)


def pictures(
    count: int,
    channels: int = CHANNELS,
    size: int = SIZE,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The same in [0, 1], multiples of 1/255, as a data set gives them."""
    return pixels(count, channels, size, seed=seed).to(dtype) / 255


def batch(
    count: int,
    channels: int = CHANNELS,
    size: int = SIZE,
    classes: int = CLASSES,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """Random pictures with labels 0, 1, 2, ... in turn."""
    images = pictures(count, channels, size, seed=seed, dtype=dtype)
    return Batch(images, torch.arange(count) % classes)


def private(
    victims: int,
    images: int = 1,
    channels: int = CHANNELS,
    size: int = SIZE,
    classes: int = CLASSES,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Batch]:
    """One batch of `images` random pictures for each victim; labels start at the victim's number.

    The first victims are the same however many there are.
    """
    every = pictures(victims * images, channels, size, seed=seed, dtype=dtype)
    return [
        Batch(some, torch.arange(victim, victim + images) % classes)
        for victim, some in enumerate(every.split(images))
    ]


def fashion(count: int, size: int = 12, *, dtype: torch.dtype = torch.float64) -> Batch:
    """The first pictures of the embedded data set, shrunk to multiples of 1/255; their labels."""
    split = load("fashion-mnist-mini", "test")
    small = F.interpolate(split.images[:count].float(), size=(size, size), mode="area")
    return Batch(small.round().to(dtype) / 255, split.labels[:count])


def split(
    count: int,
    channels: int = CHANNELS,
    size: int = SIZE,
    classes: int = CLASSES,
    *,
    part: str = "test",
    seed: int = 0,
) -> Images:
    """A split of a data set named toy, with random pictures and labels in turn."""
    names = tuple(f"class {number}" for number in range(classes))
    images, labels = pixels(count, channels, size, seed=seed), torch.arange(count) % classes
    return Images("toy", part, images, labels, names, (0.5,) * channels, (0.25,) * channels)


def observe(
    model: nn.Module,
    batch: Batch,
    defense: Defense | str = "none",
    *,
    seed: int = 0,
    told: bool = True,
    **settings: Any,
) -> Observation:
    """What the server sees of this batch; `settings` are those of a `Client`, such as protocol.

    With `told` the attacker knows the defense, but none of its draws.
    """
    protection = parse(defense) if isinstance(defense, str) else defense
    client = Client(model, defense=protection, **settings)
    return client.share(batch.images, batch.labels, seed, tell=told).seen


def observe_each(
    model: nn.Module,
    batch: Batch,
    defense: Defense | str = "none",
    *,
    seed: int = 0,
    told: bool = True,
    **settings: Any,
) -> list[Observation]:
    """The same for each picture of the batch, as that many victims with one image each."""
    protection = parse(defense) if isinstance(defense, str) else defense
    client = Client(model, defense=protection, **settings)
    return [found.seen for found in client.share_each(batch.images, batch.labels, seed, tell=told)]


def refused(function: Callable[..., object], *arguments: Any, **more: Any) -> str:
    """Call the function, which must refuse its arguments in one line; return that line."""
    with pytest.raises(GradveilError) as caught:
        function(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)
