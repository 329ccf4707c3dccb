"""Engines do the work of a search or tuning: they score what is tried, and run audits."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from gradveil.core.errors import unknown
from gradveil.engine.device import sharing_cores
from gradveil.scores.scorer import Scorer

Task = Callable[[bool], object]
"""A job that can be pickled; called with whether it may show its progress, it writes its files."""


class Engine(ABC):
    """Score policies or attacks with `scorers`, by name.

    Use an engine in a `with` block, which frees what it holds.
    """

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self.scorers = dict(scorers)

    @property
    @abstractmethod
    def workers(self) -> int:
        """Processes that score side by side."""

    def score(self, which: str, policies: Sequence[Any], block: int) -> dict[str, Tensor]:
        """Score policies on one block, as `Scorer.score` does: tables of (policies, values).

        The policies are split into the scorer's units, which may be scored anywhere.
        """
        if which not in self.scorers:
            raise unknown("scorer", which, self.scorers)
        scorer = self.scorers[which]
        units = [
            policies[start : start + scorer.unit] for start in range(0, len(policies), scorer.unit)
        ]
        nothing = {
            name: torch.empty(0, scorer.blocks[block], dtype=torch.float64) for name in scorer.names
        }
        parts = [nothing, *self.score_units(which, units, block)]
        return {name: torch.cat([part[name] for part in parts]) for name in scorer.names}

    @abstractmethod
    def score_units(
        self, which: str, units: Sequence[Sequence[Any]], block: int
    ) -> list[Mapping[str, Tensor]]:
        """Score each unit; the results are in the order of the units."""

    @abstractmethod
    def run(self, tasks: Sequence[Task], device: str, progress: bool = False) -> None:
        """Run each task; `device` is where they compute, `progress` whether it may be shown."""

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class LocalEngine(Engine):
    """Work in this process, one piece after the other."""

    workers = 1

    def score_units(
        self, which: str, units: Sequence[Sequence[Any]], block: int
    ) -> list[Mapping[str, Tensor]]:
        scores = []
        for unit in units:
            with sharing_cores(torch.device("cpu")):  # on a GPU they hardly matter
                scores.append(self.scorers[which].score(unit, block))
        return scores

    def run(self, tasks: Sequence[Task], device: str, progress: bool = False) -> None:
        for task in tasks:
            task(progress)

    def close(self) -> None:
        """Do nothing: this engine holds nothing."""
