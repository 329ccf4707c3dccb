"""The model of a run and its defense, tried on two images before anything is written."""

import copy
import warnings

import torch
from torch import nn

from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.data import Images
from gradveil.defenses import Defense
from gradveil.models import build
from gradveil.training.defended import DefendedStep, Objective, acts_on


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


def protected(model: nn.Module, defense: Defense, split: Images) -> nn.Module:
    """The model that is trained under this defense."""
    return defense.protect_model(model, (split.channels, split.size, split.size))


def try_defense(name: str, model: nn.Module, defense: Defense, split: Images) -> None:
    """Refuse a defense that cannot change the gradients of this model, in a training step of a copy."""
    if not acts_on(defense, "gradients"):
        return
    tried, batch = copy.deepcopy(model).train(), Batch(split.images[:2].float() / 255, split.labels[:2])
    step = DefendedStep(
        tried, Objective.of(defense, 1.0), torch.optim.SGD(tried.parameters(), lr=0), False, defense, lambda: generator(0, "trial")
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore", category=GradveilWarning):  # the run will say it
            step(batch)
    except GradveilError:
        raise
    except Exception as error:
        raise GradveilError(f"model {name!r} cannot be trained with defense {defense}: {one_line(error)}") from error


def _output_shape(name: str, model: nn.Module, images: torch.Tensor) -> tuple[int, ...]:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return tuple(copy.deepcopy(model).eval()(images).shape)  # a copy: its own modes and statistics stay as they are
    except Exception as error:
        raise GradveilError(f"model {name!r} fails on images of shape {tuple(images.shape)}: {type(error).__name__}: {error}") from error
