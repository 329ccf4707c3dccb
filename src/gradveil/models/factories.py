"""Models for given images: built in, made by a user's factory, or a user's own module."""

import copy
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.importing import current_folder_importable, import_named, user_code
from gradveil.engine.gradients import trainable, try_pass
from gradveil.models.base import Task


class Split(Protocol):
    """What a model must know of the images that it is for; `data.Images` has all of it."""

    @property
    def images(self) -> Tensor:
        """The images, uint8 (N, C, H, W)."""

    @property
    def channels(self) -> int:
        """The number of planes of an image."""

    @property
    def size(self) -> int:
        """The pixels of a side."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes."""

    @property
    def mean(self) -> Sequence[float]:
        """The mean of each channel, in [0, 1]."""

    @property
    def std(self) -> Sequence[float]:
        """The standard deviation of each channel."""


def find_factory(reference: str) -> Callable[[Task], nn.Module]:
    """Return a function that makes the model of a user's factory, `package.module:factory`.

    The factory is called with the numbers of channels, pixels of a side and classes that it takes
    as keywords, by any of the names in `KEYWORDS`. A module in place of a factory is copied. It may
    lie in the current folder. The model gets images in [0, 1] and normalizes them itself.
    """
    factory = _load(reference)

    def make(task: Task) -> nn.Module:
        if isinstance(factory, nn.Module):
            return own_copy(factory)
        with user_code(f"model {reference!r} could not be made"), current_folder_importable():
            model = _called(factory, task)
        if not isinstance(model, nn.Module):
            raise GradveilError(
                f"model {reference!r} gave {kind_of(model)}: "
                "the factory must return a torch.nn.Module"
            )
        return model

    return make


def own_copy(model: object) -> nn.Module:
    """Copy a user's module, so that the user's stays as it is; refuse what is none."""
    if not isinstance(model, nn.Module):
        raise GradveilError(
            f"model: {kind_of(model)}; expected a torch.nn.Module, the name of a model, "
            "or package.module:factory"
        )
    check_weights_exist(model)
    with user_code(f"model {type(model).__name__} cannot be copied"):
        copied = copy.deepcopy(model)
    if not isinstance(copied, nn.Module):
        raise GradveilError(f"model {type(model).__name__}: its copy is {kind_of(copied)}")
    return copied


def check_weights_exist(model: nn.Module) -> None:
    """Refuse weights that are still to be made (lazy layers, the meta device) or are complex."""
    kind = type(model).__name__
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise GradveilError(f"model {kind}: give the module that it wraps, model.module")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise GradveilError(
                f"model {kind}: {name!r} has no shape yet; pass one batch through the model first"
            )
        if value.is_meta:
            raise GradveilError(
                f"model {kind}: {name!r} has no values (device meta); load its weights first"
            )
        if value.is_complex():
            raise GradveilError(f"model {kind}: {name!r} is complex; expected real weights")


def check_fit(model: nn.Module, split: Split, name: str, more: int = 0) -> None:
    """Refuse a model that has nothing to train, or gives no logit for each class of the split.

    `more` columns are expected beside the logits.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise GradveilError(f"model {name} has no parameters to train")
    images = split.images[:2].float() / 255
    shape, wanted = tuple(images.shape), (len(images), len(split.classes) + more)
    given = logits(model, images, name)
    if tuple(given.shape) != wanted:
        raise GradveilError(
            f"model {name} gives {tuple(given.shape)} for images of shape {shape}: "
            f"expected {wanted}, a logit per class"
        )


def logits(model: nn.Module, images: Tensor, name: str) -> Tensor:
    """Return what a copy of the model answers in eval mode; see `try_pass` for refusals."""
    example = next(iter(trainable(model).values()))
    with torch.random.fork_rng(devices=[]):
        with user_code(f"model {name} cannot be copied"):
            copied = copy.deepcopy(model).eval()
        failing = f"model {name} fails on images of shape {tuple(images.shape)}"
        return try_pass(copied, images.to(example), failing).detach()


def _load(reference: str) -> Callable[..., object] | nn.Module:
    factory = import_named(reference, "model")
    if not callable(factory):
        raise GradveilError(
            f"model {reference!r} is {kind_of(factory)}: name a module, or a function or class "
            "that makes one when called"
        )
    found: Callable[..., object] = factory
    return found


KEYWORDS: dict[str, tuple[str, ...]] = {
    "channels": (
        *("channels", "in_channels", "num_channels", "n_channels", "in_chans"),
        *("input_channels", "image_channels"),
    ),
    "size": ("size", "image_size", "img_size", "input_size", "resolution"),
    "classes": (
        *("classes", "num_classes", "n_classes", "nb_classes", "class_num", "num_labels"),
        *("n_labels", "num_outputs", "out_classes"),
    ),
}
"""The names by which factories take a fact of the task."""


def _called(factory: Callable[..., object], task: Task) -> object:
    """Call the factory with what it takes.

    One that takes any keyword hands them on to another: what that refuses is offered by the next
    name, then left out.
    """
    parameters = inspect.signature(factory).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    offers = {
        fact: [name for name in known if name in names] or (list(known) if anything else [])
        for fact, known in KEYWORDS.items()
    }
    while True:
        given = {offer[0]: getattr(task, fact) for fact, offer in offers.items() if offer}
        try:
            return factory(**given)
        except TypeError as error:
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            name = refused[1] if refused else ""
            if name not in given or name in names:
                raise
            next(offer for offer in offers.values() if offer[:1] == [name]).pop(0)
