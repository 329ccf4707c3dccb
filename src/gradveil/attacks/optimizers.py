"""Optimizers for many independent problems at once: each row of the variables is one problem.

An optimizer is a value. `minimize` takes a `Search` and moves its variables in place.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.schedule import count_decays
from gradveil.engine.device import Replayed

TOWARD_GRAY = 0.8
"""What is left of an image's distance from gray in a step without a finite slope."""

Slopes = list[Tensor]
"""The slope of the loss by each variable, in the shape of the variable."""


@dataclass(frozen=True, eq=False)
class Search:
    """A search over variables (rows, ...), with the rules of the attack.

    `evaluate` returns the loss (rows,) and the slopes at the present variables. `signed` shows the
    optimizer the sign of the first variable's slope. `decay` lowers the learning rate on the way.
    `confine` moves the variables back to where they may be. `before` is called before each
    evaluation, `after(step)` after each step, counted from 1. `replayable` says that a GPU may
    capture a whole step and replay it, but for these two. `gray` is what is gray in the first
    variable.
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
    gray: Tensor | float = 0.0

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
    of the present step. A row whose loss or slope is not finite has left what the model can bear,
    as noise does where a client's local steps diverge on it: its images move toward gray instead.
    """

    lr: float

    def minimize(self, search: Search) -> None:
        device = search.variables[0].device
        table = self.table(self.rates(search.steps, search.decay))
        table = table.to(device, search.variables[0].dtype)
        number = torch.zeros(1, dtype=torch.long, device=device)
        state = [[torch.zeros_like(v) for _ in range(self.slots)] for v in search.variables]

        def step() -> None:
            losses, slopes = search.losses_and_slopes()
            borne = _finite_rows(losses, *slopes)
            numbers = table.index_select(0, number).squeeze(0).unbind()
            for variable, slope, slots in zip(search.variables, slopes, state, strict=True):
                kept = torch.where(_spread(borne, slope), slope, 0.0)
                self.update(variable, kept, slots, numbers)
            images = search.variables[0]
            moved = torch.where(_spread(borne, images), 0.0, 1 - TOWARD_GRAY)
            images.add_((search.gray - images) * moved)
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


def _finite_rows(*values: Tensor) -> Tensor:
    """Return which rows are finite in all of these, (rows,)."""
    return torch.stack([value.isfinite().reshape(len(value), -1).all(1) for value in values]).all(0)


def _spread(rows: Tensor, like: Tensor) -> Tensor:
    """Return a view of (rows,) that meets each row of another tensor."""
    return rows.view(-1, *(1,) * (like.dim() - 1))
