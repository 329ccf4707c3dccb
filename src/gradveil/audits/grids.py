"""A grid: several defences, each audited into a folder of its own by the attacks that may break it, and read back together."""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gradveil.audits.cases import Case, GridJob
from gradveil.audits.results import AuditResult
from gradveil.audits.runs import prepare, run_audit
from gradveil.audits.weights import MODEL, Trained, read_trained, save_trained, trained
from gradveil.core.errors import GradveilError
from gradveil.core.job_folder import SETTINGS, Kind, claim, remove_empty
from gradveil.data import Images, load
from gradveil.engine.device import find_device

GRID = Kind("a grid of audits", "grid of audits")


@dataclass(frozen=True)
class Part:
    """One case: its audit, and what is known of its model's training."""

    case: Case
    audit: AuditResult
    trained: Trained | None

    @property
    def own(self) -> Trained | None:
        """What is known of its training, where that was under this defence."""
        return (
            self.trained
            if self.trained is not None and self.trained.under == self.case.defense
            else None
        )

    @property
    def step(self) -> int | None:
        """Of training; None where it is not known."""
        if self.case.step is not None and self.case.step.isdecimal():
            return int(self.case.step)
        return None if self.trained is None else self.trained.step


@dataclass(frozen=True)
class GridResult:
    """Where the grid is, what it was, and its parts in order."""

    out: Path
    settings: dict[str, Any]
    parts: tuple[Part, ...]

    @classmethod
    def read(cls, out: Path) -> "GridResult":
        """From the folder of a grid that is done."""
        settings = GRID.read(out)
        if "cases" not in settings:
            raise GradveilError(
                f"{out} holds a single audit, no grid: read it with AuditResult.read"
            )
        cases = [
            Case(**one | {"checkpoint": one["checkpoint"] and Path(one["checkpoint"])})
            for one in settings["cases"]
        ]
        return cls(
            out,
            settings,
            tuple(
                Part(one, AuditResult.read(out / one.folder), read_trained(out / one.folder))
                for one in cases
            ),
        )

    def plain(self) -> list[dict[str, Any]]:
        """The parts, for JSON; `strongest` is the defence's result."""
        return [
            part.case.plain()
            | {
                "folder": part.case.folder,
                "trained": part.trained and asdict(part.trained),
                "strongest": part.audit.strongest.plain(),
                "rows": [row.plain() for row in part.audit.rows],
                "knows": part.audit.settings["knows"],
                "left_out": part.audit.settings["left_out"],
            }
            for part in self.parts
        ]

    @cached_property
    def baselines(self) -> dict[str | None, Trained]:
        """By the step asked for: the models trained and audited without a defence."""
        return {
            part.case.step: part.own
            for part in self.parts
            if part.case.defense == "none" and part.own is not None
        }


def grid(
    job: GridJob,
    out: Path,
    *,
    root: Path | None = None,
    device: str = "auto",
    progress: bool = True,
) -> GridResult:
    """Audit every case into `out`. A run that was stopped goes on; before anything is written, every case is tried out."""
    place = find_device(device)
    job = replace(job, base=job.base.on(place))
    cases, settings = job.cases(), job.settings()
    GRID.refuse_other(out, settings)
    splits = [
        load(job.base.data, name, root=root, image_size=job.base.image_size)
        for name in (job.base.split, "train", "test")
    ]
    if not (out / SETTINGS).is_file():
        for case in cases:
            _explained(job, case, splits, place)
    claim(out, settings)
    try:
        for number, case in enumerate(cases):
            own = job.job(
                case, positive=number == 0
            )  # the control depends on neither the model nor the defence
            run_audit(prepare(own, splits[0], splits[1], place), out / case.folder, progress)
            if not (out / case.folder / MODEL).is_file():
                save_trained(out / case.folder, trained(own, splits[2], place))
    except Exception:
        if not any((out / case.folder).exists() for case in cases):
            (out / SETTINGS).unlink(missing_ok=True)
            remove_empty(out)
        raise
    return GridResult.read(out)


def _explained(job: GridJob, case: Case, splits: list[Images], place: torch.device) -> None:
    """An error names the case."""
    try:
        prepare(job.job(case, positive=False), splits[0], splits[1], place)
    except GradveilError as error:
        text = str(error)
        raise GradveilError(
            text if case.defense in text else f"defense {case.defense}: {text}"
        ) from error
