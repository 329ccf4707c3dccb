"""How far found gradients are from the observed ones: one number for each victim, weighted by layer and masked where asked.

A distance is a value; `against(target)` prepares what depends on the target alone and gives the function to be minimized.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError, unknown
from gradveil.core.types import Gradients, Knowledge, Observation, stacked
from gradveil.engine.products import Aim, dots, inner_products, products, total

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
        layers = (
            (f"{kind}_layers", self.leave_out in (kind, "both")) for kind in ("random", "defended")
        )
        wanted = *layers, ("pruned", self.nonzero), ("earlier", self.rounds)
        return tuple(name for name, asked in wanted if asked)

    def against(self, target: Gradients, times: Gradients | None = None) -> Measure:
        """The function of found gradients, both (victims, *parameter shape). `times`: how often each entry is contained in the target."""
        chosen = self._chosen(target)
        wanted = [target[name] for name in chosen]
        masks = (
            [(observed != 0).to(observed.dtype) for observed in wanted] if self.nonzero else None
        )
        masks = masks if times is None else [times[name] for name in chosen]
        measure = self.measure(wanted, list(chosen.values()))

        def distance(found: Gradients) -> Tensor:
            parts = [found[name] for name in chosen]
            return measure(
                [part * mask for part, mask in zip(parts, masks, strict=True)] if masks else parts
            )

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
    def measure(
        self, target: Sequence[Tensor], factors: Sequence[float]
    ) -> Callable[[Sequence[Tensor]], Tensor]:
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

    def measure(
        self, target: Sequence[Tensor], factors: Sequence[float]
    ) -> Callable[[Sequence[Tensor]], Tensor]:
        of = self.of_products(target, factors)
        return lambda found: of(*inner_products(found, target, factors))

    def of_products(
        self, target: Sequence[Tensor], factors: Sequence[float]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """The distance from <g', g> and <g', g'>."""
        norm = _norm(target, factors)
        return lambda dot, own: 1 - dot * torch.rsqrt(own * norm)


@dataclass(frozen=True)
class Angle(Cosine):
    """|g|^2 (1 - cos), the cosine distance in the units of a squared difference: near a match, half of |s g' - g|^2 with the best s."""

    def of_products(
        self, target: Sequence[Tensor], factors: Sequence[float]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        norm, cosine = _norm(target, factors), super().of_products(target, factors)
        return lambda dot, own: norm * cosine(dot, own)


@dataclass(frozen=True)
class LayerCosine(Distance):
    """The mean over parameters of each one's own cosine distance."""

    def measure(
        self, target: Sequence[Tensor], factors: Sequence[float]
    ) -> Callable[[Sequence[Tensor]], Tensor]:
        tiny = torch.finfo(target[0].dtype).tiny
        norms = [dots(part, part) for part in target]

        def distance(found: Sequence[Tensor]) -> Tensor:
            each = (
                factor
                * (1 - dots(one, part) * torch.rsqrt((dots(one, one) * norm).clamp(min=tiny)))
                for one, part, norm, factor in zip(found, target, norms, factors, strict=True)
            )
            return total(list(each)) / sum(factors)

        return distance


@dataclass(frozen=True)
class L2(Distance):
    """The sum of squared differences (Zhu et al. 2019)."""

    def measure(
        self, target: Sequence[Tensor], factors: Sequence[float]
    ) -> Callable[[Sequence[Tensor]], Tensor]:
        return lambda found: _sums(found, target, factors, torch.square)


@dataclass(frozen=True)
class L1(Distance):
    """The sum of absolute differences."""

    def measure(
        self, target: Sequence[Tensor], factors: Sequence[float]
    ) -> Callable[[Sequence[Tensor]], Tensor]:
        return lambda found: _sums(found, target, factors, torch.abs)


@dataclass(frozen=True)
class FreeL1(L1):
    """The same of s g' - g, with the length s > 0 that fits best by least squares."""

    def measure(
        self, target: Sequence[Tensor], factors: Sequence[float]
    ) -> Callable[[Sequence[Tensor]], Tensor]:
        apart = super().measure(target, factors)

        def distance(found: Sequence[Tensor]) -> Tensor:
            dot, own = (
                total([dots(one, other) for one, other in zip(found, others, strict=True)])
                for others in (target, found)
            )
            length = dot.abs() / own.clamp(min=torch.finfo(own.dtype).tiny)
            return apart([one * length.view(-1, *(1,) * (one.dim() - 1)) for one in found])

        return distance


def _norm(target: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    return total(
        [factor * products(part, part)[1] for part, factor in zip(target, factors, strict=True)]
    )


def _sums(
    found: Sequence[Tensor],
    target: Sequence[Tensor],
    factors: Sequence[float],
    size: Callable[[Tensor], Tensor],
) -> Tensor:
    pairs = zip(found, target, factors, strict=True)
    return total(
        [factor * size(one - part).reshape(len(one), -1).sum(1) for one, part, factor in pairs]
    )


cosine = Cosine()
layer_cosine = LayerCosine()
l1 = L1()
l2 = L2()
angle = Angle()
free_l1 = FreeL1()


SHARED = ("random_layers", "defended_layers", "pruned", "noise", "momentum")


@dataclass(frozen=True)
class Likelihood(Distance):
    """Minus the logarithm of the noise's density, but for a constant: sum of d^2 / (2 s^2) if Gaussian, of |d| / s if Laplacian.

    `free`: the length of the found gradient is left to fit, and only its direction counts. On trained models a search gets stuck on the
    length (16 images, noise 1e-2: 10.0 dB with it, 15.2 without, 12.2 by the standard attack).
    """

    free: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, "noise")

    def measure(
        self, target: Sequence[Tensor], factors: Sequence[float]
    ) -> Callable[[Sequence[Tensor]], Tensor]:
        raise GradveilError(
            "a likelihood depends on the noise: use targets.measure(distance, seen, restarts)"
        )

    def of(self, kind: str, scale: float) -> Distance:
        """As a distance of its own."""
        exact: dict[str, tuple[Distance, float]] = {
            "gaussian": (l2, 2 * scale**2),
            "laplacian": (l1, scale),
        }
        forms = (
            {"gaussian": (angle, scale**2), "laplacian": (free_l1, scale)} if self.free else exact
        )
        if kind not in forms:
            raise unknown("noise", kind, forms)
        if not 0 < scale < float("inf"):
            raise GradveilError(
                f"noise of scale {scale}: a likelihood needs one above 0 and finite"
            )
        form, divisor = forms[kind]
        weights = (
            *((pattern, factor / divisor) for pattern, factor in self.weights),
            ("*", 1 / divisor),
        )
        return replace(
            form,
            weights=weights,
            leave_out=self.leave_out,
            nonzero=self.nonzero,
            rounds=self.rounds,
        )


likelihood = Likelihood()


def measure(distance: Distance, seen: Sequence[Observation], restarts: int) -> Measure:
    """The function of found gradients (victims x restarts, ...) that is to be minimized."""
    knowledge = _alike(seen)
    if isinstance(distance, Likelihood):
        assert knowledge.noise is not None
        distance = distance.of(*knowledge.noise)
    left_out = tuple((pattern, 0.0) for pattern in _left_out(distance, seen[0]))
    distance = replace(
        distance,
        weights=(*left_out, *distance.weights),
        leave_out=None,
        nonzero=distance.nonzero and bool(knowledge.pruned),
    )
    target, times = totals(seen) if distance.rounds else (stacked(list(seen)), None)
    each = {name: part.repeat_interleave(restarts, 0) for name, part in target.items()}
    often = (
        None
        if times is None
        else {name: part.repeat_interleave(restarts, 0) for name, part in times.items()}
    )
    return distance.against(each, often)


def totals(seen: Sequence[Observation]) -> tuple[Gradients, Gradients]:
    """The sum of all that was shared of each victim's batch, and how many times the gradient is contained in it, entry by entry.

    A client with momentum m keeps u <- m u + g and v <- v + u, shares the largest of v, and sets u and v to zero there (deep
    gradient compression, Lin et al. 2018). The same run with g = 1 says how often g is contained; 0 where nothing was ever shared.
    """
    found = [_total(one) for one in seen]
    names = seen[0].gradients
    return {n: torch.stack([total[n] for total, _ in found]) for n in names}, {
        n: torch.stack([often[n] for _, often in found]) for n in names
    }


def _total(one: Observation) -> tuple[Gradients, Gradients]:
    assert one.knowledge.earlier is not None
    shared = [*one.knowledge.earlier, one.gradients]
    momentum = one.knowledge.momentum or 0.0
    total = {name: torch.stack([own[name] for own in shared]).sum(0) for name in one.gradients}
    return total, {
        name: _times([own[name] != 0 for own in shared], momentum, total[name]) for name in total
    }


def _times(masks: Sequence[Tensor], momentum: float, like: Tensor) -> Tensor:
    times = torch.zeros_like(like)
    speed, kept = torch.zeros_like(like), torch.zeros_like(like)
    for mask in masks:
        speed = momentum * speed + 1
        kept = kept + speed
        times = torch.where(mask, times + kept, times)
        speed, kept = (torch.where(mask, 0.0, value) for value in (speed, kept))
    return times


def _left_out(distance: Distance, one: Observation) -> tuple[str, ...]:
    """Patterns of the parameters that do not count."""
    if distance.leave_out is None:
        return ()
    known = {"random": one.knowledge.random_layers, "defended": one.knowledge.defended_layers}
    found: list[str] = []
    for kind, patterns in known.items():
        if distance.leave_out not in (kind, "both"):
            continue
        assert patterns is not None
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in one.gradients):
                raise GradveilError(
                    f"{kind} layers {pattern!r}: no shared gradient has such a name, as {next(iter(one.gradients))!r}"
                )
        found += patterns
    if all(any(fnmatch(name, pattern) for pattern in found) for name in one.gradients):
        kinds = "random or defended" if distance.leave_out == "both" else distance.leave_out
        raise GradveilError(
            f"every layer with a gradient is {kinds}: to leave them out would leave no parameter to match"
        )
    return tuple(found)


def _alike(seen: Sequence[Observation]) -> Knowledge:
    first = seen[0].knowledge
    for one in seen:
        for name in SHARED:
            if getattr(one.knowledge, name) != getattr(first, name):
                both = f"{getattr(first, name)} and {getattr(one.knowledge, name)}"
                raise GradveilError(
                    f"victims attacked together must be alike in {name}, which is {both}"
                )
    return first
