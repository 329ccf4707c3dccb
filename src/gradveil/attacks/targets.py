"""What found gradients are measured against, once the victims and what is known of them are seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

import torch
from torch import Tensor

from gradveil.attacks.distances import Distance, Measure, angle, free_l1, l1, l2
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.gradients import Gradients
from gradveil.core.types import Knowledge, Observation, stacked

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

    def measure(self, target: Sequence[Tensor], factors: Sequence[float]) -> Callable[[Sequence[Tensor]], Tensor]:  # noqa: ARG002
        raise GradveilError("a likelihood depends on the noise: use targets.measure(distance, seen, restarts)")

    def of(self, kind: str, scale: float) -> Distance:
        """As a distance of its own."""
        exact: dict[str, tuple[Distance, float]] = {"gaussian": (l2, 2 * scale**2), "laplacian": (l1, scale)}
        forms = {"gaussian": (angle, scale**2), "laplacian": (free_l1, scale)} if self.free else exact
        if kind not in forms:
            raise unknown("noise", kind, forms)
        if not 0 < scale < float("inf"):
            raise GradveilError(f"noise of scale {scale}: a likelihood needs one above 0 and finite")
        form, divisor = forms[kind]
        weights = *((pattern, factor / divisor) for pattern, factor in self.weights), ("*", 1 / divisor)
        return replace(form, weights=weights, leave_out=self.leave_out, nonzero=self.nonzero, rounds=self.rounds)


likelihood = Likelihood()


def measure(distance: Distance, seen: Sequence[Observation], restarts: int) -> Measure:
    """The function of found gradients (victims x restarts, ...) that is to be minimized."""
    knowledge = _alike(seen)
    if isinstance(distance, Likelihood):
        assert knowledge.noise is not None
        distance = distance.of(*knowledge.noise)
    left_out = tuple((pattern, 0.0) for pattern in _left_out(distance, seen[0]))
    distance = replace(
        distance, weights=(*left_out, *distance.weights), leave_out=None, nonzero=distance.nonzero and bool(knowledge.pruned)
    )
    target, times = totals(seen) if distance.rounds else (stacked(list(seen)), None)
    each = {name: part.repeat_interleave(restarts, 0) for name, part in target.items()}
    often = None if times is None else {name: part.repeat_interleave(restarts, 0) for name, part in times.items()}
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
    return total, {name: _times([own[name] != 0 for own in shared], momentum, total[name]) for name in total}


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
                raise GradveilError(f"{kind} layers {pattern!r}: no shared gradient has such a name, as {next(iter(one.gradients))!r}")
        found += patterns
    if all(any(fnmatch(name, pattern) for pattern in found) for name in one.gradients):
        kinds = "random or defended" if distance.leave_out == "both" else distance.leave_out
        raise GradveilError(f"every layer with a gradient is {kinds}: to leave them out would leave no parameter to match")
    return tuple(found)


def _alike(seen: Sequence[Observation]) -> Knowledge:
    first = seen[0].knowledge
    for one in seen:
        for name in SHARED:
            if getattr(one.knowledge, name) != getattr(first, name):
                both = f"{getattr(first, name)} and {getattr(one.knowledge, name)}"
                raise GradveilError(f"victims attacked together must be alike in {name}, which is {both}")
    return first
