"""The settings of a search: everything that decides its result, and the folder it goes into."""

import math
import re
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from gradveil.attacks import PRESETS, Attack, find
from gradveil.attacks.base import check_attack
from gradveil.core.boundary import check_fields, check_least, check_shown
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.files import digest
from gradveil.core.job_folder import Kind
from gradveil.data import Images
from gradveil.models import NormalizedName
from gradveil.models.factories import check_weights_exist
from gradveil.models.normalized import constants_setting, plain_name
from gradveil.scores.privacy import AREA_RULES
from gradveil.search.space import SAMPLERS

RESULT = "search.json"
SEMI_TRAINED = "semi-trained"
FOLDER = Kind("a search", "search")

SCORES = {"privacy": 100, "probe": 64}  # images that each is usually measured on
RANKED_BY = ("ssim", "over_blind", "lineup")  # quantities of the probe; lower leaks less
TOGETHER = {"random": 50, "tpe": 8, "nsga2": 8}
"""Trials drawn before the results of any of them are known; 50 with five images each fill a GPU."""

PUBLISHED: dict[str, Any] = {"score": "privacy", "rule": "code", "sampler": "random", "race": False}
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


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """Try `trials` policies and keep the `keep` that leak least among those accurate enough.

    `data` is the name of a data set, or a pair of training and test images. `model` is a name, or
    a module with untrained weights; `checkpoint` holds its semi-trained weights. Where it is None,
    the search trains them: 50 epochs on a tenth of the training images.

    A policy is accurate enough when its accuracy score on the untrained model is at least
    `threshold`. Leakage is measured on `images` test images with the semi-trained model: by a short
    `attack` of `probe_steps` iterations (`score` probe, ranked by `rank_by`), or by the paper's
    S_pri (`score` privacy), computed by the `rule` of its code or of its text.

    `race` drops a policy as soon as it is clearly worse than the last that would be kept; see
    `gradveil.search.trials` for how often that changes the result. `at_once` trials are drawn and
    scored together. The best policy and a hybrid of up to `hybrid` policies are then confirmed by
    audits of `audit_images` other test images, drawn over the classes, with `audit_steps`
    iterations of the attack.
    `attack_name` is what files and tables call the attack; None takes the preset's name.
    """

    data: str | tuple[Images, Images]
    model: nn.Module | str | NormalizedName
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
    attack: Attack = PRESETS["adam-cosine"]
    attack_name: str | None = None
    probe_steps: int = 400
    hybrid: int = 2
    at_once: int | None = None
    audit_images: int = 32
    audit_steps: int | None = None
    augment: bool = True
    image_size: int | None = None
    channels: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_attack(self.attack)
        check_shown(self.attack, "__repr__", "attack")
        if isinstance(self.model, nn.Module):
            check_weights_exist(self.model)
        self._check_data()
        check_least(self, LEAST)
        for name, choices in (
            ("score", SCORES),
            ("rule", AREA_RULES),
            ("rank_by", RANKED_BY),
            ("sampler", SAMPLERS),
        ):
            if getattr(self, name) not in choices:
                raise unknown(name.replace("_", " "), getattr(self, name), choices)
        if self.score == "privacy" and self.rank_by != RANKED_BY[0]:
            raise GradveilError(
                f"rank by {self.rank_by}: score privacy is ranked by S_pri; choose score probe, "
                "or leave one out"
            )
        if self.score != "privacy" and self.rule != type(self).rule:
            raise GradveilError(
                f"rule {self.rule}: score {self.score} is not S_pri; choose score privacy, or "
                "leave one out"
            )
        if self.keep > self.trials:
            raise GradveilError(
                f"keep {self.keep} of {self.trials} trials: keep at most as many as are drawn; "
                f"give a keep of {self.trials} or less"
            )
        if not math.isfinite(self.threshold):
            raise GradveilError(
                f"threshold {self.threshold}: it must be a finite number, such as -85"
            )
        self._check_race()
        self._check_audits()

    def _check_data(self) -> None:
        pair = isinstance(self.data, tuple) and len(self.data) == 2
        if not isinstance(self.data, str) and not (
            pair and all(isinstance(split, Images) for split in self.data)
        ):
            raise GradveilError(
                f"data of type {type(self.data).__name__}: give the name of a data set, "
                "or a pair of Images, for training and for testing (gradveil.as_images makes them)"
            )
        if pair:
            refuse_changes(self.image_size, self.channels)

    def _check_race(self) -> None:
        if not 0.5 <= self.race_confidence < 1:
            raise GradveilError(
                f"race confidence {self.race_confidence}: choose from 0.5 to below 1, such as 0.999"
            )
        if not self.race and self.race_confidence != type(self).race_confidence:
            raise GradveilError(
                f"race confidence {self.race_confidence}: there is no race; add --race, or leave "
                "it out"
            )
        if self.race and self.sampler == "nsga2":
            raise GradveilError(
                "race with sampler nsga2: a front has no single policy to beat; leave out --race, "
                "or choose random or tpe"
            )

    def _check_audits(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", self.attack_title):
            raise GradveilError(
                f"attack name {self.attack_title!r}: files are named after it; "
                "choose letters, digits and any of . _ + -"
            )
        steps = is_dataclass(self.attack) and any(f.name == "steps" for f in fields(self.attack))
        if self.audit_steps is not None and not steps:
            raise GradveilError(
                f"audit steps {self.audit_steps}: attack {self.attack_title} has no such setting"
            )

    @classmethod
    def as_published(cls, **settings: Any) -> "SearchJob":
        """Return the paper's search: S_pri by its code, 1,500 random policies, ten kept."""
        for name, value in PUBLISHED.items():
            if settings.get(name, value) != value:
                raise GradveilError(
                    f"{name} {settings[name]}: the published search has {name} {value}; "
                    "leave one of the two out"
                )
        return cls(**(settings | PUBLISHED))

    @property
    def objective(self) -> str:
        """The quantity to be made small."""
        return self.rank_by if self.score == "probe" else "privacy"

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names of the quantities that the sampler is told of."""
        return (self.objective, "accuracy") if self.sampler == "nsga2" else (self.objective,)

    @property
    def group(self) -> int | None:
        """Trials drawn and scored together; None where the machine may choose without effect."""
        return self.at_once or (
            TOGETHER[self.sampler] if self.race or self.sampler != "random" else None
        )

    @cached_property
    def attack_title(self) -> str:
        """The attack's name: as given, that of the preset it equals, or that of its class."""
        presets = (name for name, preset in PRESETS.items() if preset == self.attack)
        return self.attack_name or next(presets, type(self.attack).__name__)

    def settings(self) -> dict[str, Any]:
        """Return plain values for the JSON files; models and images of a caller have digests."""
        plain = {part.name: getattr(self, part.name) for part in fields(self)}
        for name in ("attack_name", *([] if self.channels else ["channels"])):
            del plain[name]
        plain |= {"model": plain_name(self.model)} | constants_setting(self.model)
        texts = {
            "checkpoint": self.checkpoint and str(self.checkpoint),
            "attack": self.attack_title,
            "at_once": self.group,
        }
        return plain | texts | self._digests

    @cached_property
    def _digests(self) -> dict[str, str]:
        told: dict[str, str] = {}
        if not isinstance(self.data, str):
            told |= {"data": self.data[1].name, "data_sha256": images_digest(*self.data)}
        if isinstance(self.model, nn.Module):
            weights = digest(self.model.state_dict())
            told |= {"model": type(self.model).__name__, "model_sha256": weights}
        title = self.attack_title  # `A+B` combines two presets
        listed = all(part in PRESETS for part in title.split("+"))
        if not listed or find(title) != self.attack:
            told |= {"attack_settings": repr(self.attack)}
        return told


def refuse_changes(image_size: int | None, channels: int | None) -> None:
    """Refuse to change the images of a caller."""
    if image_size is not None:
        raise GradveilError(
            f"image size {image_size}: only named data sets are resized; "
            "resize your own images first"
        )
    if channels is not None:
        raise GradveilError(
            f"channels {channels}: only named data sets are converted; "
            "convert your own images first"
        )


def images_digest(train: Images, test: Images) -> str:
    """Return a digest of all pixels and labels.

    Blind guesses are made from the training images, and an image is mistaken for other test images.
    """
    splits = {"train": train, "test": test}
    return digest(
        {
            f"{name} {part}": getattr(split, part)
            for name, split in splits.items()
            for part in ("images", "labels")
        }
    )
