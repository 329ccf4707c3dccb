"""Models by name: built-in architectures, or any factory that the user names."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from gradveil.core.errors import unknown
from gradveil.core.seeds import derived
from gradveil.models.base import Classifier, Normalize, Task
from gradveil.models.factories import Split, check_fit, check_weights_exist, find_factory, own_copy
from gradveil.models.normalized import NormalizedName, normalized
from gradveil.models.zoo import convnet, convnet_9, lenet, mlp, resnet20_4, vit

__all__ = [
    "ARCHITECTURES",
    "Classifier",
    "Normalize",
    "NormalizedName",
    "Task",
    "build",
    "build_for",
    "names",
    "normalized",
]

ARCHITECTURES: dict[str, Callable[[Task], tuple[nn.Sequential, nn.Linear]]] = {
    "resnet20-4": resnet20_4,
    "convnet": convnet,
    "convnet-9": convnet_9,
    "lenet": lenet,
    "mlp": mlp,
    "vit": vit,
}


def names() -> tuple[str, ...]:
    """Name the built-in models."""
    return tuple(ARCHITECTURES)


def build(
    name: str,
    *,
    channels: int,
    size: int,
    classes: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Build a model in training mode, on the CPU, for images in [0, 1] of channels x size x size.

    A built-in model normalizes its input by `mean` and `std` (no change where they are None). A
    name such as `package.module:factory` calls the user's factory; that model normalizes for
    itself, and `mean` and `std` do not reach it. The weights depend on `seed` alone: layers draw
    them from torch's global generator, so it is seeded here and put back as it was.
    """
    task = Task(channels, size, classes)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        named = ":" in name
        make = find_factory(name) if named else _architecture(name, Normalize(channels, mean, std))
        # After the import of a user's module, which may draw too.
        torch.default_generator.manual_seed(derived(seed, "weights"))
        return make(task)


def build_for(
    model: nn.Module | str | NormalizedName, split: Split, seed: int = 0, *, check: bool = True
) -> nn.Module:
    """Make a model for the images of this split: by its name, or a copy of the module given.

    With `check`, refuse a model that has nothing to train or does not give a logit for each class.
    """
    if isinstance(model, str):
        made, name = _built(model, split, seed), repr(model)
        check_weights_exist(made)
    elif isinstance(model, NormalizedName):
        made = model.around(_built(model.name, split, seed), split.channels)
        name = repr(model.name)
        check_weights_exist(made)
    else:
        made, name = own_copy(model), type(model).__name__
    if check:
        check_fit(made, split, name)
    return made


def _built(name: str, split: Split, seed: int) -> nn.Module:
    return build(
        name,
        channels=split.channels,
        size=split.size,
        classes=len(split.classes),
        mean=split.mean,
        std=split.std,
        seed=seed,
    )


def _architecture(name: str, normalize: Normalize) -> Callable[[Task], nn.Module]:
    if name not in ARCHITECTURES:
        raise unknown("model", name, (*ARCHITECTURES, "package.module:factory"))
    return lambda task: Classifier(normalize, *ARCHITECTURES[name](task))
