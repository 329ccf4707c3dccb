"""An attack that is tuned on public images as a cell: the tuning, then the audit with it."""

from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any, ClassVar, Self

from gradveil.attacks import GradientMatching, raced
from gradveil.audits.job import AuditJob
from gradveil.core.files import write_bytes
from gradveil.papers.cells import QUICK_STEPS, QUICK_VICTIMS, Audited, Workspace
from gradveil.papers.costs import STARTING, area, attack_seconds
from gradveil.papers.searched import trials_ended
from gradveil.tuning.job import ATTACK, RESULT, TuningJob
from gradveil.tuning.results import TuningResult
from gradveil.tuning.run import run_tuning
from gradveil.tuning.space import Searches

TUNED = "tuned"
TUNING = "tuning"  # the folder of tunings, one for each cell
WORK = int(raced.race.work(raced.restarts, raced.steps))
"""Iterations of an image by the raced attack, over all its starts: the tuned one has as many."""


@dataclass(frozen=True)
class TunedAttack(Audited):
    """An attack on victims that was tuned on other images, those of the training split.

    `trials` attacks are tried on `tuned_on` images, each with `trial_work` iterations of an image,
    and the best is told from the standard attack on `held_out` more. On the victims it has `WORK`
    iterations of an image.
    """

    kind: ClassVar[str] = TUNED

    attack: str = TUNED
    tuned_on: int = 16
    held_out: int = 32
    trials: int = 16
    trial_work: int = 4_800

    @property
    def seconds(self) -> float:
        return self._seconds(self.trials)

    def left(self, workspace: Workspace) -> float:
        """Return the time of the trials that its study lacks, and of what follows, estimated."""
        return self._seconds(max(0, self.trials - trials_ended(self._folder(workspace))))

    def begun(self, workspace: Workspace) -> bool:
        return self._folder(workspace).exists()

    def forget(self, workspace: Workspace) -> None:
        super().forget(workspace)
        rmtree(self._folder(workspace), ignore_errors=True)

    def _seconds(self, trials: int) -> float:
        """Return the time of so many trials, of their test and of the audit, estimated."""
        model, scale = self.training.model, area(self.data, self.training.image_size)
        trial = attack_seconds("adam-cosine", self.tuned_on, model, scale, self.trial_work)
        test = attack_seconds("adam-cosine", self.held_out, model, scale, self.trial_work)
        proper = attack_seconds("raced", self.images, model, scale)
        return 2 * STARTING + trials * trial + 2 * test + proper

    def tuning(self, workspace: Workspace) -> TuningJob:
        """Return the job that tunes it."""
        return TuningJob(
            model=self.training.network,
            data=self.training.data,
            images=self.tuned_on,
            held_out=self.held_out,
            trials=self.trials,
            work=self.trial_work,
            checkpoint=self.training.checkpoint(workspace),
            defense=self.defense,
            image_size=self.training.image_size,
            seed=self.seed,
        )

    def attack_value(self, workspace: Workspace) -> GradientMatching:
        """Return the attack that the tuning found, with the work that it has on the victims."""
        found = TuningResult.read(self._folder(workspace)).attack
        work = WORK if self.steps is None else self.steps
        return replace(found, steps=Searches(found.restarts, found.race).steps(work))

    def job(self, workspace: Workspace) -> AuditJob:
        tuned = {self.attack: self.attack_value(workspace)}
        return replace(
            self._plain.job(workspace), attacks=tuned, steps=None, positive=False, sham=self.sham
        )

    def measure(self, workspace: Workspace) -> dict[str, Any]:
        found = run_tuning(
            self.tuning(workspace),
            self._folder(workspace),
            root=workspace.root,
            device=workspace.device,
            progress=workspace.progress,
        )
        return super().measure(workspace) | {"drawn": dict(found.drawn), "words": found.words}

    def keep(self, workspace: Workspace, target: Path) -> None:
        super().keep(workspace, target)
        for name in (ATTACK, RESULT):
            text = (self._folder(workspace) / name).read_bytes()
            write_bytes(target / name, text.replace(f"{workspace.work}/".encode(), b""))

    def quick(self, workspace: Workspace) -> Self:
        return replace(
            self,
            training=self.training.quick(workspace),
            images=QUICK_VICTIMS,
            tuned_on=QUICK_VICTIMS,
            held_out=QUICK_VICTIMS,
            trials=2,
            trial_work=20 * QUICK_STEPS,
            steps=20 * QUICK_STEPS,
            sham=False,
        )

    @property
    def _plain(self) -> Audited:
        """The same audit by the raced attack."""
        return Audited(
            self.training, self.defense, "raced", self.images, first=self.first, seed=self.seed
        )

    def _folder(self, workspace: Workspace) -> Path:
        return workspace.work / TUNING / self.key
