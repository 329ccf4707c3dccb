"""The gradient of a batch's mean loss, and the plain loop over victims.

The loop is the slow way that every faster one is tested against. Around them: checks of their
arguments, the model's mode for a while, and the normalization inside a model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.importing import RAISED, user_code
from gradveil.core.types import Gradients, Loss
from gradveil.engine.calls import before_use
from gradveil.engine.draws import Draws, given
from gradveil.engine.norms import Running

Frame = tuple[Tensor, Tensor]
"""(mean, std) of a model's normalization, each (C, 1, 1)."""

CONTRASTS = 1.0, 0.3, 0.1
"""Of the random images of a trial; on the first a trained model's local steps may overflow."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample, (batch,), for class indices or class probabilities."""
    return F.cross_entropy(logits, labels, reduction="none")


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let `scaled_dot_product_attention` have slopes of slopes, which its fused kernels lack.

    Its plain products give the same values up to rounding.
    """
    with sdpa_kernel(SDPBackend.MATH):
        yield


def gradient(
    model: nn.Module,
    loss: Loss,
    images: Tensor,
    labels: Tensor,
    *,
    differentiable: bool = False,
    running: Running | None = None,
) -> Gradients:
    """Return the gradient of the mean loss over one batch; zeros for an unused parameter.

    The model stays as it is: a layer in training mode updates copies of its running statistics.
    `running` follows them.
    """
    parameters = trainable(model)
    if not differentiable:
        images, labels = images.detach(), labels.detach()
    watching = nullcontext() if running is None else running.watch()
    with torch.enable_grad():
        with watching:
            logits = functional_call(model, copied_buffers(model), (images,))
        found = torch.autograd.grad(
            with_slope(per_sample(loss, logits, labels)).mean(),
            list(parameters.values()),
            create_graph=differentiable,
            materialize_grads=True,
        )
    return dict(zip(parameters, found, strict=True))


def try_pass(model: nn.Module, images: Tensor, failing: str) -> Tensor:
    """Return the logits of these images in the model's present mode; the model may be anyone's.

    Refuse a model that fails (the line starts with `failing`), that changes the images or its
    weights, or whose answers are no real numbers with a gradient. Running statistics stay as they
    are.
    """
    name = f"model {type(model).__name__}"
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    weights = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    given = images.detach().clone()
    try:
        with user_code(failing, torch.OutOfMemoryError), torch.enable_grad():
            found: object = functional_call(model, buffers, (given,))
    except GradveilError as error:
        taken = _channels_taken(model, images)
        if taken is None:
            raise
        raise GradveilError(
            f"{error}; it takes images of {taken} channel(s): give channels {taken}"
        ) from error
    if not isinstance(found, Tensor) or found.layout != torch.strided:
        got = f"a {found.layout} tensor" if isinstance(found, Tensor) else kind_of(found)
        raise GradveilError(
            f"{name} gives {got} for images of shape {tuple(images.shape)}: "
            "expected a tensor of logits; wrap the model in a module that returns these alone"
        )
    if not found.is_floating_point():
        raise GradveilError(
            f"{name} gives values of type {found.dtype}: expected logits, floating point"
        )
    if not torch.equal(given.nan_to_num(), images.detach().nan_to_num()):
        raise GradveilError(
            f"{name} changes its images in place, and with them the caller's: let forward work on "
            "new tensors, such as x = x * 2 in place of x *= 2"
        )
    now = dict(model.named_parameters())
    for key, weight in weights.items():
        if not torch.equal(weight.nan_to_num(), now[key].detach().nan_to_num()):
            raise GradveilError(f"{name} changes its {key!r} in forward: it has no gradient")
    if not found.requires_grad:
        raise GradveilError(
            f"{name}: no gradient flows from its answers to its weights, so nothing can be shared; "
            "forward must not use no_grad, inference_mode, detach or numpy"
        )
    return found


def _channels_taken(model: nn.Module, images: Tensor) -> int | None:
    """Return the number of channels, 1 or 3, of images that the model does not fail on."""
    if images.dim() != 4 or images.shape[1] not in OTHER_CHANNELS:
        return None
    other = OTHER_CHANNELS[images.shape[1]]
    planes = images.detach()[:, :1].repeat(1, other, 1, 1)
    with suppress(*RAISED), torch.no_grad():
        functional_call(model, {k: b.clone() for k, b in model.named_buffers()}, (planes,))
        return other
    return None


OTHER_CHANNELS = {1: 3, 3: 1}  # gray, color


def loop_gradients(
    model: nn.Module,
    loss: Loss,
    images: Tensor,
    labels: Tensor,
    *,
    draws: Draws | None = None,
    differentiable: bool = False,
    running: Running | None = None,
) -> Gradients:
    """Return the gradient of each victim's mean loss, one victim after the other.

    Images (victims, batch, ...) give tensors (victims, *parameter shape). `draws` are
    (victims, batch, ...) for each module that does not draw itself. `running` follows the
    statistics of normalization layers.
    """
    check_victims(images, labels)
    each, kept = [], [None if running is None else Running(model) for _ in images]
    for victim, (x, y) in enumerate(zip(images, labels, strict=True)):
        with given(model, {name: value[victim] for name, value in (draws or {}).items()}):
            each.append(
                gradient(model, loss, x, y, differentiable=differentiable, running=kept[victim])
            )
    if running is not None:
        running.take([its for its in kept if its is not None])
    return {name: torch.stack([found[name] for found in each]) for name in each[0]}


def loop_inputs(model: nn.Module, images: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return what goes into each of these layers at its last use, one victim after the other.

    Images are (victims, batch, ...), and so are the results. The model's buffers stay as they are.
    """
    each = []
    for victim in images:
        made: dict[nn.Module, Tensor] = {}

        handles = [before_use(layer, made.__setitem__) for layer in layers]
        try:
            functional_call(model, copied_buffers(model), (victim,))
        finally:
            for handle in handles:
                handle.remove()
        each.append([made[layer] for layer in layers])
    return [torch.stack(parts) for parts in zip(*each, strict=True)]


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
    if len(logits) != len(labels):
        raise GradveilError(
            f"the model gave {len(logits)} answer(s) for {len(labels)} image(s): expected one each"
        )
    losses: object = loss(logits, labels)
    if not isinstance(losses, Tensor) or losses.is_complex():
        got = f"values of type {losses.dtype}" if isinstance(losses, Tensor) else kind_of(losses)
        raise GradveilError(f"the loss gave {got}: expected a tensor with a real number a sample")
    if losses.shape != logits.shape[:1]:
        raise GradveilError(
            f"the loss gave shape {tuple(losses.shape)} for {len(logits)} sample(s): "
            "expected one value each, unreduced, such as reduction='none' gives"
        )
    return losses


def with_slope(losses: Tensor) -> Tensor:
    """Return the losses; refuse those that autograd cannot follow back to the weights."""
    if not losses.requires_grad:
        raise GradveilError(
            "no gradient flows from the loss to the weights: neither the model's forward nor the "
            "loss may use no_grad, detach, numpy or whole numbers"
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
        if any(flag != training for flag in before.values()):  # it takes a while, and is rarely so
            model.train(training)
        yield
    finally:
        for module, flag in before.items():
            if module.training != flag:
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


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copy the buffers of the modules in training mode, by name."""
    training = [(prefix, module) for prefix, module in model.named_modules() if module.training]
    return {
        f"{prefix}.{name}" if prefix else name: buffer.clone()
        for prefix, module in training
        for name, buffer in module.named_buffers(recurse=False)
    }


def first_finite(
    tried: Callable[[Tensor], tuple[Tensor, ...]], like: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return what a trial gives on random images of the shape of `like`, and these images.

    They are of the first of `CONTRASTS` on which all that it gives is finite, else of the last.
    """
    noise = torch.rand(like.shape, generator=Generator().manual_seed(0)).to(like)
    for contrast in CONTRASTS:
        guess = noise if contrast == 1 else 0.5 + contrast * (noise - 0.5)
        found = tried(guess)
        if are_finite(found):
            break
    return found, guess


def are_finite(parts: Sequence[Tensor]) -> bool:
    """Tell whether all numbers of these tensors are finite."""
    return all(bool(part.isfinite().all()) for part in parts)
