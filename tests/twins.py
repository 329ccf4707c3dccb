"""Models, victims and comparisons for the engine's fast ways and their slow twins, in float64."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor, nn

import toys
from gradveil.core.types import Gradients
from gradveil.models import names

CLASSES, SIZE = 5, 12


def victims(count: int, batch: int, seed: int = 0, size: int = SIZE) -> tuple[Tensor, Tensor]:
    rng = Generator().manual_seed(seed)
    images = torch.rand(count, batch, 3, size, size, generator=rng, dtype=torch.float64)
    return images, torch.randint(CLASSES, (count, batch), generator=rng)


def instances() -> nn.Module:
    """Layers of every kind that normalizes, with scale and shift, and without."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3),
        nn.InstanceNorm2d(4),
        nn.BatchNorm2d(4, affine=False),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.BatchNorm2d(4, momentum=None),
        nn.LayerNorm([3, 3]),
        nn.Flatten(2),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, CLASSES),
    )


class Twice(nn.Module):
    """Uses one batch norm twice, as a layer of a recurrent network would."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.norm(self.conv(self.norm(images).tanh()))
        logits: Tensor = self.head(maps.square().mean((2, 3)))
        return logits


class ByName(nn.Sequential):
    """Gives each layer its input by name, not by position."""

    def forward(self, images: Tensor) -> Tensor:
        for layer in self:
            images = layer(input=images)
        return images


def by_name(classes: int = CLASSES) -> nn.Module:
    return ByName(
        nn.Conv2d(3, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.LayerNorm(100),
        nn.Linear(100, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, classes),
    )


def zoo(name: str) -> nn.Module:
    return toys.narrow(partial(toys.built, name, 3, SIZE, CLASSES))


NETS: dict[str, Callable[[], nn.Module]] = {name: partial(zoo, name) for name in names()}
NETS |= {
    "resnet-18": partial(toys.resnet18, 3, CLASSES),
    "mobilenet": partial(toys.mobilenet, 3, CLASSES),
    "transformer": partial(toys.transformer, 3, SIZE, CLASSES),
    "instances": lambda: toys.seeded(instances).double(),
    "twice": lambda: toys.seeded(Twice).double(),
    "by name": lambda: toys.seeded(by_name).double(),
}


def apart(found: Tensor, expected: Tensor) -> float:
    """The distance of two tensors, relative to the expected one."""
    return float((found - expected).detach().norm() / expected.detach().norm())


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare to 1e-9; a tensor may vanish beside the others, as the bias before a norm does."""
    assert list(found) == list(expected)
    sizes = {name: float(value.detach().norm()) for name, value in expected.items()}
    for name, size in sizes.items():
        error = float((found[name] - expected[name]).detach().norm())
        assert error <= 1e-9 * size + 1e-13 * max(sizes.values()), name


def slope(engine: Callable[..., Gradients], guess: Tensor, labels: Tensor) -> Tensor:
    """The slope of a smooth function of all gradients that weighs each entry differently."""
    guess = guess.clone().requires_grad_()
    found = engine(guess, labels, differentiable=True)
    parts = [(g.square() + (3 * g).sin()).sum() for g in found.values()]
    return torch.autograd.grad(torch.stack(parts).sum(), guess)[0]
