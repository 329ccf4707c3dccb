"""L-BFGS for many independent problems at once: every row has its own history, step length and end."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.optimizers import Optimizer, Search, Slopes

FLAT = 1e-7  # torch's tolerances: a row rests while its largest slope is below this,
SMALL = 1e-9  # or the slope along the direction above minus this. A line search needs none: it ends where no step brings anything
CURVED = 1e-10  # pairs with less curvature are not remembered
ENOUGH = 1e-4  # the share of the expected decrease that a step must bring (Armijo)
HALVINGS = 12


@dataclass(frozen=True)
class LBFGS(Optimizer):
    """A step is `inner` iterations, as in torch's optimizer and in the published attacks.

    Without a line search each iteration moves by `lr` times the direction: torch's own method, row by row. With one, a row
    halves its step until it brings enough, and forgets its history where nothing does; a row can then not diverge.
    """

    lr: float = 1.0
    inner: int = 20
    history: int = 100
    line_search: bool = True

    def minimize(self, search: Search) -> None:
        rows = _Rows(search)
        memory = _Memory(self.history)
        losses, slopes = rows.evaluate()
        small, flat = (0.0, 0.0) if self.line_search else (SMALL, FLAT)
        first, stuck, done = True, torch.zeros_like(losses).bool(), torch.zeros_like(losses).bool()
        for step in range(search.steps):
            for _ in range(self.inner):
                direction = memory.direction(slopes)
                along = _dot(slopes, direction)
                active = (along < -small) & (slopes.abs().amax(1) > flat) & losses.isfinite() & ~done
                length = torch.full_like(along, self.lr)
                if first:
                    length *= (1 / slopes.abs().sum(1)).clamp(max=1)
                    first = False
                length = torch.where(active, length, 0.0)
                before, at = slopes, rows.position()
                if self.line_search:
                    losses, slopes, length = self._searched(rows, at, direction, length, losses, slopes, along)
                else:
                    rows.move(at, direction, length)
                    losses, slopes = rows.evaluate()
                memory.remember(direction * length[:, None], slopes - before, active)
                failed = active & (length == 0)
                memory.forget(failed)
                done, stuck = done | (failed & stuck), failed  # not even the steepest way leads down: this row has ended
                if not bool(active.any()):
                    break
            search.confine()
            if rows.moved():
                losses, slopes = rows.evaluate()
            search.after(step + 1)

    def _searched(
        self, rows: "_Rows", at: Tensor, direction: Tensor, length: Tensor, losses: Tensor, slopes: Tensor, along: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses and slopes where each row ends up, and how far it went: 0 where no step brings enough."""
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
        return torch.where(stayed, losses, found), torch.where(stayed[:, None], slopes, steep), length


class _Rows:
    """The variables of a search as one matrix, a row for each problem."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.sizes = [variable[0].numel() for variable in search.variables]
        self.last = self.position()

    def position(self) -> Tensor:
        return self._flat(self.search.variables)

    def evaluate(self) -> tuple[Tensor, Tensor]:
        losses, slopes = self.search.losses_and_slopes()
        return losses, self._flat(slopes)

    def move(self, at: Tensor, direction: Tensor, length: Tensor) -> None:
        """To at + length * direction; a row of length 0 does not move even where its direction is not finite."""
        way = torch.where(length[:, None] > 0, direction * length[:, None], 0.0)
        self.last = at + way
        for variable, part in zip(self.search.variables, self.last.split(self.sizes, dim=1), strict=True):
            variable.copy_(part.view_as(variable))

    def moved(self) -> bool:
        """Whether something else than this optimizer changed the variables: they were confined."""
        return not torch.equal(self.last, self.position())

    @staticmethod
    def _flat(parts: Slopes) -> Tensor:
        return torch.cat([part.detach().flatten(1) for part in parts], dim=1)


class _Memory:
    """Past moves s and changes of slope y. A pair that a row did not earn has weight 0 there and changes nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        self.scale: Tensor | None = None

    def remember(self, move: Tensor, change: Tensor, active: Tensor) -> None:
        curvature = _dot(change, move)
        good = active & (curvature > CURVED)
        weight = torch.where(good, 1 / curvature, 0.0)
        old = torch.ones_like(curvature) if self.scale is None else self.scale
        self.scale = torch.where(good, curvature / _dot(change, change), old)
        self.pairs = [*self.pairs, (_where(good, move), _where(good, change), weight)][-self.size :]

    def forget(self, rows: Tensor) -> None:
        if bool(rows.any()) and self.scale is not None:
            self.pairs = [(s, y, torch.where(rows, 0.0, weight)) for s, y, weight in self.pairs]
            self.scale = torch.where(rows, 1.0, self.scale)

    def direction(self, slopes: Tensor) -> Tensor:
        """The two-loop recursion."""
        way, shares = -slopes, []
        for move, change, weight in reversed(self.pairs):
            share = weight * _dot(move, way)
            way = way - share[:, None] * change
            shares.append(share)
        if self.scale is not None:
            way = way * self.scale[:, None]
        for (move, change, weight), share in zip(self.pairs, reversed(shares), strict=True):
            way = way + (share - weight * _dot(change, way))[:, None] * move
        return way


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(1)


def _where(rows: Tensor, values: Tensor) -> Tensor:
    return torch.where(rows[:, None], values, 0.0)
