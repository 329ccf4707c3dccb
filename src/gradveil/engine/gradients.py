"""The gradient of a batch's mean loss, and the plain loop over victims.

The loop is the slow way that every faster one is tested against. Around them: checks of their
arguments, the model's mode for a while, and the normalization inside a model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import GradveilError
from gradveil.core.types import Gradients, Loss
from gradveil.engine.draws import Draws, given

Frame = tuple[Tensor, Tensor]
"""(mean, std) of a model's normalization, each (C, 1, 1)."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample, (batch,), for class indices or class probabilities."""
    return F.cross_entropy(logits, labels, reduction="none")


def gradient(
    model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, *, differentiable: bool = False
) -> Gradients:
    """Return the gradient of the mean loss over one batch; zeros for an unused parameter.

    The model stays as it is: a layer in training mode updates copies of its running statistics.
    """
    parameters = trainable(model)
    if not differentiable:
        images, labels = images.detach(), labels.detach()
    with torch.enable_grad():
        logits = functional_call(model, _copied_buffers(model), (images,))
        found = torch.autograd.grad(
            per_sample(loss, logits, labels).mean(),
            list(parameters.values()),
            create_graph=differentiable,
            materialize_grads=True,
        )
    return dict(zip(parameters, found, strict=True))


def loop_gradients(
    model: nn.Module,
    loss: Loss,
    images: Tensor,
    labels: Tensor,
    *,
    draws: Draws | None = None,
    differentiable: bool = False,
) -> Gradients:
    """Return the gradient of each victim's mean loss, one victim after the other.

    Images (victims, batch, ...) give tensors (victims, *parameter shape). `draws` are
    (victims, batch, ...) for each module that does not draw itself.
    """
    check_victims(images, labels)
    each = []
    for victim, (x, y) in enumerate(zip(images, labels, strict=True)):
        with given(model, {name: value[victim] for name, value in (draws or {}).items()}):
            each.append(gradient(model, loss, x, y, differentiable=differentiable))
    return {name: torch.stack([found[name] for found in each]) for name in each[0]}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the parameters that gradients are shared for."""
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    if not parameters:
        raise GradveilError(
            f"{type(model).__name__} has no parameter that requires a gradient: "
            "there is nothing to share"
        )
    return parameters


def per_sample(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample; refuse a reduced one, which would mix victims."""
    losses = loss(logits, labels)
    if losses.shape != logits.shape[:1]:
        raise GradveilError(
            f"the loss gave shape {tuple(losses.shape)} for {len(logits)} sample(s): "
            "expected one value each, unreduced"
        )
    return losses


def check_victims(images: Tensor, labels: Tensor) -> None:
    """Refuse all but floats (victims, batch, ...) and labels (victims, batch[, classes])."""
    shapes = f"images of shape {tuple(images.shape)} and labels of shape {tuple(labels.shape)}"
    if images.dim() < 3 or labels.dim() not in (2, 3) or images.shape[:2] != labels.shape[:2]:
        raise GradveilError(
            f"{shapes}: both must start with (victims, batch); "
            "for one image each, use images[:, None] and labels[:, None]"
        )
    if 0 in images.shape:
        raise GradveilError(f"{shapes}: there is no victim, or an empty one")
    if not images.is_floating_point():
        raise GradveilError(f"images of type {images.dtype}: expected floating point, in [0, 1]")


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model into training or eval mode for a while, then each module's flag back."""
    before = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        yield
    finally:
        for module, flag in before.items():
            module.training = flag


def pixel_frame(model: nn.Module, image_shape: tuple[int, int, int]) -> Frame:
    """Return the mean and std that the model normalizes by, or zeros and ones where it does not.

    They belong to the first module, in the order of registration, whose only buffers are `mean`
    and `std`, each a single number or a number for each channel.
    """
    channels = image_shape[0]
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if buffers.keys() == {"mean", "std"} and all(
            buffer.numel() in (1, channels) for buffer in buffers.values()
        ):
            mean, std = (
                buffers[name].detach().reshape(-1, 1, 1).expand(channels, 1, 1)
                for name in ("mean", "std")
            )
            return mean, std
    like = next(model.parameters(), torch.zeros(()))
    return torch.zeros(channels, 1, 1).to(like), torch.ones(channels, 1, 1).to(like)


def _copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copy the buffers of the modules in training mode, by name."""
    training = [(prefix, module) for prefix, module in model.named_modules() if module.training]
    return {
        f"{prefix}.{name}" if prefix else name: buffer.clone()
        for prefix, module in training
        for name, buffer in module.named_buffers(recurse=False)
    }
