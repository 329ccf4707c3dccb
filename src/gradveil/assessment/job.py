"""The job of an assessment: all settings of its result, and the jobs it is made of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from gradveil.audits import AuditJob, Case
from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError
from gradveil.core.job_folder import Kind
from gradveil.core.types import Protocol
from gradveil.data.images import Images
from gradveil.defenses import Defense, assessed_defenses
from gradveil.models import NormalizedName
from gradveil.models.normalized import constants_setting
from gradveil.training import Recipe, TrainingJob
from gradveil.training.job import FINAL, step_path

FORMAT = "gradveil assessment 1"
ASSESSMENT = Kind("an assessment", "assessment", format=FORMAT)
NOW, THEN = "0", "end"  # the steps of the training that are audited: before and after it


@dataclass(frozen=True, eq=False)
class AssessJob:
    """Assess what clients that train `model` on images like `data` give away.

    `data` is the name of a data set, or a pair of images to train and to attack. `checkpoint` are
    the weights that clients start from; without it those of the module, or untrained ones. Each
    of `defenses` is trained with for `epochs` more, at the rate `lr`, and attacked on `images`
    images. A defense that costs more than `most_loss` of accuracy is not recommended. `budget` are
    minutes for all of it, about: there are fewer training images and iterations where they do not
    suffice.
    """

    model: nn.Module | str | NormalizedName
    data: str | tuple[Images, Images]
    checkpoint: Path | None = None
    defenses: tuple[Defense, ...] = ()
    images: int = 32
    batch_size: int = 1
    labels: str = "known"
    protocol: Protocol = field(default_factory=Protocol)
    epochs: int = 2
    lr: float = 0.01
    most_loss: float = 0.02
    budget: float = 60.0
    image_size: int | None = None
    channels: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.budget < math.inf:
            raise GradveilError(f"budget {self.budget:g}: minutes must be above 0 and finite")
        if not 0 <= self.most_loss < 1:
            raise GradveilError(
                f"most loss {self.most_loss:g}: a share of accuracy, at least 0 and below 1"
            )
        if self.epochs < 1:
            raise GradveilError(f"epochs {self.epochs}: there must be at least 1")
        if any(str(defense) == "none" for defense in self.defenses):
            raise GradveilError(
                "defense none: the others are compared with it in any case; leave it out"
            )
        _ = self.training(Defense()), self.audit(())  # they check the rest

    @property
    def tried(self) -> tuple[Defense, ...]:
        """The defenses, those that declare a setting for assessments where none is given."""
        return self.defenses or assessed_defenses()

    def training(self, defense: Defense, fraction: float = 1.0) -> TrainingJob:
        """Return the training that goes on from the given weights under a defense."""
        data, test = (self.data, None) if isinstance(self.data, str) else self.data
        return TrainingJob(
            data,
            self.model,
            Recipe(self.epochs, self.lr, batch_size=64),
            defense,
            fraction=fraction,
            image_size=self.image_size,
            channels=self.channels,
            seed=self.seed,
            test=test,
            start=self.checkpoint,
            save_at=(int(NOW),),
        )

    def audit(self, trained: Sequence[tuple[Defense, Path]], minutes: float = 1.0) -> AuditJob:
        """Return the audit of what is shared now, and of each defense after its training.

        `trained` are the folders of the trainings, the first of them without a defense.
        """
        public, data = (None, self.data) if isinstance(self.data, str) else self.data
        now = step_path(trained[0][1], int(NOW)) if trained else None
        cases = [Case(Defense(), now, step=NOW)]
        cases += [Case(defense, path / FINAL, step=THEN) for defense, path in trained]
        return AuditJob(
            self.model,
            data,
            auto=True,
            cases=tuple(cases),
            images=self.images,
            public=public,
            batch_size=self.batch_size,
            labels=self.labels,
            protocol=self.protocol,
            budget=minutes,
            image_size=self.image_size,
            channels=self.channels,
            seed=self.seed,
        )

    def audit_before(self) -> AuditJob:
        """Return the same audit with the weights that are given in place of trained ones."""
        cases = [Case(Defense(), self.checkpoint, step=NOW)]
        cases += [Case(each, self.checkpoint, step=THEN) for each in (Defense(), *self.tried)]
        return replace(self.audit(()), cases=tuple(cases))

    def settings(self) -> dict[str, Any]:
        """Return plain values for settings.json."""
        training = self.training(Defense()).settings()
        return {
            "format": FORMAT,
            "data": training["data"],
            "model": training["model"],
            "checkpoint": self.checkpoint and str(self.checkpoint),
            "defenses": [str(defense) for defense in self.tried],
            "images": self.images,
            "batch_size": self.batch_size,
            "labels": self.labels,
            "trained_epochs": self.epochs,
            "lr": self.lr,
            "most_loss": self.most_loss,
            "budget": self.budget,
            "image_size": self.image_size,
            "channels": self.channels,
            "seed": self.seed,
            **self.protocol.settings(),
            **constants_setting(self.model),
        }
