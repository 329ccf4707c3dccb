"""The small models, pictures, updates and files of tests: quick, and the same at every call.

Import it as `import toys`. By default a picture has 3 channels of 8 x 8 pixels and one of 10
classes. Models are float64 (`double`), where oracles need it; call `.float()` for float32.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks import GradientMatching
from gradveil.attacks.attack_files import FORMAT, attack_table
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.toml import toml_lines
from gradveil.core.types import Batch, Observation
from gradveil.data import Images, load
from gradveil.defenses import Defense, parse
from gradveil.models import build, zoo
from gradveil.models.base import Mean

CHANNELS, SIZE, CLASSES = 3, 8, 10


class AsReplayed:
    """Stands in for a CUDA graph: each call writes into the tensors that the first one returned.

    `inside` tells whether a call is going on.
    """

    inside = False

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.found: Any = None

    def __call__(self) -> Any:
        AsReplayed.inside = True
        found = self.function()
        AsReplayed.inside = False
        if self.found is None:
            self.found = found
        elif isinstance(found, tuple):
            for old, new in zip(self.found, found, strict=True):
                old.copy_(new)
        else:
            self.found.copy_(found)
        return self.found


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


class Brittle(nn.Module):
    """Hands images on where neighboring pixels differ little, and infinity where they do not."""

    def forward(self, x: Tensor) -> Tensor:
        rough = x.diff(dim=-1).square().mean((1, 2, 3), keepdim=True)
        return x * torch.where(rough < 0.05, 1.0, torch.inf)


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


def resnet18(
    channels: int = CHANNELS, classes: int = CLASSES, width: int = 4, *, seed: int = 0
) -> nn.Module:
    """A ResNet-18 of this width, for images of 16 pixels and more; float64."""

    def make() -> nn.Module:
        first = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers: list[nn.Module] = [first, nn.BatchNorm2d(width), nn.ReLU()]
        before = width
        for stage in range(4):
            wide = width * 2**stage
            layers += [zoo.Block(before, wide, 1 if stage == 0 else 2), zoo.Block(wide, wide, 1)]
            before = wide
        return nn.Sequential(*layers, Mean(2, 3), nn.Linear(before, classes))

    return seeded(make, seed).double()


class Inverted(nn.Module):
    """MobileNet's block: a wide 1 x 1 convolution, one for each channel, a narrow 1 x 1 one."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 3 * width_in
        self.body = nn.Sequential(
            nn.Conv2d(width_in, wide, 1, bias=False),
            nn.GroupNorm(3, wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False),
            nn.GroupNorm(3, wide),
            nn.ReLU6(),
            nn.Conv2d(wide, width, 1, bias=False),
            nn.GroupNorm(2, width),
        )
        self.adds = stride == 1 and width_in == width

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.adds else out


def mobilenet(channels: int = CHANNELS, classes: int = CLASSES, *, seed: int = 0) -> nn.Module:
    """A small MobileNet, with depthwise convolutions and GroupNorm; float64."""

    def make() -> nn.Module:
        blocks = Inverted(4, 4, 1), Inverted(4, 8, 2), Inverted(8, 8, 1)
        first = nn.Conv2d(channels, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU6()
        return nn.Sequential(*first, *blocks, Mean(2, 3), nn.Linear(8, classes))

    return seeded(make, seed).double()


class SelfAttention(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x)), with one head and no masks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        shares = (self.query(y) @ self.key(y).transpose(1, 2) / y.shape[-1] ** 0.5).softmax(-1)
        x = x + shares @ self.value(y)
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.between(x))))
        return out


class Transformer(nn.Module):
    """Patches of 4 x 4 pixels and a class token, with learned positions, through two layers."""

    def __init__(self, channels: int, size: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // 4) ** 2 + 1, width))
        self.layers = nn.Sequential(SelfAttention(width), SelfAttention(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), tokens], 1) + self.positions
        logits: Tensor = self.head(self.norm(self.layers(x))[:, 0])
        return logits


def transformer(
    channels: int = CHANNELS, size: int = SIZE, classes: int = CLASSES, *, seed: int = 0
) -> nn.Module:
    """A small transformer with a class token; float64."""
    return seeded(lambda: Transformer(channels, size, classes), seed).double()


class Fused(nn.Module):
    """Attention by torch's `scaled_dot_product_attention`, which picks a fused kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).unsqueeze(1).chunk(3, dim=-1)
        mixed: Tensor = self.out(F.scaled_dot_product_attention(query, key, value).squeeze(1))
        return mixed


def fused_attention(size: int = SIZE) -> nn.Module:
    """Attention over the rows of each channel, by torch's fused kernels; float64."""
    return seeded(
        lambda: nn.Sequential(
            nn.Flatten(1, 2), Fused(size), nn.Flatten(), nn.Linear(CHANNELS * size**2, CLASSES)
        )
    ).double()


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


def attack_file(attack: GradientMatching, kind: str = FORMAT) -> str:
    """Return the text of an attack.toml of this format, tuned on a single picture."""
    compared = "{tuned = 0.5, standard = 0.4, p = 0.1}"
    return f"""
format = "{kind}"
gradveil = "0.1.0"
[attack]
{toml_lines(attack_table(attack))}
[tuning]
seed = 3
[cost]
tuned = 8
standard = 8
[gain]
n = 4
updates = 4
candidates = 20
lineup = {compared}
ssim = {compared}
[images]
tuned_on = ["{"0" * 64}"]
held_out = []
"""


@contextmanager
def two_cores(patch: pytest.MonkeyPatch, others: Iterable[float]) -> Iterator[None]:
    """Compute with two threads on two cores, of which others use so many at each count of them."""
    counts = iter(others)
    patch.setattr("gradveil.engine.device._OTHERS", lambda: next(counts))
    patch.setattr("os.cpu_count", lambda: 2)
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def refused(function: Callable[..., object], *arguments: Any, **more: Any) -> str:
    """Call the function, which must refuse its arguments in one line; return that line."""
    with pytest.raises(GradveilError) as caught:
        function(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)
