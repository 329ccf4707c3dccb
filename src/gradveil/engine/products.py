"""Inner products of gradients, victim by victim, and their slopes.

A slope costs one pass over the gradients. Where a gradient is a product of few rows, the inner
products follow from the rows and the gradient is never written out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradveil.core.types import Gradients
from gradveil.engine.fused import load_kernels, suits

LARGE = 20_000  # entries of a victim's tensor from which a call for each victim is the faster way
MANY_PAIRS = 64  # from which on a batched product beats a loop over the pairs on a CPU

DotAndSquare = tuple[Tensor, Tensor]
"""<g', g> and <g', g'> of gradients g' with a target g: each a tensor of one shape, such as
(victims,)."""


@dataclass(frozen=True, eq=False)
class Aim:
    """The gradients (victims, *parameter shape) to compare with, and each parameter's factor.

    A parameter without a factor does not count.
    """

    target: Gradients
    factors: Mapping[str, float]

    def pair(self, found: Gradients, names: Sequence[str] | None = None) -> DotAndSquare:
        """Return <g', g> and <g', g'>, (victims,), summed over the named parameters or over all."""
        names = list(self.factors) if names is None else names
        for name in names:
            self._lay_out(name, found[name])
        return inner_products(
            [found[n] for n in names],
            [self.target[n] for n in names],
            [self.factors[n] for n in names],
        )

    def _lay_out(self, name: str, found: Tensor) -> None:
        """Keep a target in the order of the memory and the format that a GPU finds gradients in."""
        target = self.target[name]
        if suits(found) and (found.dtype != target.dtype or found.stride() != target.stride()):
            alike = torch.empty_like(found)
            if alike.stride() != target.stride() or alike.dtype != target.dtype:
                self.target[name] = alike.copy_(target)

    def outer_pair(self, name: str, blame: Tensor, inputs: Tensor) -> DotAndSquare:
        """Return the same for one parameter's gradient b^T a, without writing it out.

        b is (victims, rows, outputs), a is (victims, rows, inputs).
        """
        dot: Tensor
        square: Tensor
        target = self.target[name]
        dot, square = OuterProducts.apply(blame, inputs, target)  # type: ignore[no-untyped-call]
        return self.factors[name] * dot, self.factors[name] * square


def inner_products(
    found: Sequence[Tensor], target: Sequence[Tensor], factors: Sequence[float]
) -> DotAndSquare:
    """Return sum f <g', g> and sum f <g', g'>, (victims,), over gradients in lists."""
    dot: Tensor
    square: Tensor
    both = (*found, *target)
    dot, square = InnerProducts.apply(tuple(factors), *both)  # type: ignore[no-untyped-call]
    return dot, square


def products(found: Tensor, target: Tensor) -> DotAndSquare:
    """Return <g', g> and <g', g'> of each victim, (victims,), without slopes."""
    if suits(found):
        both: DotAndSquare = load_kernels().products([found], [target], [1.0])
        return both
    found = found.detach()  # this is the inside of a function that has its own slope
    if found.is_cuda or found.numel() < LARGE * len(found):
        return dots(found, target), dots(found, found)
    # Victim by victim: its gradient is read from memory once.
    flat = ((g.flatten(), t.flatten()) for g, t in zip(found, target, strict=True))
    pairs = [(torch.dot(g, t), torch.dot(g, g)) for g, t in flat]
    return torch.stack([dot for dot, _ in pairs]), torch.stack([square for _, square in pairs])


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner product of each victim's tensors, (victims,)."""
    return (left * right).reshape(len(left), -1).sum(1)


def total(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    return torch.stack(list(parts)).sum(0)


def thin_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right for each of many pairs.

    On a CPU torch's batched product takes up to fifty times as long as a loop over the pairs.
    """
    if left.is_cuda:
        return torch.bmm(left, right)
    found = left.new_empty(len(left), left.shape[1], right.shape[2])
    for a, b, out in zip(left, right, found, strict=True):
        torch.mm(a, b, out=out)
    return found


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right for each of many pairs; it can be differentiated any number of times."""
    if left.is_cuda or len(left) > MANY_PAIRS:
        return torch.bmm(left, right)
    found: Tensor = _Multiplied.apply(left, right)  # type: ignore[no-untyped-call]
    return found


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return thin_product(left, right)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        return (
            multiply(slope, right.transpose(1, 2)) if ctx.needs_input_grad[0] else None,
            multiply(left.transpose(1, 2), slope) if ctx.needs_input_grad[1] else None,
        )


class InnerProducts(torch.autograd.Function):
    """sum f <g', g> and sum f <g', g'>, with the slope f (a g + 2 b g') in one pass."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, factors: tuple[float, ...], *both: Tensor
    ) -> DotAndSquare:
        ctx.factors = factors  # type: ignore[attr-defined]
        ctx.save_for_backward(*both)
        found, target = both[: len(factors)], both[len(factors) :]
        if all(map(suits, found)):
            pair: DotAndSquare = load_kernels().products(found, target, factors)
            return pair
        parts = [
            (f * dot, f * square)
            for f, (dot, square) in zip(factors, map(products, found, target), strict=True)
        ]
        return total([dot for dot, _ in parts]), total([square for _, square in parts])

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, to_dot: Tensor, to_square: Tensor
    ) -> tuple[Tensor | None, ...]:
        factors: tuple[float, ...] = ctx.factors  # type: ignore[attr-defined]
        both: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        found, target = both[: len(factors)], both[len(factors) :]
        slopes = [
            _mix(g, t, to_square, to_dot, f) for g, t, f in zip(found, target, factors, strict=True)
        ]
        return (None, *slopes, *(None for _ in target))


class OuterProducts(torch.autograd.Function):
    """<b^T a, g> = sum (b g) * a and |b^T a|^2 = sum (b b^T) * (a a^T), for each victim.

    b g and a g^T, for the slopes, are made one after the other, so that g is read from memory once.
    """

    @staticmethod
    def forward(ctx: Any, blame: Tensor, inputs: Tensor, target: Tensor) -> DotAndSquare:
        to_inputs, to_blame = torch.empty_like(inputs), torch.empty_like(blame)
        for b, a, g, at_a, at_b in zip(blame, inputs, target, to_inputs, to_blame, strict=True):
            torch.mm(b, g, out=at_a)
            torch.mm(a, g.T, out=at_b)
        outer, inner = blame @ blame.transpose(1, 2), inputs @ inputs.transpose(1, 2)
        ctx.save_for_backward(blame, inputs, to_blame, to_inputs, outer, inner)
        return (to_inputs * inputs).sum((1, 2)), (outer * inner).sum((1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_dot: Tensor, to_square: Tensor) -> tuple[Tensor, Tensor, None]:
        blame, inputs, to_blame, to_inputs, outer, inner = ctx.saved_tensors
        to_dot, twice = to_dot.view(-1, 1, 1), 2 * to_square.view(-1, 1, 1)
        return (
            to_dot * to_blame + twice * (inner @ blame),
            to_dot * to_inputs + twice * (outer @ inputs),
            None,
        )


def _mix(found: Tensor, target: Tensor, to_square: Tensor, to_dot: Tensor, factor: float) -> Tensor:
    """Return f (2 a g' + b g), with numbers a and b for each victim."""
    if suits(found):
        fused: Tensor = load_kernels().mix(found, target, to_square, to_dot, factor)
        return fused
    to_found, to_target = 2 * factor * to_square, factor * to_dot
    if found.is_cuda or found.numel() < LARGE * len(found):
        shape = (-1, *(1,) * (found.dim() - 1))
        return (found * to_found.view(shape)).addcmul_(target, to_target.view(shape))
    mixed = torch.empty_like(found)
    rows = zip(mixed, found, target, to_found.tolist(), to_target.tolist(), strict=True)
    for out, g, t, a, b in rows:
        torch.mul(g, a, out=out).add_(t, alpha=b)
    return mixed
