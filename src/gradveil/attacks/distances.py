"""Distances between found gradients and the observed ones: one number for each victim.

A distance is a value. Its `bind` takes the victims at hand and returns a `Measure`, the function
that an attack minimizes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError, unknown
from gradveil.core.types import Gradients, Knowledge, Observation, stacked
from gradveil.engine.draws import Draws
from gradveil.engine.products import Aim, dots, products, total
from gradveil.engine.shares import Shares

ALIKE = ("random_layers", "defended_layers", "pruned", "noise", "momentum")
"""Knowledge that must be equal for all victims of one attack."""


class Measure(ABC):
    """Compute the distance of each row from its target."""

    @abstractmethod
    def __call__(self, found: Gradients) -> Tensor:
        """Return (rows,) distances of gradients (rows, *parameter shape)."""

    def from_shares(
        self, shares: Shares, images: Tensor, labels: Tensor, draws: Draws, differentiable: bool
    ) -> Tensor:
        """Return (rows,) distances of what clients with these images and labels would share."""
        return self(shares(images, labels, draws=draws, differentiable=differentiable))


@dataclass(frozen=True, eq=False)
class GradientMeasure(Measure):
    """A measure that is a function of the gradients."""

    function: Callable[[Gradients], Tensor]

    def __call__(self, found: Gradients) -> Tensor:
        return self.function(found)


@dataclass(frozen=True, eq=False)
class ProductMeasure(Measure):
    """A measure that is a function of two inner products, <g', g> and <g', g'>.

    The engine computes those without writing out the gradients, which is much faster.
    """

    aim: Aim
    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, found: Gradients) -> Tensor:
        return self.function(*self.aim.pair(found))

    def from_shares(
        self, shares: Shares, images: Tensor, labels: Tensor, draws: Draws, differentiable: bool
    ) -> Tensor:
        pair = shares.compare(images, labels, self.aim, draws=draws, differentiable=differentiable)
        return self.function(*pair)


@dataclass(frozen=True)
class Distance(ABC):
    """A distance between gradients. A subclass implements `measure`.

    `weights` are (pattern, factor) pairs for parameter names: the first pattern that fits decides,
    a factor of 0 leaves the parameter out, and 1 is the factor where no pattern fits.

    The other fields say what the attacker makes of its knowledge. `leave_out` ignores the layers
    that are random, those that are defended, or both. `nonzero` compares only entries that pruning
    kept. `rounds` compares with the sum of all rounds, where a client adds to each round what it
    cut off before.
    """

    weights: tuple[tuple[str, float], ...] = field(default=(), kw_only=True)
    leave_out: Literal["random", "defended", "both"] | None = field(default=None, kw_only=True)
    nonzero: bool = field(default=False, kw_only=True)
    rounds: bool = field(default=False, kw_only=True)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the `Knowledge` fields that these settings use."""
        layers = (
            (f"{kind}_layers", self.leave_out in (kind, "both")) for kind in ("random", "defended")
        )
        wanted = *layers, ("pruned", self.nonzero), ("earlier", self.rounds)
        return tuple(name for name, asked in wanted if asked)

    def within(self, steps: int) -> "Distance":
        """Return the distance for a search of so many steps, before which it makes no more."""
        return self

    def bind(self, seen: Sequence[Observation], restarts: int = 1) -> Measure:
        """Return the function of found gradients (victims x restarts, ...) to be minimized."""
        knowledge = _common_knowledge(seen)
        factors = self._factors(seen[0])
        target, masks = sum_rounds(seen) if self.rounds else (stacked(list(seen)), None)
        if masks is None and self.nonzero and knowledge.pruned:
            masks = {name: (target[name] != 0).to(target[name].dtype) for name in factors}
        rows = {name: target[name].repeat_interleave(restarts, 0) for name in factors}
        measure = self.measure(Aim(rows, factors), knowledge)
        if masks is None:
            return measure
        each = {name: masks[name].repeat_interleave(restarts, 0) for name in factors}
        return GradientMeasure(
            lambda found: measure({name: found[name] * mask for name, mask in each.items()})
        )

    @abstractmethod
    def measure(self, aim: Aim, knowledge: Knowledge) -> Measure:
        """Return the distance from `aim`, which holds the target and the factor of each parameter.

        `knowledge` holds what the attacker knows of all victims alike.
        """

    def _factors(self, victim: Observation) -> dict[str, float]:
        """Return the factor of each parameter that counts."""
        patterns = (*((name, 0.0) for name in _left_out(self.leave_out, victim)), *self.weights)
        factors = {
            name: next((factor for pattern, factor in patterns if fnmatch(name, pattern)), 1.0)
            for name in victim.gradients
        }
        chosen = {name: factor for name, factor in factors.items() if factor > 0}
        if not chosen:
            raise GradveilError(f"the layer weights {self.weights} leave no parameter to match")
        return chosen


@dataclass(frozen=True)
class Cosine(Distance):
    """1 - <g', g> / (|g'| |g|) over all parameters together (Geiping et al. 2020)."""

    def measure(self, aim: Aim, knowledge: Knowledge) -> Measure:
        norm = _squared_norm(aim)
        return ProductMeasure(aim, lambda dot, square: 1 - dot * torch.rsqrt(square * norm))


@dataclass(frozen=True)
class Angle(Distance):
    """|g|^2 (1 - cos): the cosine distance in the units of a squared difference.

    Near a match it is half of |s g' - g|^2 with the best length s.
    """

    def measure(self, aim: Aim, knowledge: Knowledge) -> Measure:
        norm = _squared_norm(aim)
        return ProductMeasure(
            aim, lambda dot, square: norm * (1 - dot * torch.rsqrt(square * norm))
        )


@dataclass(frozen=True)
class L2(Distance):
    """The sum of squared differences (Zhu et al. 2019)."""

    def measure(self, aim: Aim, knowledge: Knowledge) -> Measure:
        return GradientMeasure(lambda found: _sum_differences(found, aim, torch.square))


@dataclass(frozen=True)
class L1(Distance):
    """The sum of absolute differences."""

    def measure(self, aim: Aim, knowledge: Knowledge) -> Measure:
        return GradientMeasure(lambda found: _sum_differences(found, aim, torch.abs))


@dataclass(frozen=True)
class FreeL1(Distance):
    """The sum of absolute differences |s g' - g|, with the length s > 0 of the least squares."""

    def measure(self, aim: Aim, knowledge: Knowledge) -> Measure:
        def distance(found: Gradients) -> Tensor:
            dot, square = (
                total([dots(found[name], others[name]) for name in aim.factors])
                for others in (aim.target, found)
            )
            length = dot.abs() / square.clamp(min=torch.finfo(square.dtype).tiny)
            scaled = {
                name: found[name] * length.view(-1, *(1,) * (found[name].dim() - 1))
                for name in aim.factors
            }
            return _sum_differences(scaled, aim, torch.abs)

        return GradientMeasure(distance)


@dataclass(frozen=True)
class Likelihood(Distance):
    """Minus the log density of the noise that a defense added, up to a constant.

    With d = g' - g and noise of scale s it is the sum of d^2 / (2 s^2) for Gaussian noise and of
    |d| / s for Laplacian noise. `free` fits the length of g', so that only its direction counts: on
    trained models a search gets stuck on the length (16 images, noise 1e-2: 10.0 dB with the
    length, 15.2 dB without, 12.2 dB by the standard attack).
    """

    free: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, "noise")

    def measure(self, aim: Aim, knowledge: Knowledge) -> Measure:
        assert knowledge.noise is not None
        kind, scale = knowledge.noise
        forms: dict[str, tuple[Distance, float]] = (
            {"gaussian": (Angle(), scale**2), "laplacian": (FreeL1(), scale)}
            if self.free
            else {"gaussian": (L2(), 2 * scale**2), "laplacian": (L1(), scale)}
        )
        if kind not in forms:
            raise unknown("noise", kind, forms)
        if not 0 < scale < float("inf"):
            raise GradveilError(
                f"noise of scale {scale}: a likelihood needs one above 0 and finite"
            )
        form, divisor = forms[kind]
        factors = {name: factor / divisor for name, factor in aim.factors.items()}
        return form.measure(Aim(aim.target, factors), knowledge)


cosine = Cosine()
l1 = L1()
l2 = L2()


def _squared_norm(aim: Aim) -> Tensor:
    """Return |g|^2 of each row of the target, weighted by the factors."""
    parts = ((factor, aim.target[name]) for name, factor in aim.factors.items())
    return total([factor * products(part, part)[1] for factor, part in parts])


def _sum_differences(found: Gradients, aim: Aim, size: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the weighted sum of size(g' - g) of each row."""
    return total(
        [
            factor * size(found[name] - aim.target[name]).reshape(len(found[name]), -1).sum(1)
            for name, factor in aim.factors.items()
        ]
    )


def sum_rounds(seen: Sequence[Observation]) -> tuple[Gradients, Gradients]:
    """Return the sum of each victim's rounds, and how many gradients each entry of it contains.

    A client with momentum m keeps u <- m u + g and v <- v + u, shares the largest entries of v, and
    sets u and v to zero there (deep gradient compression, Lin et al. 2018). The same recursion with
    g = 1 gives the count; it is 0 where nothing was ever shared.
    """
    sums, counts = zip(*(_total(victim) for victim in seen), strict=True)
    first, second = (
        {name: torch.stack([victim[name] for victim in each]) for name in seen[0].gradients}
        for each in (sums, counts)
    )
    return first, second


def _total(victim: Observation) -> tuple[Gradients, Gradients]:
    assert victim.knowledge.earlier is not None
    rounds = [*victim.knowledge.earlier, victim.gradients]
    momentum = victim.knowledge.momentum or 0.0
    sums = {name: torch.stack([each[name] for each in rounds]).sum(0) for name in victim.gradients}
    counts = {
        name: _count([each[name] != 0 for each in rounds], momentum, sums[name]) for name in sums
    }
    return sums, counts


def _count(masks: Sequence[Tensor], momentum: float, like: Tensor) -> Tensor:
    count, speed, kept = (torch.zeros_like(like) for _ in range(3))
    for mask in masks:
        speed = momentum * speed + 1
        kept = kept + speed
        count = torch.where(mask, count + kept, count)
        speed, kept = (torch.where(mask, 0.0, value) for value in (speed, kept))
    return count


def _left_out(leave_out: str | None, victim: Observation) -> list[str]:
    """Return the patterns of the parameters that are ignored."""
    if leave_out is None:
        return []
    known = {"random": victim.knowledge.random_layers, "defended": victim.knowledge.defended_layers}
    found: list[str] = []
    for kind, patterns in known.items():
        if leave_out not in (kind, "both"):
            continue
        assert patterns is not None
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in victim.gradients):
                raise GradveilError(
                    f"{kind} layers {pattern!r}: no shared gradient has such a name, "
                    f"as {next(iter(victim.gradients))!r}"
                )
        found += patterns
    if all(any(fnmatch(name, pattern) for pattern in found) for name in victim.gradients):
        kinds = "random or defended" if leave_out == "both" else leave_out
        raise GradveilError(
            f"every layer with a gradient is {kinds}: to leave them out would leave no parameter "
            "to match"
        )
    return found


def _common_knowledge(seen: Sequence[Observation]) -> Knowledge:
    """Return the first victim's knowledge; refuse victims that differ in what must be alike."""
    first = seen[0].knowledge
    for victim in seen:
        for name in ALIKE:
            if getattr(victim.knowledge, name) != getattr(first, name):
                both = f"{getattr(first, name)} and {getattr(victim.knowledge, name)}"
                raise GradveilError(
                    f"victims attacked together must be alike in {name}, which is {both}"
                )
    return first
