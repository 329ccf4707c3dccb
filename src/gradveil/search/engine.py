"""Where the work of a search is done: scoring, and the audits that confirm it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from gradveil.audits import AuditJob, audit
from gradveil.core.errors import unknown
from gradveil.scores.scorer import Scorer
from gradveil.transforms import Policy


class Engine(ABC):
    """`scorers` by name: "accuracy" and "leak". Use it in a `with` block, which frees what it holds."""

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self.scorers = dict(scorers)

    @property
    @abstractmethod
    def workers(self) -> int:
        """Processes that score side by side."""

    def score(self, which: str, policies: Sequence[Policy], block: int) -> dict[str, Tensor]:
        """As the scorer's own `score`; the policies are split into the scorer's units, which may be done anywhere."""
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
        self, which: str, units: Sequence[Sequence[Policy]], block: int
    ) -> list[Mapping[str, Tensor]]:
        """The values of each unit, in their order."""

    @abstractmethod
    def audits(
        self,
        work: Sequence[tuple[AuditJob, Path]],
        root: Path | None,
        device: str,
        progress: bool = False,
    ) -> None:
        """Run each audit into its folder."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds."""

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
    """In this process, one after the other."""

    workers = 1

    def score_units(
        self, which: str, units: Sequence[Sequence[Policy]], block: int
    ) -> list[Mapping[str, Tensor]]:
        return [self.scorers[which].score(unit, block) for unit in units]

    def audits(
        self,
        work: Sequence[tuple[AuditJob, Path]],
        root: Path | None,
        device: str,
        progress: bool = False,
    ) -> None:
        for job, out in work:
            audit(job, out, root=root, device=device, progress=progress)

    def close(self) -> None:
        """It holds nothing."""
