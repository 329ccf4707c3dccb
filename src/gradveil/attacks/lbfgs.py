"""L-BFGS for many independent problems at once, with a line search for each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.optimizers import Optimizer, Search, Slopes
from gradveil.engine.device import Replayed

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
