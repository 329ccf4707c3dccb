"""The gradients of many victims in one forward and one backward pass, where the model allows it.

Samples do not interact in a model in eval mode. So one pass of all victims' images gives each
layer's input and the loss gradient at its output (the blame) for every row, and the rules of
`layers` turn these into the gradients of each victim. `BatchedGradients` does so, after a trial
against plain autograd; the functions below it are its steps, shared with `lines`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from gradveil.core.errors import GradveilError, one_line
from gradveil.core.types import Gradients, Loss
from gradveil.engine.device import suits
from gradveil.engine.draws import DROPOUTS, Draws, given
from gradveil.engine.gradients import (
    check_victims,
    gradient,
    per_sample,
    trainable,
    with_slope,
)
from gradveil.engine.layers import BATCH_NORMS, FORWARDS, RULES, Rule, linear_bias, outer_rows
from gradveil.engine.products import Aim, DotAndSquare, total

Forwards = Mapping[type[nn.Module], Callable[[Any, Tensor], Tensor]]
"""By the type of a layer: (layer, input) -> output, called in place of its `forward`."""

ALL_DROPOUTS = (*DROPOUTS, nn.AlphaDropout, nn.FeatureAlphaDropout)


class NotBatchableError(GradveilError):
    """The model's victims cannot share a pass; the plain loop still works."""


@dataclass(frozen=True)
class Tap:
    """One use of one layer: its input, and the edge that marks its output in the graph.

    The edge holds even if the output tensor is later changed in place.
    """

    layer: nn.Module
    inputs: Tensor
    edge: GradientEdge


@dataclass(frozen=True)
class Pass:
    """A forward pass of all victims' rows: (rows, ...) images, (rows,) losses, the layers' uses.

    `copies` holds, by name, each parameter of `direct` with a copy for every row.
    """

    rows: Tensor
    losses: Tensor
    taps: list[Tap]
    copies: dict[str, Tensor]


class BatchedGradients:
    """Gradients of each victim's mean loss, like those of `loop_gradients` in values and graph.

    Build it once for a model and a loss, then call it with images (victims, batch, ...) and labels
    (victims, batch) or (victims, batch, classes). The first call tries it out on two random
    victims; where batching cannot work, a call raises `NotBatchableError`. With `short`, a GPU may
    multiply patches in bf16, which halves the memory they move; such gradients come out as bf16.
    `told` names the modules whose draws come with each call.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, *, short: bool = False, told: Collection[str] = ()
    ) -> None:
        self._model, self._loss, self._short, self._told = model, loss, short, frozenset(told)
        self._tried = False
        self._mismatch: str | None = None

    @property
    def why_not(self) -> str | None:
        """The reason, in one line, why victims cannot share a pass; None where none is known.

        It is read anew each time, since a model may change its mode; a failed trial is remembered.
        """
        return obstacle(self._model, self._told) or self._mismatch

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> Gradients:
        """Return (victims, *parameter shape) by name; `draws` are (victims, batch, ...)."""
        with self._passed(images, labels, draws, differentiable) as done:
            return collect(self._model, done, len(images), differentiable, short=self._short)

    def compare(
        self,
        images: Tensor,
        labels: Tensor,
        aim: Aim,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> DotAndSquare:
        """Return the gradients' inner products with the aim and with themselves, (victims,) each.

        They are all that a cosine needs, and cost less than the gradients.
        """
        with self._passed(images, labels, draws, differentiable) as done:
            return compare(self._model, done, len(images), differentiable, aim, short=self._short)

    def check(self, images: Tensor, labels: Tensor, draws: Draws | None = None) -> None:
        """Refuse images that are no victims, and victims that cannot share a pass.

        The first call makes the trial.
        """
        check_victims(images, labels)
        if not self._tried and self.why_not is None:
            ends = {name: value.detach()[[0, -1]] for name, value in (draws or {}).items()}
            with _rows_given(self._model, ends):
                self._mismatch = _trial(self._model, self._loss, images, labels)
            self._tried = True
        if (reason := self.why_not) is not None:
            raise NotBatchableError(f"the gradients of these victims cannot be batched: {reason}")

    @contextmanager
    def _passed(
        self, images: Tensor, labels: Tensor, draws: Draws | None, differentiable: bool
    ) -> Iterator[Pass]:
        """Make the forward pass; the draws stay handed in while the context lasts."""
        draws = draws or {}
        if draws.keys() != self._told:
            raise GradveilError(
                f"draws of {', '.join(draws) or 'nothing'}: "
                f"expected those of {', '.join(sorted(self._told)) or 'nothing'}"
            )
        self.check(images, labels, draws)
        if not differentiable:
            images, labels = images.detach(), labels.detach()
            draws = {name: value.detach() for name, value in draws.items()}
        # Detached parameters spare autograd the summed weight gradients, which nobody needs.
        frozen = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        with torch.enable_grad(), _rows_given(self._model, draws):
            yield forward(self._model, self._loss, images, labels, frozen)


def forward(
    model: nn.Module,
    loss: Loss,
    images: Tensor,
    labels: Tensor,
    parameters: dict[str, Tensor],
    forwards: Forwards = FORWARDS,
) -> Pass:
    """Pass all victims' images through the model, with `parameters` in place of the model's.

    Layers of a type in `forwards` run that function; the default ones differentiate fast twice.
    """
    rows = images.flatten(0, 1)
    if not rows.requires_grad:  # or nothing before the first layer would have a graph
        rows = rows.detach().requires_grad_()
    copies = {
        name: parameters[name].expand(len(rows), *parameters[name].shape[1:])
        for name in direct(model)
    }
    copies = {
        name: copy if copy.requires_grad else copy.requires_grad_() for name, copy in copies.items()
    }
    with _taps(model, forwards) as taps:
        logits = functional_call(model, {**parameters, **copies}, (rows,))
    losses = with_slope(per_sample(loss, logits, labels.flatten(0, 1)))
    return Pass(rows, losses, taps, copies)


def find_blames(done: Pass, victims: int, differentiable: bool) -> tuple[Tensor, ...]:
    """Return the gradients of the victims' mean losses at the taps' outputs, then at the copies."""
    edges = [tap.edge for tap in done.taps]
    edges += [get_gradient_edge(copy) for copy in done.copies.values()]
    summed = done.losses.sum() * (victims / len(done.losses))
    return torch.autograd.grad(summed, edges, create_graph=differentiable, materialize_grads=True)


def collect(
    model: nn.Module, done: Pass, victims: int, differentiable: bool, *, short: bool = False
) -> Gradients:
    """Return the gradients of each victim's mean loss, (victims, *parameter shape) by name."""
    blames = find_blames(done, victims, differentiable)
    with torch.set_grad_enabled(differentiable):
        return _products(model, done, blames, victims, short)


def compare(
    model: nn.Module,
    done: Pass,
    victims: int,
    differentiable: bool,
    aim: Aim,
    *,
    short: bool = False,
) -> DotAndSquare:
    """Return those gradients' inner products with the aim and with themselves, (victims,) each.

    The weight gradients of linear layers with few rows are never written out.
    """
    blames = find_blames(done, victims, differentiable)
    with torch.set_grad_enabled(differentiable):
        thin = _thin_weights(model, done, blames, victims, aim)
        pairs = []
        for name, number in thin.items():
            blame = blames[number]
            rows = outer_rows(done.taps[number].inputs.to(blame.dtype), blame, victims)
            pairs.append(aim.outer_pair(name, *rows))
        others = [name for name in aim.factors if name not in thin]
        if others:
            gradients = _products(model, done, blames, victims, short, without=thin)
            pairs.append(aim.pair(gradients, others))
        return total([dot for dot, _ in pairs]), total([square for _, square in pairs])


def copied(blame: Tensor, victims: int) -> Tensor:
    """Return the gradient of a parameter that each row had a copy of, (victims, *its shape)."""
    return blame.reshape(victims, -1, 1, *blame.shape[1:]).sum(1)


def direct(model: nn.Module) -> set[str]:
    """Name the trainable parameters used by no layer with a rule: class tokens, positions."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if type(module) not in RULES
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }


def obstacle(model: nn.Module, told: Collection[str] = ()) -> str | None:
    """Name, in one line, the first module that prevents batching, and why; None without any.

    The modules in `told` do not draw themselves, since their draws are handed in.
    """
    for name, module in model.named_modules():
        reason = None if name in told else _reason(module)
        if reason is not None:
            return f"{name or 'the model'} ({type(module).__name__}) {reason}"
    return None


def _reason(module: nn.Module) -> str | None:
    # Torch has no public way to ask whether a module has hooks.
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return "has hooks of its own, which may not treat rows alike"
    if isinstance(module, BATCH_NORMS):
        if module.running_mean is None or module.running_var is None:
            return "keeps no running statistics, so it mixes the rows of a batch"
        if module.training:
            return (
                "is in training mode, so it mixes the rows of a batch; model.eval() would allow it"
            )
    if isinstance(module, ALL_DROPOUTS) and module.training and module.p > 0:
        return "is in training mode: dropout is on; model.eval() would allow it"
    return None if type(module) in RULES else _without_rule(module)


def _without_rule(module: nn.Module) -> str | None:
    """Name a parameter for which there is no way to a gradient for each victim.

    A parameter (1, ...) can be copied for each row; other shapes do not say how they meet the rows.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and (parameter.dim() < 2 or len(parameter) != 1):
            return f"holds {name!r} of shape {tuple(parameter.shape)}, for which there is no rule"
    return None


@contextmanager
def _taps(model: nn.Module, forwards: Forwards) -> Iterator[list[Tap]]:
    """Record each use of the layers with trainable parameters, and run `forwards`, for a while."""
    taps: list[Tap] = []

    def record(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        taps.append(Tap(layer, inputs[0], get_gradient_edge(output)))

    layers = [
        m
        for m in model.modules()
        if type(m) in RULES and any(p.requires_grad for p in m.parameters(recurse=False))
    ]
    faster = {m: forwards[type(m)] for m in model.modules() if type(m) in forwards}
    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        for layer, run in faster.items():
            layer.forward = partial(run, layer)
        yield taps
    finally:
        for handle in handles:
            handle.remove()
        for layer in faster:
            layer.__dict__.pop("forward", None)


def _rows_given(model: nn.Module, draws: Draws) -> AbstractContextManager[None]:
    """Hand in (victims, batch, ...) draws for a pass of all victims' rows at once."""
    return given(model, {name: value.flatten(0, 1) for name, value in draws.items()})


def _thin_weights(
    model: nn.Module, done: Pass, blames: tuple[Tensor, ...], victims: int, aim: Aim
) -> dict[str, int]:
    """Find the weights used once whose gradient is a product of few rows: name -> tap number.

    On a GPU there are none: its kernels for whole gradients are fast, and this has no measurement.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in trainable(model).items()}
    uses: Counter[Tensor] = Counter(
        parameter for tap in done.taps for parameter in tap.layer.parameters(recurse=False)
    )
    found = {}
    for number, (tap, blame) in enumerate(zip(done.taps, blames, strict=False)):
        if type(tap.layer) is nn.Linear and not blame.is_cuda:
            weight, rows = tap.layer.weight, blame[..., 0].numel() // victims
            name = names.get(weight, "")
            few = rows * sum(weight.shape) <= weight.numel()
            if name in aim.factors and uses[weight] == 1 and few:
                found[name] = number
    return found


def _products(
    model: nn.Module,
    done: Pass,
    blames: tuple[Tensor, ...],
    victims: int,
    short: bool,
    without: Collection[str] = (),
) -> Gradients:
    """Return the gradients of all parameters, `without` these weights of linear layers.

    They are summed over the uses of a parameter, so shared weights and repeated layers are right.
    """
    parameters = trainable(model)
    names = {parameter: name for name, parameter in parameters.items()}
    found: dict[str, Tensor] = {}
    for tap, blame in zip(done.taps, blames, strict=False):
        thin = without and any(
            names.get(parameter) in without for parameter in tap.layer.parameters(recurse=False)
        )
        rule: Rule = linear_bias if thin else RULES[type(tap.layer)]
        for key, part in rule(tap.layer, *_formatted(tap, blame, short), victims).items():
            name = names.get(getattr(tap.layer, key))
            if name is not None:
                found[name] = found[name] + part if name in found else part
    for name, blame in zip(done.copies, blames[len(done.taps) :], strict=True):
        found[name] = copied(blame, victims)
    return {
        name: found[name] if name in found else parameter.new_zeros(victims, *parameter.shape)
        for name, parameter in parameters.items()
        if name not in without
    }


def _formatted(tap: Tap, blame: Tensor, short: bool) -> tuple[Tensor, Tensor]:
    """Return input and blame in the blame's format.

    It is bf16 for a convolution's large products, where `short` allows it and the GPU gains by it.
    """
    faster = short and type(tap.layer) is nn.Conv2d and suits(blame)
    dtype = torch.bfloat16 if faster else blame.dtype
    return tap.inputs.to(dtype), blame.to(dtype)


def _trial(model: nn.Module, loss: Loss, images: Tensor, labels: Tensor) -> str | None:
    """Say how batching fails on two random victims of the same shape, or return None.

    Plain autograd differentiates each victim's loss in the same pass, so a model that draws random
    numbers can be tried too.
    """
    first = torch.rand((2, *images.shape[1:]), generator=Generator().manual_seed(0)).to(images)
    ends = labels.detach()[[0, -1]]
    try:
        with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
            done = forward(model, loss, first, ends, dict(model.named_parameters()))
            return _disagreement(model, done, collect(model, done, 2, differentiable=True))
    except Exception as error:
        gradient(model, loss, first[0], ends[0])  # shows a mistake in the input, not in batching
        return f"a trial pass failed with {one_line(error)}"


def _disagreement(model: nn.Module, done: Pass, batched: Gradients) -> str | None:
    """Say where the batched gradients of two victims differ from plain autograd's, or None."""
    parameters = trainable(model)
    # TF32 and half types keep three digits or fewer; a wrong rule is off by the whole gradient.
    exact = done.rows.device.type == "cpu" and done.rows.dtype in (torch.float32, torch.float64)
    tolerance = 1e-3 if exact else 5e-2
    for victim, losses in enumerate(done.losses.chunk(2)):
        targets = [*parameters.values(), done.rows]
        *plain, images = torch.autograd.grad(
            losses.mean(), targets, retain_graph=True, materialize_grads=True
        )
        if images.chunk(2)[1 - victim].any():
            return "one row of a batch changes the outcome of another"
        whole = torch.stack([p.norm() for p in plain]).norm()
        for name, expected in zip(parameters, plain, strict=True):
            error = (batched[name][victim] - expected).norm()
            if not error <= tolerance * (expected.norm() + 0.01 * whole):
                share = float(error / expected.norm())
                return f"the gradient of {name!r} differs from plain autograd's by {share:.1%}"
    return None
