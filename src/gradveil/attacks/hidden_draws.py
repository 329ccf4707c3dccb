"""The model's own draws: as further variables of the search, with which an attacker can repeat the pass, or new ones at each step."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
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
class JointDraws(ABC):
    """`weight` is that of what is believed of the draws beforehand."""

    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < float("inf"):
            raise GradveilError(
                f"weight {self.weight} of the draws: it must be at least 0 and finite"
            )

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """Names of `Knowledge` fields."""

    @abstractmethod
    def takes(self, module: nn.Module) -> bool:
        """Whether this module's draws are looked for."""

    @abstractmethod
    def start(self, shape: tuple[int, ...], module: nn.Module, rng: Generator) -> Tensor:
        """The variables of one row."""

    @abstractmethod
    def values(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The draws that variables stand for."""

    @abstractmethod
    def penalty(self, variables: Mapping[str, Tensor], model: nn.Module) -> Tensor:
        """One for each row."""

    def begin(self, one: Observation, rows: int, rng: Generator) -> Variables:
        """Row by row, for every module that draws when the client trains."""
        example = _example(one)
        with in_mode(one.model, one.protocol.train_mode), forked():
            modules = {
                name: module for name, module in drawing(one.model).items() if self.takes(module)
            }
            shapes = draw_shapes(one.model, example, list(modules))
        if not modules:
            raise GradveilError(
                f"{type(one.model).__name__} has no such draws to look for: choose an attack without {type(self).__name__}"
            )
        starts = [
            {name: self.start((one.size, *shapes[name]), modules[name], rng) for name in shapes}
            for _ in range(rows)
        ]
        return {name: torch.stack([row[name] for row in starts]).to(example) for name in shapes}


@dataclass(frozen=True)
class JointNoise(JointDraws):
    """Standard normal draws. The weight is that of mean e^2 / 2, their own prior."""

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
        return self.weight * torch.stack(
            [value.flatten(1).square().mean(1) / 2 for value in variables.values()]
        ).sum(0)


@dataclass(frozen=True)
class JointMasks(JointDraws):
    """Dropout masks, relaxed to the sigmoid of free logits. The weight is that of (share kept - (1 - p))^2 (Scheliga et al. 2023)."""

    weight: float = 1e-2

    @property
    def needs(self) -> tuple[str, ...]:
        return ("train_masks",)

    def takes(self, module: nn.Module) -> bool:
        return isinstance(module, DROPOUTS)

    def start(self, shape: tuple[int, ...], module: nn.Module, rng: Generator) -> Tensor:
        middle = torch.logit(torch.tensor(_kept(module)))
        return middle + 0.1 * torch.randn(shape, generator=rng, device=rng.device)

    def values(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.sigmoid() for name, value in variables.items()}

    def penalty(self, variables: Mapping[str, Tensor], model: nn.Module) -> Tensor:
        shares = [
            value.sigmoid().flatten(1).mean(1) - _kept(model.get_submodule(name))
            for name, value in variables.items()
        ]
        return self.weight * torch.stack(shares).square().sum(0)


class FreshDraws:
    """Of modules whose draws nobody looks for: new ones at each call, from a stream that the attack's generator seeds.

    They are handed in, so that victims can share a pass. Several local steps cannot be told theirs, and a prior's pass is not: such
    passes are made inside `seeded`.
    """

    def __init__(self, one: Observation, looked_for: Collection[str], rng: Generator) -> None:
        self.example = _example(one)
        with in_mode(one.model, one.protocol.train_mode), forked():
            self.modules = drawing(one.model)
            free = [name for name in self.modules if name not in looked_for]
            self.shapes = (
                draw_shapes(one.model, self.example, free)
                if free and one.protocol.local_steps == 1
                else {}
            )
        if self.modules:  # a model that draws nothing takes nothing from rng
            self.rng = Generator(self.example.device).manual_seed(drawn_seed(rng))

    def __call__(self, rows: int) -> dict[str, Tensor]:
        """(rows, B, ...)."""
        sizes = {name: (rows, len(self.example), *shape) for name, shape in self.shapes.items()}
        return {
            name: draw(self.modules[name], size, self.example, self.rng)
            for name, size in sizes.items()
        }

    def seeded(self) -> AbstractContextManager[None]:
        """Modules that draw by themselves follow the stream for a while."""
        return following(self.rng)


def _example(one: Observation) -> Tensor:
    return torch.zeros(one.size, *one.image_shape).to(next(one.model.parameters()))


def _kept(module: nn.Module) -> float:
    assert isinstance(module, DROPOUTS)
    return 1 - module.p
