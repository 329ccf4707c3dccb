"""Inner products of gradients, victim by victim, with slopes that cost one pass over them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.core.gpu import kernels, suits

LARGE = 20_000  # entries of a victim's tensor from which a copy of the product costs more than a call for each victim


def dots(left: Tensor, right: Tensor) -> Tensor:
    """The inner product of each victim's tensors."""
    return (left * right).reshape(len(left), -1).sum(1)


class InnerProducts(torch.autograd.Function):
    """sum f <g', g> and sum f <g', g'>; their slope is one pass over the gradients, f (a g + 2 b g')."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, factors: tuple[float, ...], *both: Tensor) -> tuple[Tensor, Tensor]:
        ctx.factors = factors  # type: ignore[attr-defined]
        ctx.save_for_backward(*both)
        found, target = both[: len(factors)], both[len(factors) :]
        parts = [(f * dot, f * own) for f, (dot, own) in zip(factors, map(products, found, target), strict=True)]
        return total([dot for dot, _ in parts]), total([own for _, own in parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, to_dot: Tensor, to_own: Tensor) -> tuple[Tensor | None, ...]:
        factors: tuple[float, ...] = ctx.factors  # type: ignore[attr-defined]
        both: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        found, target = both[: len(factors)], both[len(factors) :]
        slopes = [_mix(g, t, 2 * f * to_own, f * to_dot) for g, t, f in zip(found, target, factors, strict=True)]
        return (None, *slopes, *(None for _ in target))


def products(found: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """<g', g> and <g', g'> of each victim."""
    if suits(found):
        both: tuple[Tensor, Tensor] = kernels().products(found, target)
        return both
    found = found.detach()  # this is the inside of a function that has its own slope
    if found.is_cuda or found.numel() < LARGE * len(found):
        return dots(found, target), dots(found, found)
    flat = ((g.flatten(), t.flatten()) for g, t in zip(found, target, strict=True))
    pairs = [(torch.dot(g, t), torch.dot(g, g)) for g, t in flat]  # victim by victim: its gradient is read from memory once
    return torch.stack([dot for dot, _ in pairs]), torch.stack([own for _, own in pairs])


def _mix(found: Tensor, target: Tensor, to_found: Tensor, to_target: Tensor) -> Tensor:
    """a g' + b g, with each victim's own a and b."""
    if suits(found):
        fused: Tensor = kernels().mix(found, target, to_found, to_target)
        return fused
    if found.is_cuda or found.numel() < LARGE * len(found):
        shape = (-1, *(1,) * (found.dim() - 1))
        return (found * to_found.view(shape)).addcmul_(target, to_target.view(shape))
    mixed = torch.empty_like(found)
    for out, g, t, a, b in zip(mixed, found, target, to_found.tolist(), to_target.tolist(), strict=True):
        torch.mul(g, a, out=out).add_(t, alpha=b)
    return mixed


def total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)
