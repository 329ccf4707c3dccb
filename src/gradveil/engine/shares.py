"""What a client shares, as one function of its images: the client calls it on the true ones, the attacker on a guess."""

import copy
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _NormBase

from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.seeds import forked
from gradveil.core.types import Gradients, Loss, Protocol
from gradveil.engine.batched import BatchedGradients, NotBatchableError
from gradveil.engine.draws import Draws
from gradveil.engine.gradients import check_victims, in_mode, loop_gradients, per_sample, trainable
from gradveil.engine.products import Aim, Pair


class VictimGradients:
    """Batched where possible; else one victim at a time, after one warning that says why. Keep it: its first call tries the model out."""

    def __init__(
        self, model: nn.Module, loss: Loss, *, short: bool = False, told: Collection[str] = ()
    ) -> None:
        self._model, self._loss = model, loss
        self._batched = BatchedGradients(model, loss, short=short, told=told)
        self._warned = False

    @property
    def why_not(self) -> str | None:
        """Why the slow way is taken, as far as is known."""
        return self._batched.why_not

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> Gradients:
        """Of each victim's mean loss: images (victims, batch, ...) give tensors (victims, *parameter shape)."""
        try:
            return self._batched(images, labels, draws=draws, differentiable=differentiable)
        except NotBatchableError as reason:
            self._warn(reason)
        return loop_gradients(
            self._model, self._loss, images, labels, draws=draws, differentiable=differentiable
        )

    def compare(
        self,
        images: Tensor,
        labels: Tensor,
        aim: Aim,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> Pair:
        """Their inner products with the aim and with themselves."""
        try:
            return self._batched.compare(
                images, labels, aim, draws=draws, differentiable=differentiable
            )
        except NotBatchableError as reason:
            self._warn(reason)
        return aim.pair(
            loop_gradients(
                self._model, self._loss, images, labels, draws=draws, differentiable=differentiable
            )
        )

    def _warn(self, reason: NotBatchableError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{reason}; taking them one at a time, which is slow", GradveilWarning, stacklevel=3
            )


def victim_gradients(
    model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, *, differentiable: bool = False
) -> Gradients:
    """For a single use; an attack that asks again and again should keep a `VictimGradients`."""
    return VictimGradients(model, loss)(images, labels, differentiable=differentiable)


class Shares:
    """Built once for a model, a loss and a protocol, then called with images (victims, batch, ...) and their labels.

    Each call puts the model into the protocol's mode, and afterwards each of its modules into the one it had. `short` allows
    shorter number formats on a GPU, as `BatchedGradients` does. `told`: the modules whose draws come with each call.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        protocol: Protocol,
        *,
        short: bool = False,
        told: Collection[str] = (),
    ) -> None:
        if told and protocol.local_steps > 1:
            raise GradveilError(
                f"{protocol.local_steps} local steps draw anew at each: draws can be given for 1 step alone"
            )
        self._model, self._protocol = model, protocol
        self._engine: VictimGradients | LocalUpdates = (
            VictimGradients(model, loss, short=short, told=told)
            if protocol.local_steps == 1
            else LocalUpdates(model, loss, protocol)
        )

    @property
    def why_not(self) -> str | None:
        """Why victims are taken one at a time, as far as is known; None where they share a pass."""
        with in_mode(self._model, self._protocol.train_mode):
            return self._engine.why_not

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> Gradients:
        """(victims, *parameter shape) for labels (victims, batch), or class probabilities (victims, batch, classes)."""
        with in_mode(self._model, self._protocol.train_mode):
            if isinstance(self._engine, VictimGradients):
                return self._engine(images, labels, draws=draws, differentiable=differentiable)
            return self._engine(images, labels, differentiable=differentiable)

    def compare(
        self,
        images: Tensor,
        labels: Tensor,
        aim: Aim,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> Pair:
        """The inner products of what is shared with the aim and with itself, all that a cosine needs."""
        if isinstance(self._engine, LocalUpdates):
            return aim.pair(self(images, labels, differentiable=differentiable))
        with in_mode(self._model, self._protocol.train_mode):
            return self._engine.compare(
                images, labels, aim, draws=draws, differentiable=differentiable
            )

    def check(self, images: Tensor, classes: int) -> None:
        """Refuse a model that does not turn one batch of such images into a logit for each class."""
        taken = f"{type(self._model).__name__} and images of shape {tuple(images.shape)}"
        try:
            with in_mode(self._model, self._protocol.train_mode), torch.no_grad():
                logits = functional_call(
                    self._model,
                    {name: buffer.clone() for name, buffer in self._model.named_buffers()},
                    (images,),
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model may be anyone's
            raise GradveilError(f"{taken} do not fit: {one_line(error, 200)}") from error
        if not isinstance(logits, Tensor) or logits.shape != (len(images), classes):
            got = (
                f"shape {tuple(logits.shape)}"
                if isinstance(logits, Tensor)
                else f"a {type(logits).__name__}"
            )
            raise GradveilError(
                f"{taken}: the model gave {got}; expected {(len(images), classes)}, one logit for each of {classes} classes"
            )


class LocalUpdates:
    """(W_0 - W_k) / rate after k local steps. All victims in one pass, each with weights of its own, or one by one after a warning."""

    def __init__(self, model: nn.Module, loss: Loss, protocol: Protocol) -> None:
        self._settings = model, loss, protocol
        self._tried = self._warned = False
        self._mismatch: str | None = None

    @property
    def why_not(self) -> str | None:
        """Read anew each time, since a model may change its mode; a failed trial is remembered."""
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
        found = loop_updates(
            *self._settings, images, labels, differentiable=differentiable
        )  # a mistake in the input shows here
        if not self._warned:
            self._warned = True
            text = f"the local steps of these victims cannot be batched: {reason}; taking them one at a time, which is slow"
            warnings.warn(text, GradveilWarning, stacklevel=3)
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
    """Of all victims at once; raises whatever `torch.vmap` does where it cannot. Random layers draw anew for each victim."""
    start = {name: parameter.detach() for name, parameter in trainable(model).items()}
    buffers = {
        name: torch.stack([buffer] * len(images)) for name, buffer in _changing(model).items()
    }

    def mean_loss(weights: Gradients, buffers: Gradients, images: Tensor, labels: Tensor) -> Tensor:
        return per_sample(
            loss, functional_call(model, {**buffers, **weights}, (images,)), labels
        ).mean()

    def of_one(buffers: Gradients, images: Tensor, labels: Tensor) -> Gradients:
        return _descend(
            protocol, start, lambda weights: grad(mean_loss)(weights, buffers, images, labels)
        )

    if not differentiable:
        images, labels = images.detach(), labels.detach()
    with torch.set_grad_enabled(differentiable):
        found: Gradients = vmap(of_one, randomness="different")(buffers, images, labels)
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
    """Of one victim after the other, by plain autograd."""
    start = {name: parameter.detach() for name, parameter in trainable(model).items()}

    def of_one(images: Tensor, labels: Tensor) -> Gradients:
        buffers = {name: buffer.clone() for name, buffer in _changing(model).items()}

        def gradient_at(weights: Gradients) -> Gradients:
            weights = {
                name: weight if weight.requires_grad else weight.detach().requires_grad_()
                for name, weight in weights.items()
            }
            losses = per_sample(
                loss, functional_call(model, {**buffers, **weights}, (images,)), labels
            )
            slopes = torch.autograd.grad(
                losses.mean(),
                list(weights.values()),
                create_graph=differentiable,
                materialize_grads=True,
            )
            return dict(zip(weights, slopes, strict=True))

        return _descend(protocol, start, gradient_at)

    if not differentiable:
        images, labels = images.detach(), labels.detach()
    with torch.enable_grad():
        each = [of_one(x, y) for x, y in zip(images, labels, strict=True)]
    return {name: torch.stack([found[name] for found in each]) for name in start}


def _descend(
    protocol: Protocol, start: Gradients, gradient_at: Callable[[Gradients], Gradients]
) -> Gradients:
    """W_i = W_0 - rate (g_1 + ... + g_i), so (W_0 - W_k) / rate is the sum itself, without the rounding of the difference."""
    total = gradient_at(start)
    for _ in range(protocol.local_steps - 1):
        weights = {name: start[name] - protocol.local_lr * total[name] for name in start}
        total = {name: total[name] + slope for name, slope in gradient_at(weights).items()}
    return total


def _trial(
    model: nn.Module, loss: Loss, protocol: Protocol, images: Tensor, labels: Tensor
) -> str | None:
    """What is wrong with batching, seen on one random victim of a float64 copy with the same draws both ways, or None.

    Slopes are compared too: torch has batching rules whose values are right and whose second derivatives are off by a few 1e-4.
    """
    target = labels.detach()[:1, :2]
    target = target.double() if target.is_floating_point() else target
    guess = (
        torch.rand(images[:1, :2].shape, generator=Generator().manual_seed(0))
        .to(images.device, torch.float64)
        .requires_grad_()
    )
    found: list[tuple[Tensor, ...]] = []
    try:
        copied, few = copy.deepcopy(model).double(), replace(protocol, local_steps=2)
        for way in (loop_updates, batched_updates):
            with forked(), torch.enable_grad():
                torch.manual_seed(0)
                values = torch.cat(
                    [
                        v.flatten()
                        for v in way(copied, loss, few, guess, target, differentiable=True).values()
                    ]
                )
                found.append((values.detach(), *torch.autograd.grad(values.square().sum(), guess)))
    except Exception as error:
        return f"a trial by torch.vmap failed with {one_line(error, 200)}"
    if not all(bool(part.isfinite().all()) for part in found[0]):
        return "a trial gave values that are not finite"
    errors = [
        float((batched - plain).norm() / plain.norm().clamp_min(1e-30))
        for plain, batched in zip(*found, strict=True)
    ]
    if max(errors) < 1e-7:
        return None
    return f"in a trial torch.vmap was off by {errors[0]:.1e} in values and by {errors[1]:.1e} in slopes"


def _batch_statistics(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and (module.training or module.running_mean is None):
            kind = f"{name or 'the model'} ({type(module).__name__})"
            return f"{kind} takes its statistics from the batch, and torch.vmap gets their second derivatives wrong"
    return None


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a pass in training mode may change, such as running statistics."""
    return dict(model.named_buffers()) if model.training else {}
