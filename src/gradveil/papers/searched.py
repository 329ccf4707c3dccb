"""A search for policies as a cell: what it keeps, and what audits find of the best."""

import gzip
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from gradveil.audits.results import AuditResult
from gradveil.core.errors import GradveilError
from gradveil.core.files import write_bytes
from gradveil.papers.cells import QUICK_STEPS, QUICK_VICTIMS, Cell, Workspace, keep_case
from gradveil.papers.costs import (
    SHAM,
    STARTING,
    area,
    attack_seconds,
    iteration_seconds,
    score_seconds,
)
from gradveil.search.confirm import CONFIRM
from gradveil.search.job import SearchJob
from gradveil.search.results import POLICIES, TRIALS, SearchResult
from gradveil.search.run import run_search
from gradveil.search.services import JOURNAL

AUDITS = 4  # policies that are audited: none, random, the best, and a hybrid where there is one
RACE = 1.0  # share of the probes' work that a race of 20 images leaves: it dropped 2% of policies
ROWS = 512  # victims of the probe that are attacked together
FEW_TRIALS = 6
ANY = -1e6  # an accuracy score that all policies have


def trials_ended(folder: Path) -> int:
    """Count the trials that have ended of the study in a folder; 0 where nothing can be told."""
    try:
        there = (folder / JOURNAL).stat()
        return _count(folder / JOURNAL, (there.st_size, there.st_mtime_ns))
    except (OSError, ImportError, GradveilError):  # the search itself says what is wrong
        return 0


@cache
def _count(journal: Path, _state: tuple[int, int]) -> int:
    """Count the trials of a journal of this state: a queue asks many times."""
    from gradveil.search.journal import count_ended

    return count_ended(journal)


@dataclass(frozen=True)
class Searched(Cell):
    """A search with the training's weights: by S_pri as published, or by the probe with a race.

    Each policy is scored on `scored` images. The best are then attacked on `images` others, with
    `steps` iterations, on the semi-trained and on the untrained model.
    """

    kind: ClassVar[str] = "search"

    score: str = "probe"
    scored: int = 20
    images: int = 64
    steps: int | None = 2_400
    trials: int = 1_500
    keep_best: int = 10
    threshold: float = -85.0
    probe_steps: int = 400
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.training.data}-{self.training.model}-{self.score}"

    @property
    def seconds(self) -> float:
        return self._seconds(self.trials)

    def left(self, workspace: Workspace) -> float:
        """Return the time of the trials that its study lacks, and of the audits, estimated."""
        return self._seconds(max(0, self.trials - trials_ended(workspace.folder(self))))

    def _seconds(self, trials: int) -> float:
        """Return the time of so many trials, and of the audits, estimated."""
        model, scale = self.training.model, area(self.data, self.training.image_size)
        each = STARTING + sum(
            attack_seconds("adam-cosine", images, model, scale, self.steps)
            for images in (self.images, min(self.images, SHAM))
        )
        if self.score == "privacy":
            return score_seconds(trials, self.scored, 1, scale) + 2 * AUDITS * each
        at_once = iteration_seconds(ROWS, model, scale)
        probed = trials * self.scored / ROWS * self.probe_steps * at_once
        return STARTING + RACE * probed + 2 * AUDITS * each

    def job(self, workspace: Workspace) -> SearchJob:
        """Return the job that searches."""
        return SearchJob(
            data=self.training.data,
            model=self.training.network,
            checkpoint=self.training.checkpoint(workspace),
            score=self.score,
            race=self.score == "probe",  # the published search has none
            trials=self.trials,
            keep=self.keep_best,
            threshold=self.threshold,
            images=self.scored,
            probe_steps=self.probe_steps,
            audit_images=self.images,
            audit_steps=self.steps,
            image_size=self.training.image_size,
            seed=self.seed,
        )

    def measure(self, workspace: Workspace) -> dict[str, Any]:
        found = run_search(
            self.job(workspace),
            workspace.folder(self),
            root=workspace.root,
            device=workspace.device,
            progress=workspace.progress,
        )
        return {
            "states": dict(sorted(Counter(trial.state for trial in found.trials).items())),
            "kept": [str(trial.policy) for trial in found.kept],
            "best": str(found.best),
            "hybrid": None if found.hybrid is None else str(found.hybrid),
            "cases": {model: [*rows] for model, rows in found.confirmed.items()},
        }

    def keep(self, workspace: Workspace, target: Path) -> None:
        source = workspace.folder(self)
        SearchResult.read(source)
        write_bytes(target / POLICIES, (source / POLICIES).read_bytes())
        trials = gzip.compress((source / TRIALS).read_bytes(), mtime=0)
        write_bytes(target / f"{TRIALS}.gz", trials)
        for case in AuditResult.read(source / CONFIRM).cases:
            keep_case(case, source, workspace, target)

    def quick(self, workspace: Workspace) -> Self:
        return replace(
            self,
            training=self.training.quick(workspace),
            images=QUICK_VICTIMS,
            steps=QUICK_STEPS,
            trials=FEW_TRIALS,
            keep_best=2,
            threshold=ANY,
            scored=QUICK_VICTIMS,
            probe_steps=QUICK_STEPS,
        )
