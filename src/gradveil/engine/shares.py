"""The update a client shares, as a function of its images.

The client calls it on the true images, an attacker on a guess. `Shares` is that function for a
protocol of one step (a gradient) or several (`LocalUpdates`), for many victims at once where the
model allows it, else for one victim at a time after a warning.
"""

import copy
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.seeds import forked
from gradveil.core.types import Gradients, Loss, Protocol
from gradveil.engine.batched import BatchedGradients, NotBatchableError
from gradveil.engine.draws import Draws
from gradveil.engine.gradients import (
    check_victims,
    in_mode,
    loop_gradients,
    per_sample,
    trainable,
    try_pass,
    with_slope,
)
from gradveil.engine.layers import BATCH_NORMS
from gradveil.engine.products import Aim, DotAndSquare

NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class Shares:
    """What each victim shares: images (victims, batch, ...) give (victims, *parameter shape).

    Build it once for a model, a loss and a protocol: the first call tries the model out. Each call
    puts the model into the protocol's mode, and then each module back into its mode before.
    Without a protocol one step is shared, in the mode the model is in. `short` allows shorter
    number formats on a GPU (see `BatchedGradients`). `told` names the modules whose draws come
    with each call.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        protocol: Protocol | None = None,
        *,
        short: bool = False,
        told: Collection[str] = (),
    ) -> None:
        self._model, self._loss, self._protocol = model, loss, protocol
        self._batched = BatchedGradients(model, loss, short=short, told=told)
        self._updates: LocalUpdates | None = None
        self._warned = False
        if protocol is not None and protocol.local_steps > 1:
            if told:
                raise GradveilError(
                    f"{protocol.local_steps} local steps draw anew at each: "
                    "draws can be given for 1 step alone"
                )
            self._updates = LocalUpdates(model, loss, protocol)

    @property
    def why_not(self) -> str | None:
        """The reason why victims are taken one at a time, in one line; None where none is known."""
        with self._mode():
            return self._batched.why_not if self._updates is None else self._updates.why_not

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> Gradients:
        """Return (victims, *parameter shape) by name.

        Labels are (victims, batch), or class probabilities (victims, batch, classes); draws are
        (victims, batch, ...).
        """
        with self._mode():
            if self._updates is not None:
                return self._updates(images, labels, differentiable=differentiable)
            try:
                return self._batched(images, labels, draws=draws, differentiable=differentiable)
            except NotBatchableError as reason:
                self._warn(reason)
            return self._loop(images, labels, draws, differentiable)

    def compare(
        self,
        images: Tensor,
        labels: Tensor,
        aim: Aim,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> DotAndSquare:
        """Return the shares' inner products with the aim and with themselves, (victims,) each.

        They are all that a cosine needs.
        """
        if self._updates is not None:
            return aim.pair(self(images, labels, differentiable=differentiable))
        with self._mode():
            try:
                return self._batched.compare(
                    images, labels, aim, draws=draws, differentiable=differentiable
                )
            except NotBatchableError as reason:
                self._warn(reason)
            return aim.pair(self._loop(images, labels, draws, differentiable))

    def check(self, images: Tensor, classes: int) -> None:
        """Refuse a model that does not turn a batch of such images into a logit for each class."""
        taken = f"{type(self._model).__name__} and images of shape {tuple(images.shape)}"
        with self._mode():
            logits = try_pass(self._model, images, f"{taken} do not fit")
        if logits.shape != (len(images), classes):
            raise GradveilError(
                f"{taken}: the model gave shape {tuple(logits.shape)}; expected "
                f"{(len(images), classes)}, one logit for each of {classes} classes"
            )

    def _mode(self) -> AbstractContextManager[None]:
        if self._protocol is None:
            return nullcontext()
        return in_mode(self._model, self._protocol.train_mode)

    def _loop(
        self, images: Tensor, labels: Tensor, draws: Draws | None, differentiable: bool
    ) -> Gradients:
        return loop_gradients(
            self._model, self._loss, images, labels, draws=draws, differentiable=differentiable
        )

    def _warn(self, reason: NotBatchableError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{reason}; taking them one at a time, which is slow", GradveilWarning, stacklevel=3
            )


class LocalUpdates:
    """(W_0 - W_k) / rate after k local steps, (victims, *parameter shape).

    All victims go in one pass, each with its weights, or one by one after a warning.
    """

    def __init__(self, model: nn.Module, loss: Loss, protocol: Protocol) -> None:
        self._settings = model, loss, protocol
        self._tried = self._warned = False
        self._mismatch: str | None = None

    @property
    def why_not(self) -> str | None:
        """The reason why victims go one by one, in one line; None where none is known.

        It is read anew each time, since a model may change its mode; a failed trial is remembered.
        """
        return _batch_statistics(self._settings[0]) or self._mismatch

    def __call__(
        self, images: Tensor, labels: Tensor, *, differentiable: bool = False
    ) -> Gradients:
        check_victims(images, labels)
        if not self._tried and self.why_not is None:
            self._mismatch = _trial(*self._settings, images, labels)
            self._tried = True
        if (reason := self.why_not) is None:
            return batched_updates(*self._settings, images, labels, differentiable=differentiable)
        # Before the warning: where the input is to blame, the error shows here, and alone.
        found = loop_updates(*self._settings, images, labels, differentiable=differentiable)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the local steps of these victims cannot be batched: {reason}; "
                "taking them one at a time, which is slow",
                GradveilWarning,
                stacklevel=3,
            )
        return found


def batched_updates(
    model: nn.Module,
    loss: Loss,
    protocol: Protocol,
    images: Tensor,
    labels: Tensor,
    *,
    differentiable: bool = False,
) -> Gradients:
    """Return the updates of all victims at once; random layers draw anew for each victim.

    Where `torch.vmap` cannot follow the model, its error is raised.
    """
    start = {name: parameter.detach() for name, parameter in trainable(model).items()}
    buffers = {
        name: torch.stack([buffer] * len(images)) for name, buffer in _changing(model).items()
    }

    def mean_loss(weights: Gradients, buffers: Gradients, images: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(model, {**buffers, **weights}, (images,))
        return per_sample(loss, logits, labels).mean()

    def of_victim(buffers: Gradients, images: Tensor, labels: Tensor) -> Gradients:
        return _descend(
            protocol, start, lambda weights: grad(mean_loss)(weights, buffers, images, labels)
        )

    if not differentiable:
        images, labels = images.detach(), labels.detach()
    with torch.set_grad_enabled(differentiable):
        found: Gradients = vmap(of_victim, randomness="different")(buffers, images, labels)
    return found


def loop_updates(
    model: nn.Module,
    loss: Loss,
    protocol: Protocol,
    images: Tensor,
    labels: Tensor,
    *,
    differentiable: bool = False,
) -> Gradients:
    """Return the updates of one victim after the other, by plain autograd."""
    start = {name: parameter.detach() for name, parameter in trainable(model).items()}

    def of_victim(images: Tensor, labels: Tensor) -> Gradients:
        buffers = {name: buffer.clone() for name, buffer in _changing(model).items()}

        def gradient_at(weights: Gradients) -> Gradients:
            weights = {
                name: weight if weight.requires_grad else weight.detach().requires_grad_()
                for name, weight in weights.items()
            }
            logits = functional_call(model, {**buffers, **weights}, (images,))
            slopes = torch.autograd.grad(
                with_slope(per_sample(loss, logits, labels)).mean(),
                list(weights.values()),
                create_graph=differentiable,
                materialize_grads=True,
            )
            return dict(zip(weights, slopes, strict=True))

        return _descend(protocol, start, gradient_at)

    if not differentiable:
        images, labels = images.detach(), labels.detach()
    with torch.enable_grad():
        each = [of_victim(x, y) for x, y in zip(images, labels, strict=True)]
    return {name: torch.stack([found[name] for found in each]) for name in start}


def _descend(
    protocol: Protocol, start: Gradients, gradient_at: Callable[[Gradients], Gradients]
) -> Gradients:
    """Return g_1 + ... + g_k, which is (W_0 - W_k) / rate without the difference's rounding.

    The steps are W_i = W_0 - rate (g_1 + ... + g_i).
    """
    summed = gradient_at(start)
    for _ in range(protocol.local_steps - 1):
        weights = {name: start[name] - protocol.local_lr * summed[name] for name in start}
        summed = {name: summed[name] + slope for name, slope in gradient_at(weights).items()}
    return summed


def _trial(
    model: nn.Module, loss: Loss, protocol: Protocol, images: Tensor, labels: Tensor
) -> str | None:
    """Say how batching fails on a random victim of a float64 copy of the model, or return None.

    Both ways get the same draws. Slopes are compared too: torch has batching rules whose values are
    right and whose second derivatives are off by a few 1e-4.
    """
    target = labels.detach()[:1, :2]
    target = target.double() if target.is_floating_point() else target
    guess = torch.rand(images[:1, :2].shape, generator=Generator().manual_seed(0))
    guess = guess.to(images.device, torch.float64).requires_grad_()
    found: list[tuple[Tensor, ...]] = []
    try:
        copied, few = copy.deepcopy(model).double(), replace(protocol, local_steps=2)
        for way in (loop_updates, batched_updates):
            with forked(), torch.enable_grad():
                torch.manual_seed(0)
                updates = way(copied, loss, few, guess, target, differentiable=True)
                values = torch.cat([value.flatten() for value in updates.values()])
                found.append((values.detach(), *torch.autograd.grad(values.square().sum(), guess)))
    except Exception as error:
        return f"a trial by torch.vmap failed with {one_line(error, 200)}"
    if not all(bool(part.isfinite().all()) for part in found[0]):
        return "a trial gave values that are not finite"
    in_values, in_slopes = (
        float((batched - plain).norm() / plain.norm().clamp_min(1e-30))
        for plain, batched in zip(*found, strict=True)
    )
    if max(in_values, in_slopes) < 1e-7:
        return None
    return (
        f"in a trial torch.vmap was off by {in_values:.1e} in values and by {in_slopes:.1e} "
        "in slopes"
    )


def _batch_statistics(model: nn.Module) -> str | None:
    """Name the first normalization that uses the batch's statistics; None without any."""
    for name, module in model.named_modules():
        if isinstance(module, NORMS) and (module.training or module.running_mean is None):
            return (
                f"{name or 'the model'} ({type(module).__name__}) takes its statistics from the "
                "batch, and torch.vmap gets their second derivatives wrong"
            )
    return None


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a pass in training mode may change, such as running statistics."""
    return dict(model.named_buffers()) if model.training else {}
