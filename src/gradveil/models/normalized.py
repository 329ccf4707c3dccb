"""Models that expect images their loader has normalized: the constants move into the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gradveil.core.boundary import check_fields, public
from gradveil.core.errors import GradveilError
from gradveil.core.text import read_number
from gradveil.models.base import Normalize
from gradveil.models.factories import own_copy

Constants = tuple[tuple[float, ...], tuple[float, ...]]

KNOWN: Mapping[str, Constants] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "half": ((0.5,), (0.5,)),
}
"""The means and standard deviations that loaders commonly normalize by, for each channel."""


class Normalized(nn.Module):
    """(images - mean) / std for each channel, then the model."""

    def __init__(self, normalize: Normalize, model: nn.Module) -> None:
        super().__init__()
        self.normalize, self.model = normalize, model
        self.training = model.training

    def forward(self, images: Tensor) -> Tensor:
        answers: Tensor = self.model(self.normalize(images))
        return answers


@dataclass(frozen=True)
class NormalizedName:
    """The name of a model, and the constants that its loader normalizes images by.

    There is a number for each channel, or one for all.
    """

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if ":" not in self.name:
            raise GradveilError(
                f"normalize: the model {self.name} normalizes by the mean and std of the data set; "
                "leave it out, or name a factory of yours, package.module:factory"
            )
        Normalize(max(len(self.mean), len(self.std)), self.mean, self.std)  # it checks them

    def around(self, model: nn.Module, channels: int) -> Normalized:
        """Return the model behind its normalization."""
        return Normalized(Normalize(channels, *spread(self.mean, self.std, channels)), model)

    @property
    def constants(self) -> str:
        """The constants as `read_constants` reads them."""
        return ",".join(f"{value:g}" for value in (*self.mean, *self.std))


def spread(mean: Sequence[float], std: Sequence[float], channels: int) -> Constants:
    """Return a number for each channel, where there is one for all."""
    found = [tuple(v) * channels if len(v) == 1 else tuple(v) for v in (mean, std)]
    return found[0], found[1]


@public
def normalized(
    model: nn.Module | str, mean: float | Sequence[float], std: float | Sequence[float]
) -> nn.Module | NormalizedName:
    """Put a loader's normalization into the model, so that it takes images in [0, 1].

    `model` is a module, which stays as it is, or `package.module:factory`. `mean` and `std` have a
    number for each channel, or one for all.
    """
    means, stds = (
        (float(value),) if isinstance(value, int | float) else tuple(map(float, value))
        for value in (mean, std)
    )
    if isinstance(model, str):
        return NormalizedName(model, means, stds)
    channels = max(len(means), len(stds))
    return Normalized(Normalize(channels, *spread(means, stds, channels)), own_copy(model))


def read_constants(text: str) -> Constants:
    """Read a name such as `imagenet`, `MEAN,STD`, or the means of all channels and their stds."""
    if text in KNOWN:
        return KNOWN[text]
    try:
        values = [read_number(part, float) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or len(values) % 2:
        raise GradveilError(
            f"normalize {text!r}: write MEAN,STD, such as 0.5,0.25, the means of all channels and "
            f"then the stds, or one of {', '.join(KNOWN)}"
        )
    half = len(values) // 2
    return tuple(values[:half]), tuple(values[half:])


def plain_name(model: nn.Module | str | NormalizedName) -> str:
    """Return the name of a model; of a module, that of its class."""
    if isinstance(model, NormalizedName):
        return model.name
    if isinstance(model, Normalized):
        return type(model.model).__name__
    return model if isinstance(model, str) else type(model).__name__


def constants_setting(model: object) -> dict[str, str]:
    """Return the setting `normalize` of a named model, as JSON has it; empty without any."""
    return {"normalize": model.constants} if isinstance(model, NormalizedName) else {}
