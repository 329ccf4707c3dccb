"""What a client shares after several local steps of SGD, for many victims at once.

The first step starts from weights that all victims share, later ones from weights for each victim
(`weights`). A model that these passes do not suit goes through `torch.vmap` where that is right,
else a victim goes at a time. The loop is the slow way that the faster ones are tested against.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.seeds import forked
from gradveil.core.types import Gradients, Loss, Protocol
from gradveil.engine.batched import BatchedGradients, NotBatchableError, are_alike, detached
from gradveil.engine.fused import suits
from gradveil.engine.gradients import (
    are_finite,
    check_victims,
    copied_buffers,
    first_finite,
    per_sample,
    plain_attention,
    trainable,
    with_slope,
)
from gradveil.engine.layers import FORWARDS, SHORT_TWICE
from gradveil.engine.norms import Running, takes_statistics
from gradveil.engine.passes import collect, forward
from gradveil.engine.weights import gradients_at

VICTIMS_TRIED, IMAGES_TRIED, MOST_TRIED = 4, 8, 4
"""Victims, images of each, and steps at most, of the trial whether bf16 will do."""

Way = Callable[..., Gradients]
"""(model, loss, protocol, images, labels, differentiable=...) -> updates of all victims."""


class LocalUpdates:
    """(W_0 - W_k) / rate after k local steps, (victims, *parameter shape).

    All victims go in one pass, each with its weights, or one by one after a warning. `short` allows
    bf16 between convolutions on a GPU, after a trial. Clients whose mean a victim is go as victims
    of their own, also in `running`.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, protocol: Protocol, *, short: bool = False
    ) -> None:
        self._clients = protocol.averaged_clients
        self._settings = model, loss, replace(protocol, averaged_clients=1)
        self._short = short
        self._gradients = BatchedGradients(model, loss, free=True)
        self._tried = self._warned = False
        self._mismatch: dict[Way, str | None] = {}

    @property
    def why_not(self) -> str | None:
        """The reason why victims go one by one, in one line; None where none is known.

        It is read anew each time, since a model may change its mode; a failed trial is remembered.
        """
        reasons = [self._reason(way) for way in (batched_updates, vmapped_updates)]
        return None if None in reasons else "; ".join(reason for reason in reasons if reason)

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        differentiable: bool = False,
        running: Running | None = None,
    ) -> Gradients:
        check_victims(images, labels)
        if self._clients > 1:
            images, labels = (split_clients(each, self._clients) for each in (images, labels))
        if not self._tried:
            self._try(images, labels)
        ways: tuple[Way, ...] = (batched_updates, vmapped_updates)
        way = next((each for each in ways if self._reason(each) is None), loop_updates)
        # Before the warning: where the input is to blame, the error shows here, and alone.
        follow: dict[str, Any] = {} if way is vmapped_updates else {"running": running}
        if way is batched_updates:
            follow["short"] = self._short
        found = way(*self._settings, images, labels, differentiable=differentiable, **follow)
        if way is loop_updates and not self._warned:
            self._warned = True
            warnings.warn(
                f"the local steps of these victims cannot be batched: {self.why_not}; "
                "taking them one at a time, which is slow",
                GradveilWarning,
                stacklevel=3,
            )
        return mean_of_clients(found, self._clients)

    def _reason(self, way: Way) -> str | None:
        """Say why victims cannot go this way."""
        by_nature = (
            self._gradients.why_not
            if way is batched_updates
            else _batch_statistics(self._settings[0])
        )
        return by_nature or self._mismatch.get(way)

    def _try(self, images: Tensor, labels: Tensor) -> None:
        """Try the ways that nothing speaks against, the first that works alone."""
        part = self._settings[2].parts(images.shape[1])[0]
        try:
            with forked():
                self._gradients.check(images[:, part], labels[:, part])
        except NotBatchableError:
            pass  # `why_not` remembers it
        for way in (batched_updates, vmapped_updates):
            if self._reason(way) is None:
                self._mismatch[way] = _trial(way, *self._settings, images, labels)
                if self._mismatch[way] is None:
                    break
        if self._short:
            there = suits(images) and self._reason(batched_updates) is None
            self._short = there and _can_be_short(*self._settings, images, labels)
        self._tried = True


def split_clients(batches: Tensor, clients: int) -> Tensor:
    """Return (victims * clients, images of each, ...) of batches (victims, images, ...)."""
    check_equal(batches.shape[1], clients)
    return batches.reshape(len(batches) * clients, -1, *batches.shape[2:])


def check_equal(size: int, clients: int) -> None:
    """Refuse a batch of `size` that clients cannot have in equal parts."""
    if size % clients:
        raise GradveilError(f"{size} images of {clients} clients: each has to have as many")


def mean_of_clients(values: Gradients, clients: int) -> Gradients:
    """Return the means over the clients of each victim, (victims, ...)."""
    if clients == 1:
        return values
    return {name: value.unflatten(0, (-1, clients)).mean(1) for name, value in values.items()}


def batched_updates(
    model: nn.Module,
    loss: Loss,
    protocol: Protocol,
    images: Tensor,
    labels: Tensor,
    *,
    differentiable: bool = False,
    running: Running | None = None,
    short: bool = False,
) -> Gradients:
    """Return the updates of all victims, in a pass of all rows for each step.

    `running` follows the statistics of normalization layers. With `short`, maps are bf16 between
    convolutions, on a GPU; weights and what is added to them are not.
    """
    if not differentiable:
        images, labels = images.detach(), labels.detach()
    start = {name: parameter.detach() for name, parameter in trainable(model).items()}
    frozen = detached(model)
    buffers = copied_buffers(model)

    def gradient_at(weights: Gradients, part: slice) -> Gradients:
        x, y = images[:, part], labels[:, part]
        if weights is start:
            forwards = SHORT_TWICE if short else FORWARDS
            done = forward(model, loss, x, y, frozen, forwards, buffers=buffers, running=running)
            found = collect(model, done, len(x), differentiable, short=short)
            return {name: part.to(start[name].dtype) for name, part in found.items()}
        return gradients_at(
            model,
            loss,
            weights,
            x,
            y,
            differentiable=differentiable,
            buffers=buffers,
            running=running,
            short=short,
        )

    with torch.enable_grad():
        found = _descend(protocol, start, images.shape[1], gradient_at)
    return found if differentiable else {name: value.detach() for name, value in found.items()}


def vmapped_updates(
    model: nn.Module,
    loss: Loss,
    protocol: Protocol,
    images: Tensor,
    labels: Tensor,
    *,
    differentiable: bool = False,
) -> Gradients:
    """Return the updates of all victims by `torch.vmap`, whose error is raised where it fails.

    Random layers draw anew for each victim. It is for models whose statistics do not run.
    """
    start = {name: parameter.detach() for name, parameter in trainable(model).items()}
    buffers = {
        name: torch.stack([buffer] * len(images)) for name, buffer in copied_buffers(model).items()
    }

    def mean_loss(weights: Gradients, buffers: Gradients, images: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(model, {**buffers, **weights}, (images,))
        return per_sample(loss, logits, labels).mean()

    def of_victim(buffers: Gradients, images: Tensor, labels: Tensor) -> Gradients:
        return _descend(
            protocol,
            start,
            len(images),
            lambda weights, part: grad(mean_loss)(weights, buffers, images[part], labels[part]),
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
    running: Running | None = None,
) -> Gradients:
    """Return the updates of one victim after the other, by plain autograd."""
    start = {name: parameter.detach() for name, parameter in trainable(model).items()}

    def of_victim(images: Tensor, labels: Tensor, running: Running | None) -> Gradients:
        buffers = copied_buffers(model)

        def gradient_at(weights: Gradients, part: slice) -> Gradients:
            weights = {
                name: weight if weight.requires_grad else weight.detach().requires_grad_()
                for name, weight in weights.items()
            }
            with nullcontext() if running is None else running.watch():
                logits = functional_call(model, {**buffers, **weights}, (images[part],))
            slopes = torch.autograd.grad(
                with_slope(per_sample(loss, logits, labels[part])).mean(),
                list(weights.values()),
                create_graph=differentiable,
                materialize_grads=True,
            )
            return dict(zip(weights, slopes, strict=True))

        return _descend(protocol, start, len(images), gradient_at)

    if not differentiable:
        images, labels = images.detach(), labels.detach()
    kept = [None if running is None else Running(model) for _ in images]
    with torch.enable_grad():
        each = [of_victim(x, y, its) for x, y, its in zip(images, labels, kept, strict=True)]
    if running is not None:
        running.take([its for its in kept if its is not None])
    found = {name: torch.stack([update[name] for update in each]) for name in start}
    return found if differentiable else {name: value.detach() for name, value in found.items()}


def _descend(
    protocol: Protocol,
    start: Gradients,
    size: int,
    gradient_at: Callable[[Gradients, slice], Gradients],
) -> Gradients:
    """Return v_1 + ... + v_k, which is (W_0 - W_k) / rate without the difference's rounding.

    The steps are those of torch.optim.SGD: v_i = momentum v_(i-1) + g_i + decay W_(i-1), and
    W_i = W_0 - rate (v_1 + ... + v_i). The first is called with `start` itself.
    """
    momentum, decay = protocol.client_momentum, protocol.client_weight_decay
    weights, velocity, summed = start, dict[str, Tensor](), dict[str, Tensor]()
    for part in protocol.parts(size):
        if summed:
            weights = {name: start[name] - protocol.local_lr * summed[name] for name in start}
        slopes = gradient_at(weights, part)
        if decay:
            slopes = {name: slope + decay * weights[name] for name, slope in slopes.items()}
        if momentum and velocity:
            slopes = {name: momentum * velocity[name] + slope for name, slope in slopes.items()}
        velocity = slopes
        summed = {name: summed[name] + slope if summed else slope for name, slope in slopes.items()}
    return summed


def _trial(
    way: Way, model: nn.Module, loss: Loss, protocol: Protocol, images: Tensor, labels: Tensor
) -> str | None:
    """Say how a way fails on a random victim of a float64 copy of the model, or return None.

    It and the loop get the same draws. Slopes are compared too: torch has batching rules whose
    values are right and whose second derivatives are off by a few 1e-4.
    """
    name = "torch.vmap" if way is vmapped_updates else "weights for each victim"
    target = labels.detach()[:1, :2]
    target = target.double() if target.is_floating_point() else target
    few = replace(protocol, local_steps=2, local_epochs=1, local_batch_size=None)

    def tried(each: Way, guess: Tensor) -> tuple[Tensor, ...]:
        leaf = guess.double().requires_grad_()
        with forked(), torch.enable_grad(), plain_attention():
            torch.manual_seed(0)
            updates = each(copied, loss, few, leaf, target, differentiable=True)
            values = torch.cat([value.flatten() for value in updates.values()])
            return values.detach(), *torch.autograd.grad(values.square().sum(), leaf)

    try:
        copied = copy.deepcopy(model).double()
        expected, guess = first_finite(partial(tried, loop_updates), images[:1, :2])
        found = tried(way, guess)
    except Exception as error:
        return f"a trial by {name} failed with {one_line(error, 200)}"
    if not are_finite(expected):
        return "a trial gave values that are not finite"
    in_values, in_slopes = (
        float((batched - plain).norm() / plain.norm().clamp_min(1e-30))
        for plain, batched in zip(expected, found, strict=True)
    )
    if max(in_values, in_slopes) < 1e-7:
        return None
    return (
        f"in a trial {name} was off by {in_values:.1e} in values and by {in_slopes:.1e} in slopes"
    )


def _can_be_short(
    model: nn.Module, loss: Loss, protocol: Protocol, images: Tensor, labels: Tensor
) -> bool:
    """Tell whether bf16 gives the updates of some random victims, and their slopes.

    They make the client's own number of steps, `MOST_TRIED` at most, since rounding grows with each
    of them. Slopes are those of the squares and of a random sum, which cancels far more.
    """
    few = replace(
        protocol,
        local_steps=min(MOST_TRIED, max(2, protocol.steps(images.shape[1]))),
        local_epochs=1,
        local_batch_size=None,
    )
    like = images.new_empty(VICTIMS_TRIED, min(IMAGES_TRIED, images.shape[1]), *images.shape[2:])
    chosen = torch.linspace(0, len(labels) - 1, VICTIMS_TRIED).long().to(labels.device)
    target = labels.detach()[chosen, : like.shape[1]]

    def tried(guess: Tensor, short: bool = False) -> tuple[Tensor, ...]:
        leaf = guess.clone().requires_grad_()
        with forked(), torch.enable_grad(), plain_attention():
            torch.manual_seed(0)
            updates = batched_updates(
                model, loss, few, leaf, target, differentiable=True, short=short
            )
            flat = torch.cat([part.float().flatten(1) for part in updates.values()], dim=1)
            weights = torch.randn(flat.shape, generator=Generator().manual_seed(1)).to(flat)
            slopes = [
                torch.autograd.grad(made.sum(), leaf, retain_graph=True)[0].flatten(1)
                for made in (flat.square(), flat * weights)
            ]
        return flat.detach(), *slopes

    try:
        plain, guess = first_finite(tried, like)
        return are_alike(plain, tried(guess, short=True))
    except Exception:
        return False


def _batch_statistics(model: nn.Module) -> str | None:
    """Name the first normalization that uses the batch's statistics; None without any."""
    for name, module in model.named_modules():
        if takes_statistics(module):
            return (
                f"{name or 'the model'} ({type(module).__name__}) takes its statistics from the "
                "batch, and torch.vmap gets their second derivatives wrong"
            )
    return None
