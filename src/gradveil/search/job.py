"""What a search is asked for: everything that decides its result."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gradveil.attacks import find
from gradveil.audits import AuditJob
from gradveil.core.errors import GradveilError, unknown

SCORES = {"privacy": 100, "probe": 64}  # images of each, unless told otherwise
RANKED_BY = ("over_blind", "ssim", "identified")  # what of the probe; lower leaks less
RULES = ("code", "paper")
SAMPLERS = ("random", "tpe", "nsga2")
RESERVED = 100  # the first images of the split are for attacks, and no score looks at them
GROUPS = {
    "random": 50,
    "tpe": 8,
    "nsga2": 8,
}  # trials drawn before the results of any are known; 50 with five images each fill a GPU
PUBLISHED: dict[str, Any] = {"score": "privacy", "rule": "code", "sampler": "random", "race": False}


@dataclass(frozen=True)
class SearchJob:
    """Draw `trials` policies, drop those whose accuracy score is below `threshold`, keep the `keep` that leak least.

    The leakage is that of a short attack on the semi-trained model (`probe`) or the paper's S_pri (`privacy`, by the `rule` of its
    code or of its text). `rank_by` says by what of the probe. Without a checkpoint the semi-trained model is
    trained: a tenth of the data, 50 epochs.
    """

    data: str
    model: str
    checkpoint: Path | None = None
    trials: int = 1500
    keep: int = 10
    threshold: float = -85.0
    score: str = "probe"
    rule: str = "code"
    rank_by: str = RANKED_BY[0]
    sampler: str = "random"
    race: bool = False
    race_confidence: float = 0.999
    images: int | None = None
    attack: str = "adam-cosine"
    probe_steps: int = 200
    hybrid: int = 2
    at_once: int | None = None
    audit_images: int = 32
    audit_steps: int | None = None
    augment: bool = True
    image_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise GradveilError(
                    f"{name.replace('_', ' ')} {value}: it must be at least {least}"
                )
        for name, choices in (
            ("score", SCORES),
            ("rule", RULES),
            ("rank_by", RANKED_BY),
            ("sampler", SAMPLERS),
        ):
            if getattr(self, name) not in choices:
                raise unknown(name.replace("_", " "), getattr(self, name), choices)
        if self.score == "privacy" and self.rank_by != RANKED_BY[0]:
            raise GradveilError(
                f"rank by {self.rank_by}: score privacy is ranked by S_pri; choose score probe, or leave one out"
            )
        if self.keep > self.trials:
            raise GradveilError(
                f"keep {self.keep} of {self.trials} trials: keep at most as many as are drawn"
            )
        if not math.isfinite(self.threshold):
            raise GradveilError(
                f"threshold {self.threshold}: it must be a finite number, such as -85"
            )
        if not 0.5 <= self.race_confidence < 1:
            raise GradveilError(
                f"race confidence {self.race_confidence}: choose from 0.5 to below 1, such as 0.999"
            )
        if self.race and self.sampler == "nsga2":
            raise GradveilError(
                "race with sampler nsga2: a front has no single policy to beat; leave out --race, or choose random or tpe"
            )
        if self.audit_images > RESERVED:
            raise GradveilError(
                f"audit images {self.audit_images}: at most {RESERVED}, the first of the split, which no score looks at"
            )
        find(self.attack)  # not `auto`, which an audit takes
        AuditJob(
            self.data, self.model, (self.attack,), self.audit_images, steps=self.audit_steps
        )  # settings that an attack has not are errors of it

    @classmethod
    def as_published(cls, data: str, model: str, **more: Any) -> "SearchJob":
        """The paper's search: S_pri as its code computes it, 1,500 random policies, threshold -85, ten kept."""
        for name, value in PUBLISHED.items():
            if more.get(name, value) != value:
                raise GradveilError(
                    f"{name} {more[name]}: the published search has {name} {value}; leave one of the two out"
                )
        return cls(data, model, **(more | PUBLISHED))

    @property
    def objective(self) -> str:
        """The quantity to be made small."""
        return self.rank_by if self.score == "probe" else "privacy"

    @property
    def group(self) -> int | None:
        """Trials that are drawn and scored together, where that can change the result; None leaves it to the machine."""
        return self.at_once or (
            GROUPS[self.sampler] if self.race or self.sampler != "random" else None
        )

    def settings(self) -> dict[str, Any]:
        """As plain values, for the JSON files."""
        plain = {part.name: getattr(self, part.name) for part in fields(self)}
        return plain | {
            "checkpoint": self.checkpoint and str(self.checkpoint),
            "at_once": self.group,
        }


LEAST = {
    "trials": 1,
    "keep": 1,
    "images": 2,  # a standard error needs two
    "probe_steps": 1,
    "hybrid": 2,
    "at_once": 1,
    "audit_images": 1,
    "audit_steps": 1,
    "image_size": 1,
}
