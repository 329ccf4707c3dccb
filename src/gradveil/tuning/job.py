"""The settings of a tuning: everything that decides its result, and the folder it goes into."""

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from gradveil.attacks import adam_cosine
from gradveil.audits.job import LABELS, Case, data_name
from gradveil.core.boundary import check_fields, check_least
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.files import digest
from gradveil.core.job_folder import Kind
from gradveil.core.types import Protocol
from gradveil.data import Images
from gradveil.defenses import Defense
from gradveil.defenses.applied import check_defense
from gradveil.models import NormalizedName
from gradveil.models.factories import check_weights_exist
from gradveil.models.normalized import constants_setting, plain_name
from gradveil.search.job import refuse_changes
from gradveil.tuning.space import AttackSpace

FOLDER = Kind("a tuning", "tuning")
ATTACK = "attack.toml"
RESULT = "tuning.json"
USUAL = "usual"
LEAST = {
    "images": 1,
    "held_out": 1,
    "trials": 1,
    "batch_size": 1,
    "work": 1,
    "at_once": 1,
    "image_size": 1,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class TuningJob:
    """Try `trials` attacks on `images` public images, and keep the best.

    The clients have this `model`, untrained or with the weights of `checkpoint`, this `defense`
    and `protocol`, and batches of `batch_size` images. `data` are images of their kind, or the name
    of a data set, whose training split is meant; `public` are other images to tune on, of the same
    classes. `space` says what is tried; None is the usual space for the model and the defense.

    All attacks do the same `work`: iterations of an image, over all its restarts and heats; the
    standard attack makes 4,800 as published. `budget` are minutes that the tuning may take at most:
    the work is made as small as that needs. A trial is dropped after the first images where it is
    clearly worse than the best so far, by a test of this `confidence`. The best attack is compared
    with the standard attack on `held_out` further images. `at_once` trials are drawn together.
    `channels` 3 makes gray images color, 1 the reverse.
    """

    model: str | nn.Module | NormalizedName
    data: str | Images
    images: int = 16
    trials: int = 40
    public: Images | None = None
    checkpoint: Path | None = None
    defense: Defense = field(default_factory=Defense)
    space: AttackSpace | None = None
    held_out: int = 32
    batch_size: int = 1
    labels: str = "known"
    protocol: Protocol = field(default_factory=Protocol)
    work: int = adam_cosine.steps
    budget: float | None = None
    confidence: float = 0.95
    at_once: int = 4
    image_size: int | None = None
    channels: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_defense(self.defense)
        if isinstance(self.model, nn.Module):
            check_weights_exist(self.model)
        check_least(self, LEAST)
        for name in ("images", "held_out"):
            value = getattr(self, name)
            if value % self.batch_size:
                raise GradveilError(
                    f"{name.replace('_', ' ')} {value} in batches of {self.batch_size}: choose a "
                    "multiple of the batch size"
                )
        if self.labels not in LABELS:
            raise unknown("labels", self.labels, LABELS)
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise GradveilError(f"budget {self.budget}: minutes must be above 0 and finite")
        if not 0.5 <= self.confidence < 1:
            raise GradveilError(
                f"confidence {self.confidence}: choose from 0.5 to below 1, such as 0.95"
            )
        if isinstance(self.data, Images):
            refuse_changes(self.image_size, self.channels)

    @property
    def case(self) -> Case:
        """The client's defense and weights, as an audit has them."""
        return Case(self.defense, self.checkpoint)

    def settings(self) -> dict[str, Any]:
        """Return plain values for the JSON files; own models and images have digests."""
        left_out = {"model", "data", "public", "defense", "checkpoint", "protocol", "space"}
        left_out |= {"channels"} if self.channels is None else set()
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {name: value for name, value in plain.items() if name not in left_out}
        named = {
            "model": plain_name(self.model),
            "data": data_name(self.data),
            "public": None if self.public is None else self.public.name,
            "defense": str(self.defense),
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            **constants_setting(self.model),
        }
        space = USUAL if self.space is None else self.space.plain()
        return plain | named | self.protocol.settings() | {"space": space} | self._digests

    @cached_property
    def _digests(self) -> dict[str, str]:
        told: dict[str, str] = {}
        if isinstance(self.data, Images):
            told["data_sha256"] = self.data.digest()
        if self.public is not None:
            told["public_sha256"] = self.public.digest()
        if isinstance(self.model, nn.Module):
            told["model_sha256"] = digest(self.model.state_dict())
        return told
