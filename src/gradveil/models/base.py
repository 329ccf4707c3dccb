"""The parts of every built-in model: its task, its normalization, the frame around its layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError


@dataclass(frozen=True)
class Task:
    """Square images of channels x size x size pixels, to be told apart into `classes`."""

    channels: int
    size: int
    classes: int

    def __post_init__(self) -> None:
        least_of = {"channels": 1, "size": 1, "classes": 2}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value < least:
                raise GradveilError(f"{name} is {value}: a model needs at least {least}")

    def at_least(self, size: int, model: str) -> None:
        """Refuse images too small for an architecture."""
        if self.size < size:
            raise GradveilError(
                f"size is {self.size}: {model} needs images of at least {size} x {size} pixels"
            )


class Normalize(nn.Module):
    """(x - mean) / std for each channel; the constants are saved with the weights."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, channels: int, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        mean = [0.0] * channels if mean is None else mean
        std = [1.0] * channels if std is None else std
        self.register_buffer("mean", _constants("mean", mean, channels))
        self.register_buffer("std", _constants("std", std, channels))
        if not bool((self.std > 0).all()):
            raise GradveilError(
                f"std is {self.std.flatten().tolist()}: every value must be above 0"
            )

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


class Mean(nn.Module):
    """The mean over some dimensions: global average pooling."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, values: Tensor) -> Tensor:
        return values.mean(dim=self.dims)


class Classifier(nn.Module):
    """Images in [0, 1] > `normalize` > `features`, a flat vector per image > `head` > logits."""

    def __init__(self, normalize: Normalize, features: nn.Sequential, head: nn.Module) -> None:
        super().__init__()
        self.normalize = normalize
        self.features = features
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(self.normalize(images)))
        return logits


def _constants(name: str, values: Sequence[float], channels: int) -> Tensor:
    if len(values) != channels or not all(map(math.isfinite, values)):
        raise GradveilError(
            f"{name} is {list(values)}: "
            f"expected one finite number for each of {channels} channel(s)"
        )
    return torch.tensor([float(value) for value in values]).view(1, channels, 1, 1)
