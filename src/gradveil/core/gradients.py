"""The one gradient function, and the plain loop over victims that every faster way is tested against."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.draws import Draws, given
from gradveil.core.errors import GradveilError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits, class indices or class probabilities) -> one value for each sample."""

Gradients = dict[str, Tensor]
"""One tensor for each parameter that requires a gradient, by name, in the order of `model.named_parameters()`."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def gradient(model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, *, differentiable: bool = False) -> Gradients:
    """Of the mean loss over one batch. A parameter that plays no part gets zeros.

    The model stays as it is: running statistics that a layer in training mode would update are updated on a copy.
    """
    parameters = trainable(model)
    if not differentiable:
        images, labels = images.detach(), labels.detach()
    with torch.enable_grad():
        losses = per_sample(loss, functional_call(model, _own_copies(model), (images,)), labels)
        found = torch.autograd.grad(losses.mean(), list(parameters.values()), create_graph=differentiable, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def loop_gradients(
    model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, *, draws: Draws | None = None, differentiable: bool = False
) -> Gradients:
    """Of each victim's mean loss, one victim after the other: images (victims, batch, ...) give tensors (victims, *parameter shape).

    `draws` are (victims, batch, ...) for each module that does not draw itself.
    """
    check_victims(images, labels)
    each = []
    for victim, (x, y) in enumerate(zip(images, labels, strict=True)):
        with given(model, {name: value[victim] for name, value in (draws or {}).items()}):
            each.append(gradient(model, loss, x, y, differentiable=differentiable))
    return {name: torch.stack([found[name] for found in each]) for name in each[0]}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that gradients are shared for."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise GradveilError(f"{type(model).__name__} has no parameter that requires a gradient: there is nothing to share")
    return parameters


def per_sample(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss values, which must not be reduced: a mean over the batch would mix victims."""
    losses = loss(logits, labels)
    if losses.shape != logits.shape[:1]:
        raise GradveilError(f"the loss gave shape {tuple(losses.shape)} for {len(logits)} sample(s): expected one value each, unreduced")
    return losses


def check_victims(images: Tensor, labels: Tensor) -> None:
    """Refuse what is not floating-point (victims, batch, ...) images with labels (victims, batch) or (victims, batch, classes)."""
    shapes = f"images of shape {tuple(images.shape)} and labels of shape {tuple(labels.shape)}"
    if images.dim() < 3 or labels.dim() not in (2, 3) or images.shape[:2] != labels.shape[:2]:
        raise GradveilError(f"{shapes}: both must start with (victims, batch); for one image each, use images[:, None] and labels[:, None]")
    if 0 in images.shape:
        raise GradveilError(f"{shapes}: there is no victim, or an empty one")
    if not images.is_floating_point():
        raise GradveilError(f"images of type {images.dtype}: expected floating point, in [0, 1]")


def _own_copies(model: nn.Module) -> dict[str, Tensor]:
    training = [(prefix, module) for prefix, module in model.named_modules() if module.training]
    return {
        f"{prefix}.{name}" if prefix else name: buffer.clone()
        for prefix, module in training
        for name, buffer in module.named_buffers(recurse=False)
    }
