"""How far found gradients are from the observed ones: one number for each victim, weighted by layer and masked where asked.

A distance is a value; `against(target)` prepares what depends on the target alone and gives the function to be minimized.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.gpu import kernels, suits
from gradveil.core.gradients import Gradients

LARGE = 20_000  # entries of a victim's tensor from which a copy of the product costs more than a call for each victim

Measure = Callable[[Gradients], Tensor]


@dataclass(frozen=True)
class Distance(ABC):
    """`weights` are (pattern, factor) pairs: the first pattern that fits a parameter's name decides, 0 leaves it out, no fit means 1.

    `nonzero` matches only where the observed gradient is not zero: what pruning left.
    """

    weights: tuple[tuple[str, float], ...] = field(default=(), kw_only=True)
    nonzero: bool = field(default=False, kw_only=True)

    def against(self, target: Gradients) -> Measure:
        """The function of found gradients, both (victims, *parameter shape)."""
        chosen = {name: factor for name in target if (factor := self._factor(name)) > 0}
        if not chosen:
            raise GradveilError(f"the layer weights {self.weights} leave no parameter to match")
        wanted = [target[name] for name in chosen]
        masks = [(observed != 0).to(observed.dtype) for observed in wanted] if self.nonzero else None
        measure = self.measure(wanted, list(chosen.values()))

        def distance(found: Gradients) -> Tensor:
            parts = [found[name] for name in chosen]
            return measure([part * mask for part, mask in zip(parts, masks, strict=True)] if masks else parts)

        return distance

    def _factor(self, name: str) -> float:
        return next((factor for pattern, factor in self.weights if fnmatch(name, pattern)), 1.0)

    @abstractmethod
    def measure(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Sequence[Tensor]], Tensor]:
        """For the parameters that count, in one order."""


@dataclass(frozen=True)
class Cosine(Distance):
    """1 - <g', g> / (|g'| |g|) over all parameters together (Geiping et al. 2020)."""

    def measure(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Sequence[Tensor]], Tensor]:
        norm = _total([factor * _products(part, part)[1] for part, factor in zip(target, factors, strict=True)])

        def distance(found: Sequence[Tensor]) -> Tensor:
            dot: Tensor
            own: Tensor
            dot, own = _InnerProducts.apply(tuple(factors), *found, *target)  # type: ignore[no-untyped-call]
            return 1 - dot * torch.rsqrt(own * norm)

        return distance


@dataclass(frozen=True)
class LayerCosine(Distance):
    """The mean over parameters of each one's own cosine distance."""

    def measure(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Sequence[Tensor]], Tensor]:
        tiny = torch.finfo(target[0].dtype).tiny
        norms = [dots(part, part) for part in target]

        def distance(found: Sequence[Tensor]) -> Tensor:
            each = (
                factor * (1 - dots(one, part) * torch.rsqrt((dots(one, one) * norm).clamp(min=tiny)))
                for one, part, norm, factor in zip(found, target, norms, factors, strict=True)
            )
            return _total(list(each)) / sum(factors)

        return distance


@dataclass(frozen=True)
class L2(Distance):
    """The sum of squared differences (Zhu et al. 2019)."""

    def measure(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Sequence[Tensor]], Tensor]:
        return lambda found: _sums(found, target, factors, torch.square)


@dataclass(frozen=True)
class L1(Distance):
    """The sum of absolute differences."""

    def measure(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Sequence[Tensor]], Tensor]:
        return lambda found: _sums(found, target, factors, torch.abs)


def dots(left: Tensor, right: Tensor) -> Tensor:
    """The inner product of each victim's tensors."""
    return (left * right).reshape(len(left), -1).sum(1)


class _InnerProducts(torch.autograd.Function):
    """sum f <g', g> and sum f <g', g'>; their slope is one pass over the gradients, f (a g + 2 b g')."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, factors: tuple[float, ...], *both: Tensor) -> tuple[Tensor, Tensor]:
        ctx.factors = factors  # type: ignore[attr-defined]
        ctx.save_for_backward(*both)
        found, target = both[: len(factors)], both[len(factors) :]
        parts = [(f * dot, f * own) for f, (dot, own) in zip(factors, map(_products, found, target), strict=True)]
        return _total([dot for dot, _ in parts]), _total([own for _, own in parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, to_dot: Tensor, to_own: Tensor) -> tuple[Tensor | None, ...]:
        factors: tuple[float, ...] = ctx.factors  # type: ignore[attr-defined]
        both: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        found, target = both[: len(factors)], both[len(factors) :]
        slopes = [_mix(g, t, 2 * f * to_own, f * to_dot) for g, t, f in zip(found, target, factors, strict=True)]
        return (None, *slopes, *(None for _ in target))


def _products(found: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
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


def _sums(found: Sequence[Tensor], target: Sequence[Tensor], factors: Sequence[float], size: Callable[[Tensor], Tensor]) -> Tensor:
    pairs = zip(found, target, factors, strict=True)
    return _total([factor * size(one - part).reshape(len(one), -1).sum(1) for one, part, factor in pairs])


def _total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


cosine = Cosine()
layer_cosine = LayerCosine()
l1 = L1()
l2 = L2()
