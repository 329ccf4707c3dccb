"""Inner products of gradients, victim by victim, with slopes that cost one pass over them, or none where a gradient has few rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradveil.core.types import Gradients
from gradveil.engine.device import load_kernels, suits


def thin_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right for each of many pairs: on a CPU torch's batched product takes up to fifty times as long as one after the other."""
    if left.is_cuda:
        return torch.bmm(left, right)
    found = left.new_empty(len(left), left.shape[1], right.shape[2])
    for a, b, out in zip(left, right, found, strict=True):
        torch.mm(a, b, out=out)
    return found


LARGE = 20_000  # entries of a victim's tensor from which a copy of the product costs more than a call for each victim


Pair = tuple[Tensor, Tensor]
"""<g', g> and <g', g'>, weighted and summed over the parameters: a value of each for every victim."""


@dataclass(frozen=True, eq=False)
class Aim:
    """What gradients are compared with, (victims, *parameter shape), and how much each parameter counts; those not named do not."""

    target: Gradients
    factors: Mapping[str, float]

    def pair(self, found: Gradients, names: Sequence[str] | None = None) -> Pair:
        """Of these parameters; of all without names."""
        names = list(self.factors) if names is None else names
        return inner_products(
            [found[n] for n in names],
            [self.target[n] for n in names],
            [self.factors[n] for n in names],
        )

    def outer_pair(self, name: str, blame: Tensor, inputs: Tensor) -> Pair:
        """The same of a gradient b^T a that is never written out, from (victims, rows, outputs) and (victims, rows, inputs)."""
        dot: Tensor
        own: Tensor
        dot, own = OuterProducts.apply(blame, inputs, self.target[name])  # type: ignore[no-untyped-call]
        return self.factors[name] * dot, self.factors[name] * own


def dots(left: Tensor, right: Tensor) -> Tensor:
    """The inner product of each victim's tensors."""
    return (left * right).reshape(len(left), -1).sum(1)


def inner_products(
    found: Sequence[Tensor], target: Sequence[Tensor], factors: Sequence[float]
) -> Pair:
    """Of gradients that lie side by side in lists."""
    dot: Tensor
    own: Tensor
    dot, own = InnerProducts.apply(tuple(factors), *found, *target)  # type: ignore[no-untyped-call]
    return dot, own


class InnerProducts(torch.autograd.Function):
    """sum f <g', g> and sum f <g', g'>; their slope is one pass over the gradients, f (a g + 2 b g')."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, factors: tuple[float, ...], *both: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.factors = factors  # type: ignore[attr-defined]
        ctx.save_for_backward(*both)
        found, target = both[: len(factors)], both[len(factors) :]
        parts = [
            (f * dot, f * own)
            for f, (dot, own) in zip(factors, map(products, found, target), strict=True)
        ]
        return total([dot for dot, _ in parts]), total([own for _, own in parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, to_dot: Tensor, to_own: Tensor
    ) -> tuple[Tensor | None, ...]:
        factors: tuple[float, ...] = ctx.factors  # type: ignore[attr-defined]
        both: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        found, target = both[: len(factors)], both[len(factors) :]
        slopes = [
            _mix(g, t, 2 * f * to_own, f * to_dot)
            for g, t, f in zip(found, target, factors, strict=True)
        ]
        return (None, *slopes, *(None for _ in target))


class OuterProducts(torch.autograd.Function):
    """<b^T a, g> = sum (b g) * a and |b^T a|^2 = sum (b b^T) * (a a^T): g is read once here and once for the slopes."""

    @staticmethod
    def forward(ctx: Any, blame: Tensor, inputs: Tensor, target: Tensor) -> Pair:
        carried = thin_product(blame, target)
        outer, inner = blame @ blame.transpose(1, 2), inputs @ inputs.transpose(1, 2)
        ctx.save_for_backward(blame, inputs, target, carried, outer, inner)
        return (carried * inputs).sum((1, 2)), (outer * inner).sum((1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_dot: Tensor, to_own: Tensor) -> tuple[Tensor, Tensor, None]:
        blame, inputs, target, carried, outer, inner = ctx.saved_tensors
        to_dot, to_own = to_dot.view(-1, 1, 1), 2 * to_own.view(-1, 1, 1)
        to_blame = to_dot * thin_product(inputs, target.transpose(1, 2)) + to_own * (inner @ blame)
        return to_blame, to_dot * carried + to_own * (outer @ inputs), None


def products(found: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """<g', g> and <g', g'> of each victim."""
    if suits(found):
        both: tuple[Tensor, Tensor] = load_kernels().products(found, target)
        return both
    found = found.detach()  # this is the inside of a function that has its own slope
    if found.is_cuda or found.numel() < LARGE * len(found):
        return dots(found, target), dots(found, found)
    flat = ((g.flatten(), t.flatten()) for g, t in zip(found, target, strict=True))
    pairs = [
        (torch.dot(g, t), torch.dot(g, g)) for g, t in flat
    ]  # victim by victim: its gradient is read from memory once
    return torch.stack([dot for dot, _ in pairs]), torch.stack([own for _, own in pairs])


def _mix(found: Tensor, target: Tensor, to_found: Tensor, to_target: Tensor) -> Tensor:
    """a g' + b g, with each victim's own a and b."""
    if suits(found):
        fused: Tensor = load_kernels().mix(found, target, to_found, to_target)
        return fused
    if found.is_cuda or found.numel() < LARGE * len(found):
        shape = (-1, *(1,) * (found.dim() - 1))
        return (found * to_found.view(shape)).addcmul_(target, to_target.view(shape))
    mixed = torch.empty_like(found)
    for out, g, t, a, b in zip(
        mixed, found, target, to_found.tolist(), to_target.tolist(), strict=True
    ):
        torch.mul(g, a, out=out).add_(t, alpha=b)
    return mixed


def total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)
