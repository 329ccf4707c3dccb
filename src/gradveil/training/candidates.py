"""The model of a run, tried on two images before anything is written."""

import copy

import torch
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.data import Images
from gradveil.models import build


def candidate(name: str, split: Images, seed: int) -> nn.Module:
    """A new model for these images. One that cannot be trained on them is refused: a user's own may be anything."""
    model = build(
        name,
        channels=split.channels,
        size=split.size,
        classes=len(split.classes),
        mean=split.mean,
        std=split.std,
        seed=seed,
    )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise GradveilError(f"model {name!r} has no parameters to train")
    images = split.images[:2].float() / 255
    given, wanted = _output_shape(name, model, images), (len(images), len(split.classes))
    if given != wanted:
        raise GradveilError(f"model {name!r} gives {given} for images of shape {tuple(images.shape)}: expected {wanted}, a logit per class")
    return model


def _output_shape(name: str, model: nn.Module, images: torch.Tensor) -> tuple[int, ...]:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return tuple(copy.deepcopy(model).eval()(images).shape)  # a copy: its own modes and statistics stay as they are
    except Exception as error:
        raise GradveilError(f"model {name!r} fails on images of shape {tuple(images.shape)}: {type(error).__name__}: {error}") from error
