"""Every victim's own gradients from one batched pass.

Where rows do not interact, one forward and one backward pass give every row's layer inputs a and output gradients b, and each
victim's weight gradient is a product of its own a and b. Nothing stays on the model: the taps are hooks that live for one pass.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from gradveil.core.gpu import suits
from gradveil.core.gradients import Gradients, Loss, per_sample, trainable
from gradveil.core.layers import FORWARDS, RULES, Rule, linear_bias, outer_rows
from gradveil.core.obstacles import direct
from gradveil.core.products import Aim, Pair, total

Forwards = Mapping[type[nn.Module], Callable[[Any, Tensor], Tensor]]


@dataclass(frozen=True)
class Tap:
    """One use of one layer. The edge marks the output in the graph, and holds even if the tensor is later changed in place."""

    layer: nn.Module
    inputs: Tensor
    edge: GradientEdge


@dataclass(frozen=True)
class Pass:
    rows: Tensor
    losses: Tensor
    taps: list[Tap]
    copies: dict[str, Tensor]


def forward(
    model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, parameters: dict[str, Tensor], forwards: Forwards = FORWARDS
) -> Pass:
    """With `parameters` in place of the model's own: detached ones spare autograd the summed weight gradients nobody needs.

    `forwards` are what some kinds of layers do in place of their own; those given differentiate fast twice.
    """
    rows = images.flatten(0, 1)
    rows = rows if rows.requires_grad else rows.detach().requires_grad_()  # or nothing before the first layer would have a graph
    copies = {name: parameters[name].expand(len(rows), *parameters[name].shape[1:]) for name in direct(model)}
    copies = {name: copy if copy.requires_grad else copy.requires_grad_() for name, copy in copies.items()}
    with _taps(model, forwards) as taps:
        logits = functional_call(model, {**parameters, **copies}, (rows,))
    return Pass(rows, per_sample(loss, logits, labels.flatten(0, 1)), taps, copies)


@contextmanager
def _taps(model: nn.Module, forwards: Forwards) -> Iterator[list[Tap]]:
    taps: list[Tap] = []

    def record(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        taps.append(Tap(layer, inputs[0], get_gradient_edge(output)))

    layers = [m for m in model.modules() if type(m) in RULES and any(p.requires_grad for p in m.parameters(recurse=False))]
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


def collect(model: nn.Module, done: Pass, victims: int, differentiable: bool, *, short: bool = False) -> Gradients:
    """The gradients of each victim's mean loss."""
    blames = find_blames(done, victims, differentiable)
    with torch.set_grad_enabled(differentiable):
        return _products(model, done, blames, victims, short)


def compare(model: nn.Module, done: Pass, victims: int, differentiable: bool, aim: Aim, *, short: bool = False) -> Pair:
    """The inner products of those gradients with the aim and with themselves, without writing out those of linear layers."""
    blames = find_blames(done, victims, differentiable)
    with torch.set_grad_enabled(differentiable):
        thin = _thin_weights(model, done, blames, victims, aim)
        pairs = []
        for name, number in thin.items():
            blame = blames[number]
            pairs.append(aim.outer_pair(name, *outer_rows(done.taps[number].inputs.to(blame.dtype), blame, victims)))
        others = [name for name in aim.factors if name not in thin]
        if others:
            pairs.append(aim.pair(_products(model, done, blames, victims, short, without=thin), others))
        return total([dot for dot, _ in pairs]), total([own for _, own in pairs])


def _thin_weights(model: nn.Module, done: Pass, blames: tuple[Tensor, ...], victims: int, aim: Aim) -> dict[str, int]:
    """By name, the tap of each weight whose gradient is a product of few rows, and that is used once.

    On a GPU none: there the kernels for whole gradients are fast, and this way has not been measured.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in trainable(model).items()}
    uses: Counter[Tensor] = Counter(parameter for tap in done.taps for parameter in tap.layer.parameters(recurse=False))
    found = {}
    for number, (tap, blame) in enumerate(zip(done.taps, blames, strict=False)):
        if type(tap.layer) is nn.Linear and not blame.is_cuda:
            weight, rows = tap.layer.weight, blame[..., 0].numel() // victims
            name = names.get(weight, "")
            if name in aim.factors and uses[weight] == 1 and rows * sum(weight.shape) <= weight.numel():
                found[name] = number
    return found


def find_blames(done: Pass, victims: int, differentiable: bool) -> tuple[Tensor, ...]:
    """The gradients of the victims' mean losses at the outputs of the taps, and then at the copies."""
    edges = [tap.edge for tap in done.taps] + [get_gradient_edge(copy) for copy in done.copies.values()]
    total = done.losses.sum() * (victims / len(done.losses))
    return torch.autograd.grad(total, edges, create_graph=differentiable, materialize_grads=True)


def copied(blame: Tensor, victims: int) -> Tensor:
    """The gradient of a parameter of which each row had a copy, (victims, *parameter shape), from that at the copies."""
    return blame.reshape(victims, -1, 1, *blame.shape[1:]).sum(1)


def _products(
    model: nn.Module, done: Pass, blames: tuple[Tensor, ...], victims: int, short: bool, without: Collection[str] = ()
) -> Gradients:
    """Sums over the uses of a parameter, so a layer used twice or a shared weight comes out right. `without` these linear weights."""
    parameters = trainable(model)
    names = {parameter: name for name, parameter in parameters.items()}
    found: dict[str, Tensor] = {}
    for tap, blame in zip(done.taps, blames, strict=False):
        thin = without and any(names.get(parameter) in without for parameter in tap.layer.parameters(recurse=False))
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
    """Both in one format: the blame's, or bf16 for a convolution's large products where that is allowed and faster."""
    dtype = torch.bfloat16 if short and type(tap.layer) is nn.Conv2d and suits(blame) else blame.dtype
    return tap.inputs.to(dtype), blame.to(dtype)
