"""Optimizers for many independent problems at once: each row of the variables is a problem of its own, with its own state.

An optimizer is a value. `minimize` moves the variables in place; what it may do to them comes as a `Search`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.replay import Replayed

DECAY_AT = (3 / 8, 5 / 8, 7 / 8)

Slopes = list[Tensor]


@dataclass(frozen=True, eq=False)
class Search:
    """One search: its variables (rows, ...), the losses of the rows and their slopes there, and the rules of the attack.

    `signed`: the optimizer sees the sign of the first variable's slope. `confine` keeps the variables where they may be.
    `replayable`: on a GPU the whole step may be captured. `after(step)` is called after each step, counted from 1.
    """

    variables: list[Tensor]
    evaluate: Callable[[], tuple[Tensor, Slopes]]
    steps: int
    signed: bool
    decay: bool
    confine: Callable[[], None]
    after: Callable[[int], None]
    replayable: bool = False

    def losses_and_slopes(self) -> tuple[Tensor, Slopes]:
        losses, slopes = self.evaluate()
        return losses, [slopes[0].sign(), *slopes[1:]] if self.signed else slopes


class Optimizer(ABC):
    @abstractmethod
    def minimize(self, search: Search) -> None:
        """Take the search's steps."""


@dataclass(frozen=True)
class FirstOrder(Optimizer):
    """Elementwise methods: a joint step is every row's own step. The numbers of each step lie in a table on the device, so that a
    replayed graph reads the right ones."""

    lr: float

    def minimize(self, search: Search) -> None:
        device = search.variables[0].device
        table = self.table(self.rates(search.steps, search.decay)).to(device, search.variables[0].dtype)
        place = torch.zeros(1, dtype=torch.long, device=device)
        state = [[torch.zeros_like(v) for _ in range(self.slots)] for v in search.variables]

        def step() -> None:
            _, slopes = search.losses_and_slopes()
            numbers = table.index_select(0, place).squeeze(0).unbind()
            for variable, slope, own in zip(search.variables, slopes, state, strict=True):
                self.update(variable, slope, own, numbers)
            search.confine()
            place.add_(1)

        run = Replayed(step) if search.replayable else step
        for number in range(search.steps):
            run()
            search.after(number + 1)

    def rates(self, steps: int, decay: bool) -> Tensor:
        """The learning rate of each step: divided by ten at 3/8, 5/8 and 7/8 of them, where asked for."""
        passed = torch.stack([torch.arange(steps) >= part * steps for part in DECAY_AT]).sum(0) * int(decay)
        return self.lr * 0.1 ** passed.double()

    @property
    @abstractmethod
    def slots(self) -> int:
        """Tensors of state for each variable."""

    @abstractmethod
    def table(self, rates: Tensor) -> Tensor:
        """(steps, numbers that a step needs)."""

    @abstractmethod
    def update(self, variable: Tensor, slope: Tensor, state: list[Tensor], numbers: tuple[Tensor, ...]) -> None:
        """One step in place."""


@dataclass(frozen=True)
class Adam(FirstOrder):
    """Kingma and Ba 2015."""

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

    def update(self, variable: Tensor, slope: Tensor, state: list[Tensor], numbers: tuple[Tensor, ...]) -> None:
        mean, square = state
        mean.lerp_(slope, 1 - self.betas[0])
        square.mul_(self.betas[1]).addcmul_(slope, slope, value=1 - self.betas[1])
        variable.sub_((mean * numbers[0]).div_((square.sqrt() * numbers[1]).add_(self.eps)))


@dataclass(frozen=True)
class SGD(FirstOrder):
    """With Nesterov momentum."""

    lr: float = 0.01
    momentum: float = 0.9

    @property
    def slots(self) -> int:
        return 1

    def table(self, rates: Tensor) -> Tensor:
        return rates[:, None]

    def update(self, variable: Tensor, slope: Tensor, state: list[Tensor], numbers: tuple[Tensor, ...]) -> None:
        (velocity,) = state
        velocity.mul_(self.momentum).add_(slope)
        variable.sub_((slope + self.momentum * velocity) * numbers[0])
