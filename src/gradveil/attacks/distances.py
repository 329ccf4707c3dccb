"""How far found gradients are from the observed ones: one number for each victim, weighted by layer and masked where asked.

A distance is a value; `against(target)` prepares what depends on the target alone and gives the function to be minimized.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.gradients import Gradients
from gradveil.core.products import Aim, dots, inner_products, products, total

Measure = Callable[[Gradients], Tensor]


@dataclass(frozen=True, eq=False)
class ByProducts:
    """A measure that needs the inner products with an aim alone: who can give those need not write out the gradients."""

    aim: Aim
    of: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, found: Gradients) -> Tensor:
        return self.of(*self.aim.pair(found))


@dataclass(frozen=True)
class Distance(ABC):
    """`weights` are (pattern, factor) pairs: the first pattern that fits a parameter's name decides, 0 leaves it out, no fit means 1.

    What an attacker knows enters by three more fields, which `targets` works out for the victims at hand. `leave_out`: the layers
    that are random, those that are defended, or both. `nonzero`: match only where the observed gradient is not zero, what pruning left.
    `rounds`: match all that was shared of a batch, where each round adds what those before it cut off.
    """

    weights: tuple[tuple[str, float], ...] = field(default=(), kw_only=True)
    leave_out: Literal["random", "defended", "both"] | None = field(default=None, kw_only=True)
    nonzero: bool = field(default=False, kw_only=True)
    rounds: bool = field(default=False, kw_only=True)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of `Knowledge` fields that the three stand for."""
        layers = ((f"{kind}_layers", self.leave_out in (kind, "both")) for kind in ("random", "defended"))
        wanted = *layers, ("pruned", self.nonzero), ("earlier", self.rounds)
        return tuple(name for name, asked in wanted if asked)

    def against(self, target: Gradients, times: Gradients | None = None) -> Measure:
        """The function of found gradients, both (victims, *parameter shape). `times`: how often each entry is contained in the target."""
        chosen = self._chosen(target)
        wanted = [target[name] for name in chosen]
        masks = [(observed != 0).to(observed.dtype) for observed in wanted] if self.nonzero else None
        masks = masks if times is None else [times[name] for name in chosen]
        measure = self.measure(wanted, list(chosen.values()))

        def distance(found: Gradients) -> Tensor:
            parts = [found[name] for name in chosen]
            return measure([part * mask for part, mask in zip(parts, masks, strict=True)] if masks else parts)

        return distance

    def _chosen(self, target: Gradients) -> dict[str, float]:
        """The parameters that count, and how much."""
        chosen = {name: factor for name in target if (factor := self._factor(name)) > 0}
        if not chosen:
            raise GradveilError(f"the layer weights {self.weights} leave no parameter to match")
        return chosen

    def _factor(self, name: str) -> float:
        return next((factor for pattern, factor in self.weights if fnmatch(name, pattern)), 1.0)

    @abstractmethod
    def measure(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Sequence[Tensor]], Tensor]:
        """For the parameters that count, in one order."""


@dataclass(frozen=True)
class Cosine(Distance):
    """1 - <g', g> / (|g'| |g|) over all parameters together (Geiping et al. 2020)."""

    def against(self, target: Gradients, times: Gradients | None = None) -> Measure:
        if self.nonzero or times is not None:
            return super().against(target, times)
        chosen = self._chosen(target)
        aim = Aim({name: target[name] for name in chosen}, chosen)
        return ByProducts(aim, self.of_products(list(aim.target.values()), list(chosen.values())))

    def measure(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Sequence[Tensor]], Tensor]:
        of = self.of_products(target, factors)
        return lambda found: of(*inner_products(found, target, factors))

    def of_products(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Tensor, Tensor], Tensor]:
        """The distance from <g', g> and <g', g'>."""
        norm = _norm(target, factors)
        return lambda dot, own: 1 - dot * torch.rsqrt(own * norm)


@dataclass(frozen=True)
class Angle(Cosine):
    """|g|^2 (1 - cos), the cosine distance in the units of a squared difference: near a match, half of |s g' - g|^2 with the best s."""

    def of_products(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Tensor, Tensor], Tensor]:
        norm, cosine = _norm(target, factors), super().of_products(target, factors)
        return lambda dot, own: norm * cosine(dot, own)


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
            return total(list(each)) / sum(factors)

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


@dataclass(frozen=True)
class FreeL1(L1):
    """The same of s g' - g, with the length s > 0 that fits best by least squares."""

    def measure(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Sequence[Tensor]], Tensor]:
        apart = super().measure(target, factors)

        def distance(found: Sequence[Tensor]) -> Tensor:
            dot, own = (total([dots(one, other) for one, other in zip(found, others, strict=True)]) for others in (target, found))
            length = dot.abs() / own.clamp(min=torch.finfo(own.dtype).tiny)
            return apart([one * length.view(-1, *(1,) * (one.dim() - 1)) for one in found])

        return distance


def _norm(target: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    return total([factor * products(part, part)[1] for part, factor in zip(target, factors, strict=True)])


def _sums(found: Sequence[Tensor], target: Sequence[Tensor], factors: Sequence[float], size: Callable[[Tensor], Tensor]) -> Tensor:
    pairs = zip(found, target, factors, strict=True)
    return total([factor * size(one - part).reshape(len(one), -1).sum(1) for one, part, factor in pairs])


cosine = Cosine()
layer_cosine = LayerCosine()
l1 = L1()
l2 = L2()
angle = Angle()
free_l1 = FreeL1()
