"""Optimizers for many independent problems at once: each row of the variables is one problem.

An optimizer is a value. `minimize` takes a `Search` and moves its variables in place.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.schedule import count_decays
from gradveil.engine.device import Replayed

Slopes = list[Tensor]
"""The slope of the loss by each variable, in the shape of the variable."""


@dataclass(frozen=True, eq=False)
class Search:
    """A search over variables (rows, ...), with the rules of the attack.

    `evaluate` returns the loss (rows,) and the slopes at the present variables. `signed` shows the
    optimizer the sign of the first variable's slope. `decay` lowers the learning rate on the way.
    `confine` moves the variables back to where they may be. `before` is called before each
    evaluation, `after(step)` after each step, counted from 1. `replayable` says that a GPU may
    capture a whole step and replay it, but for these two.
    """

    variables: list[Tensor]
    evaluate: Callable[[], tuple[Tensor, Slopes]]
    steps: int
    signed: bool
    decay: bool
    confine: Callable[[], None]
    after: Callable[[int], None]
    replayable: bool = False
    before: Callable[[], object] = bool  # which does nothing

    def losses_and_slopes(self) -> tuple[Tensor, Slopes]:
        """Return the loss of each row, and the slopes as the optimizer shall see them."""
        losses, slopes = self.evaluate()
        return losses, [slopes[0].sign(), *slopes[1:]] if self.signed else slopes


class Optimizer(ABC):
    """A method to minimize the losses of all rows."""

    @abstractmethod
    def minimize(self, search: Search) -> None:
        """Take all steps of the search."""


@dataclass(frozen=True)
class FirstOrder(Optimizer):
    """An elementwise method: one step for all rows is the step of each row alone.

    The numbers that a step needs lie in a table on the device, so that a replayed graph reads those
    of the present step.
    """

    lr: float

    def minimize(self, search: Search) -> None:
        device = search.variables[0].device
        table = self.table(self.rates(search.steps, search.decay))
        table = table.to(device, search.variables[0].dtype)
        number = torch.zeros(1, dtype=torch.long, device=device)
        state = [[torch.zeros_like(v) for _ in range(self.slots)] for v in search.variables]

        def step() -> None:
            _, slopes = search.losses_and_slopes()
            numbers = table.index_select(0, number).squeeze(0).unbind()
            for variable, slope, slots in zip(search.variables, slopes, state, strict=True):
                self.update(variable, slope, slots, numbers)
            search.confine()
            number.add_(1)

        run = Replayed(step) if search.replayable else step
        for done in range(1, search.steps + 1):
            search.before()
            run()
            search.after(done)

    def rates(self, steps: int, decay: bool) -> Tensor:
        """Return the learning rate of each step, (steps,) in float64."""
        decays = [count_decays(step, steps) if decay else 0 for step in range(steps)]
        return self.lr * 0.1 ** torch.tensor(decays).double()

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many tensors of state each variable has."""

    @abstractmethod
    def table(self, rates: Tensor) -> Tensor:
        """Return the numbers of all steps, (steps, numbers of a step)."""

    @abstractmethod
    def update(
        self, variable: Tensor, slope: Tensor, state: list[Tensor], numbers: tuple[Tensor, ...]
    ) -> None:
        """Take one step in place."""


@dataclass(frozen=True)
class Adam(FirstOrder):
    """Adam (Kingma and Ba 2015)."""

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def slots(self) -> int:
        return 2

    def table(self, rates: Tensor) -> Tensor:
        count = torch.arange(1, len(rates) + 1).double()
        first, second = (1 - beta**count for beta in self.betas)
        return torch.stack([rates / first, second.rsqrt()], dim=1)

    def update(
        self, variable: Tensor, slope: Tensor, state: list[Tensor], numbers: tuple[Tensor, ...]
    ) -> None:
        mean, square = state
        mean.lerp_(slope, 1 - self.betas[0])
        square.mul_(self.betas[1]).addcmul_(slope, slope, value=1 - self.betas[1])
        variable.sub_((mean * numbers[0]).div_((square.sqrt() * numbers[1]).add_(self.eps)))


@dataclass(frozen=True)
class SGD(FirstOrder):
    """Gradient descent with Nesterov momentum."""

    lr: float = 0.01
    momentum: float = 0.9

    @property
    def slots(self) -> int:
        return 1

    def table(self, rates: Tensor) -> Tensor:
        return rates[:, None]

    def update(
        self, variable: Tensor, slope: Tensor, state: list[Tensor], numbers: tuple[Tensor, ...]
    ) -> None:
        (velocity,) = state
        velocity.mul_(self.momentum).add_(slope)
        variable.sub_((slope + self.momentum * velocity) * numbers[0])


# Torch's tolerances without a line search; a line search ends where no step lowers the loss.
FLAT = 1e-7  # a row rests while its largest slope is below this,
SMALL = 1e-9  # or the slope along the direction above minus this
CURVED = 1e-10  # pairs of less curvature are not remembered
ENOUGH = 1e-4  # the share of the expected decrease that a step must bring (Armijo)
HALVINGS = 12  # of the step in a line search


@dataclass(frozen=True)
class LBFGS(Optimizer):
    """Limited-memory BFGS; a step is `inner` iterations, as in torch and in the published attacks.

    Without a line search each iteration moves by `lr` times the direction: torch's method, row by
    row. With a line search, a row halves its step until the loss falls enough, and forgets its
    history where it does not; such a row cannot diverge.
    """

    lr: float = 1.0
    inner: int = 20
    history: int = 100
    line_search: bool = True

    def minimize(self, search: Search) -> None:
        rows = _Rows(search)
        losses, slopes = rows.evaluate()
        memory = (
            _ReplayedMemory(self.history, slopes) if search.replayable else _Memory(self.history)
        )
        small, flat = (0.0, 0.0) if self.line_search else (SMALL, FLAT)
        first, stuck, done = True, torch.zeros_like(losses).bool(), torch.zeros_like(losses).bool()
        for step in range(search.steps):
            for _ in range(self.inner):
                direction = memory.direction(slopes)
                along = _dot(slopes, direction)
                active = (
                    (along < -small) & (slopes.abs().amax(1) > flat) & losses.isfinite() & ~done
                )
                length = torch.full_like(along, self.lr)
                if first:
                    length *= (1 / slopes.abs().sum(1)).clamp(max=1)
                    first = False
                length = torch.where(active, length, 0.0)
                before, at = slopes, rows.position()
                if self.line_search:
                    losses, slopes, length = self._searched(
                        rows, at, direction, length, losses, slopes, along
                    )
                else:
                    rows.move(at, direction, length)
                    losses, slopes = rows.evaluate()
                memory.remember(direction * length[:, None], slopes - before, active)
                failed = active & (length == 0)
                memory.forget(failed)
                # A row that failed twice has ended: not even the steepest direction leads down.
                done, stuck = done | (failed & stuck), failed
                if not bool(active.any()):
                    break
            search.confine()
            if rows.moved():
                losses, slopes = rows.evaluate()
            search.after(step + 1)

    def _searched(
        self,
        rows: "_Rows",
        at: Tensor,
        direction: Tensor,
        length: Tensor,
        losses: Tensor,
        slopes: Tensor,
        along: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses, slopes and lengths after the line search; a failed one has length 0."""
        wanted = length > 0
        for _ in range(HALVINGS):
            rows.move(at, direction, length)
            found, steep = rows.evaluate()
            enough = (found <= losses + ENOUGH * length * along) & steep.isfinite().all(1)
            if bool((enough | ~wanted).all()):
                return found, steep, length
            length = torch.where(wanted & ~enough, length / 2, length)
        length = torch.where(wanted & ~enough, 0.0, length)
        rows.move(at, direction, length)
        stayed = length == 0
        return (
            torch.where(stayed, losses, found),
            torch.where(stayed[:, None], slopes, steep),
            length,
        )


class _Rows:
    """The variables of a search as one matrix, a row for each problem."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.sizes = [variable[0].numel() for variable in search.variables]
        self.last = self.position()
        self._evaluate = Replayed(self._measure) if search.replayable else self._measure

    def position(self) -> Tensor:
        return self._flat(self.search.variables)

    def evaluate(self) -> tuple[Tensor, Tensor]:
        self.search.before()
        losses, slopes = self._evaluate()
        # A replay writes into the tensors that the last one returned.
        return (losses.clone(), slopes.clone()) if self.search.replayable else (losses, slopes)

    def _measure(self) -> tuple[Tensor, Tensor]:
        losses, slopes = self.search.losses_and_slopes()
        return losses, self._flat(slopes)

    def move(self, at: Tensor, direction: Tensor, length: Tensor) -> None:
        """Move to at + length * direction; length 0 stays, even if the direction is not finite."""
        way = torch.where(length[:, None] > 0, direction * length[:, None], 0.0)
        self.last = at + way
        for variable, part in zip(
            self.search.variables, self.last.split(self.sizes, dim=1), strict=True
        ):
            variable.copy_(part.view_as(variable))

    def moved(self) -> bool:
        """Return whether `confine` changed the variables since the last move."""
        return not torch.equal(self.last, self.position())

    @staticmethod
    def _flat(parts: Slopes) -> Tensor:
        return torch.cat([part.detach().flatten(1) for part in parts], dim=1)


class _Memory:
    """Past moves s and changes of slope y, with the weight 1 / (y s) of each pair in each row.

    The weight is 0, and the pair without effect, where a row did not move or curved too little.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        self.scale: Tensor | None = None

    def remember(self, move: Tensor, change: Tensor, active: Tensor) -> None:
        old = torch.ones_like(move[:, 0]) if self.scale is None else self.scale
        *pair, self.scale = _weighted(move, change, active, old)
        self.pairs = [*self.pairs, (pair[0], pair[1], pair[2])][-self.size :]

    def forget(self, rows: Tensor) -> None:
        if bool(rows.any()) and self.scale is not None:
            self.pairs = [(s, y, torch.where(rows, 0.0, weight)) for s, y, weight in self.pairs]
            self.scale = torch.where(rows, 1.0, self.scale)

    def direction(self, slopes: Tensor) -> Tensor:
        """Return the direction of descent."""
        return _recurse(slopes, self.pairs, self.scale)


class _ReplayedMemory(_Memory):
    """The same on a GPU, where the recursion's many small steps are replayed as a graph.

    All pairs stay where they are in the memory; those that are not there yet have weight 0.
    """

    def __init__(self, size: int, like: Tensor) -> None:
        super().__init__(size)
        self._moves, self._changes = like.new_zeros(2, size, *like.shape).unbind()
        self._weights = like.new_zeros(size, len(like))
        self._factor = like.new_ones(len(like))
        self._slopes = torch.empty_like(like)
        both = zip(self._moves, self._changes, self._weights, strict=True)
        self.pairs = [(move, change, weight) for move, change, weight in both]
        self._recurse = Replayed(lambda: _recurse(self._slopes, self.pairs, self._factor))

    def remember(self, move: Tensor, change: Tensor, active: Tensor) -> None:
        found = _weighted(move, change, active, self._factor)
        for old, new in zip((self._moves, self._changes, self._weights), found, strict=False):
            old.copy_(old.roll(-1, 0))
            old[-1] = new
        self._factor.copy_(found[3])

    def forget(self, rows: Tensor) -> None:
        self._weights.masked_fill_(rows, 0.0)
        self._factor.masked_fill_(rows, 1.0)

    def direction(self, slopes: Tensor) -> Tensor:
        self._slopes.copy_(slopes)
        return self._recurse().clone()


def _weighted(
    move: Tensor, change: Tensor, active: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a pair with its weight, and the new scale, (rows,), of the directions.

    The weight is 0, and the scale stays, where a row did not move or curved too little.
    """
    curvature = _dot(change, move)
    good = active & (curvature > CURVED)
    weight = torch.where(good, 1 / curvature, 0.0)
    scale = torch.where(good, curvature / _dot(change, change), scale)
    return _where(good, move), _where(good, change), weight, scale


def _recurse(
    slopes: Tensor, pairs: Sequence[tuple[Tensor, Tensor, Tensor]], scale: Tensor | None
) -> Tensor:
    """Return the direction of descent by the two-loop recursion over pairs, the oldest first."""
    way, shares = -slopes, []
    for move, change, weight in reversed(pairs):
        share = weight * _dot(move, way)
        way = way - share[:, None] * change
        shares.append(share)
    if scale is not None:
        way = way * scale[:, None]
    for (move, change, weight), share in zip(pairs, reversed(shares), strict=True):
        way = way + (share - weight * _dot(change, way))[:, None] * move
    return way


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(1)


def _where(rows: Tensor, values: Tensor) -> Tensor:
    return torch.where(rows[:, None], values, 0.0)
