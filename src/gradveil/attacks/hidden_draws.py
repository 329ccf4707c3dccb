"""Random numbers that the client's model drew: found along with the images, or drawn anew.

PRECODE's noise and dropout masks change the gradient. An attack can treat them as further variables
of its search (`HiddenDraws`); draws that it does not look for are new ones at each step
(`FreshDraws`).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import drawn_seed, following, forked
from gradveil.core.types import Observation
from gradveil.engine.draws import DROPOUTS, Draw, draw, draw_shapes, drawing
from gradveil.engine.gradients import in_mode

Variables = dict[str, Tensor]
"""(rows, B, ...) by the name of the module that draws."""


@dataclass(frozen=True)
class HiddenDraws(ABC):
    """Draws of the model as variables of the search. Multiply the penalty on them by `weight`."""

    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < float("inf"):
            raise GradveilError(
                f"weight {self.weight} of the draws: it must be at least 0 and finite"
            )

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """Names of the `Knowledge` fields without which they cannot be found."""

    @abstractmethod
    def takes(self, module: nn.Module) -> bool:
        """Return whether the draws of this module are variables."""

    @abstractmethod
    def start(self, shape: tuple[int, ...], module: nn.Module, rng: Generator) -> Tensor:
        """Draw the variables of one row at the start of the search."""

    @abstractmethod
    def values(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the draws that the variables stand for."""

    @abstractmethod
    def penalty(self, variables: Mapping[str, Tensor], model: nn.Module) -> Tensor:
        """Return (rows,): how unlikely the draws are, times the weight."""

    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Variables:
        """Return the variables of all rows, for each module that draws when the client trains."""
        first, example = seen[0], _example(seen[0])
        with in_mode(first.model, first.protocol.train_mode), forked():
            modules = {
                name: module for name, module in drawing(first.model).items() if self.takes(module)
            }
            shapes = draw_shapes(first.model, example, list(modules))
        if not modules:
            raise GradveilError(
                f"{type(first.model).__name__} has no such draws to look for: "
                f"choose an attack without {type(self).__name__}"
            )
        rows = [
            {name: self.start((first.size, *shapes[name]), modules[name], rng) for name in shapes}
            for _ in range(len(seen) * restarts)
        ]
        return {name: torch.stack([row[name] for row in rows]).to(example) for name in shapes}


@dataclass(frozen=True)
class JointNoise(HiddenDraws):
    """Standard normal draws e, with the penalty mean e^2 / 2, their negative log density."""

    weight: float = 1e-4

    @property
    def needs(self) -> tuple[str, ...]:
        return ("random_layers",)

    def takes(self, module: nn.Module) -> bool:
        return isinstance(module, Draw)

    def start(self, shape: tuple[int, ...], module: nn.Module, rng: Generator) -> Tensor:
        return torch.randn(shape, generator=rng, device=rng.device)

    def values(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(variables)

    def penalty(self, variables: Mapping[str, Tensor], model: nn.Module) -> Tensor:
        means = [value.flatten(1).square().mean(1) / 2 for value in variables.values()]
        return self.weight * torch.stack(means).sum(0)


@dataclass(frozen=True)
class JointMasks(HiddenDraws):
    """Dropout masks, relaxed to the sigmoid of logits (Scheliga et al. 2023).

    The penalty is (share kept - (1 - p))^2.
    """

    weight: float = 1e-2

    @property
    def needs(self) -> tuple[str, ...]:
        return ("train_masks",)

    def takes(self, module: nn.Module) -> bool:
        return isinstance(module, DROPOUTS)

    def start(self, shape: tuple[int, ...], module: nn.Module, rng: Generator) -> Tensor:
        middle = torch.logit(torch.tensor(_share_kept(module)))
        return middle + 0.1 * torch.randn(shape, generator=rng, device=rng.device)

    def values(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.sigmoid() for name, value in variables.items()}

    def penalty(self, variables: Mapping[str, Tensor], model: nn.Module) -> Tensor:
        gaps = [
            value.sigmoid().flatten(1).mean(1) - _share_kept(model.get_submodule(name))
            for name, value in variables.items()
        ]
        return self.weight * torch.stack(gaps).square().sum(0)


class FreshDraws:
    """Draw anew at each call for the modules not in `looked_for`, from a stream seeded by `rng`.

    The draws are handed to the model, so that victims can share a pass. Several local steps and the
    pass of a prior cannot be handed any; such passes are made inside `seeded`.
    """

    def __init__(self, victim: Observation, looked_for: Collection[str], rng: Generator) -> None:
        self.example = _example(victim)
        with in_mode(victim.model, victim.protocol.train_mode), forked():
            self.modules = drawing(victim.model)
            free = [name for name in self.modules if name not in looked_for]
            self.shapes = (
                draw_shapes(victim.model, self.example, free)
                if free and not victim.protocol.moves(victim.size)
                else {}
            )
        if self.modules:  # a model that draws nothing takes nothing from rng
            self.rng = Generator(self.example.device).manual_seed(drawn_seed(rng))

    def __call__(self, rows: int) -> dict[str, Tensor]:
        """Return new draws, (rows, B, ...) by the name of the module."""
        found = self.empty(rows)
        self.refill(found)
        return found

    def empty(self, rows: int) -> dict[str, Tensor]:
        """Return room for the draws of so many rows."""
        return {
            name: self.example.new_empty(rows, len(self.example), *shape)
            for name, shape in self.shapes.items()
        }

    def refill(self, draws: Mapping[str, Tensor]) -> None:
        """Write new draws into these."""
        for name, old in draws.items():
            old.copy_(draw(self.modules[name], tuple(old.shape), self.example, self.rng))

    def seeded(self) -> AbstractContextManager[None]:
        """Let modules that draw by themselves follow the stream for a while."""
        return following(self.rng)


def _example(victim: Observation) -> Tensor:
    return torch.zeros(victim.size, *victim.image_shape).to(next(victim.model.parameters()))


def _share_kept(module: nn.Module) -> float:
    assert isinstance(module, DROPOUTS)
    return 1 - module.p
