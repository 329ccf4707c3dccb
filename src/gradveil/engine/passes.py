"""One pass of many victims' rows through a model, and the gradients of each victim made of it.

Each layer's input and the loss gradient at its output (the blame) are kept for every row; the rules
of `layers` turn these into the gradients of each victim, or into inner products with a target.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from gradveil.core.types import Gradients, Loss
from gradveil.engine.calls import after_use, run_instead, run_itself
from gradveil.engine.fused import suits
from gradveil.engine.gradients import copied_buffers, per_sample, trainable, with_slope
from gradveil.engine.layers import FORWARDS, RULES, Rule, linear_bias, outer_rows
from gradveil.engine.norms import Norm, Running, for_each, is_normalized, normalize
from gradveil.engine.products import Aim, DotAndSquare, total

Forwards = Mapping[type[nn.Module], Callable[[Any, Tensor], Tensor]]
"""By the type of a layer: (layer, input) -> output, called in place of its `forward`."""


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

    `copies` holds, by name, each parameter of `direct` with a copy for every row, and each of
    `scales` with a copy for every victim.
    """

    rows: Tensor
    losses: Tensor
    taps: list[Tap]
    copies: dict[str, Tensor]


def forward(
    model: nn.Module,
    loss: Loss,
    images: Tensor,
    labels: Tensor,
    parameters: dict[str, Tensor],
    forwards: Forwards = FORWARDS,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    running: Running | None = None,
) -> Pass:
    """Pass all victims' images through the model, with `parameters` in place of the model's.

    Layers of a type in `forwards` run that function; the default ones differentiate fast twice.
    Layers that take their statistics from the batch use those of each victim; `running` follows
    them. A pass in training mode changes `buffers`, or copies that are then dropped.
    """
    rows = images.flatten(0, 1)
    if not rows.requires_grad:  # or nothing before the first layer would have a graph
        rows = rows.detach().requires_grad_()
    copies = {
        name: parameters[name].expand(len(rows), *parameters[name].shape[1:])
        for name in direct(model)
    }
    for name in scales(model):
        copies[name] = parameters[name].expand(len(images), *parameters[name].shape)
    copies = {
        name: copy if copy.requires_grad else copy.requires_grad_() for name, copy in copies.items()
    }
    buffers = copied_buffers(model) if buffers is None else buffers
    watching = nullcontext() if running is None else running.watch()
    with watching, _taps(model, forwards, len(images)) as taps:
        logits = functional_call(model, {**buffers, **parameters, **copies}, (rows,))
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
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


def copied(blame: Tensor, victims: int, dims: int) -> Tensor:
    """Return the gradient of a parameter of so many dimensions, (victims, *its shape).

    Each row had a copy of it, in place of its first dimension, or each victim.
    """
    if blame.dim() > dims:
        return blame
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


def scales(model: nn.Module) -> set[str]:
    """Name the trainable parameters of layers with the statistics of each victim."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if is_normalized(module)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }


@contextmanager
def _taps(model: nn.Module, forwards: Forwards, victims: int) -> Iterator[list[Tap]]:
    """Record each use of the layers with trainable parameters, and run `forwards`, for a while."""
    taps: list[Tap] = []

    def record(layer: nn.Module, inputs: Tensor, output: Tensor) -> None:
        taps.append(Tap(layer, inputs, get_gradient_edge(output)))

    def run_norm(layer: Norm, inputs: Tensor) -> Tensor:
        weight, bias = (for_each(part, 1, victims) for part in (layer.weight, layer.bias))
        return normalize(layer, inputs, victims, weight, bias)

    modules = list(model.modules())
    layers = [
        m
        for m in modules
        if type(m) in RULES
        and not is_normalized(m)
        and any(p.requires_grad for p in m.parameters(recurse=False))
    ]
    faster = {m: forwards[type(m)] for m in modules if type(m) in forwards}
    faster |= {m: run_norm for m in modules if is_normalized(m)}
    handles = [after_use(layer, record) for layer in layers]
    try:
        for layer, run in faster.items():
            run_instead(layer, partial(run, layer))
        yield taps
    finally:
        for handle in handles:
            handle.remove()
        for layer in faster:
            run_itself(layer)


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
        found[name] = copied(blame, victims, parameters[name].dim())
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
