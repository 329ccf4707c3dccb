"""What an audit is asked for: everything that decides its result."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradveil.attacks import Attack, find
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.types import Protocol
from gradveil.transforms import Policy, Preparation

LABELS = ("known", "inferred")
SETTINGS = ("steps", "restarts")  # of an attack, that a job may change
AT_ONCE = {"cpu": 16, "cuda": 100}  # victims attacked together: what a processor's cache and a GPU's memory take


@dataclass(frozen=True)
class AuditJob:
    """The victims are `images` images of the split from `first` on, `batch_size` to a victim. An attack is the name of a preset, or a
    name of your own and the attack.

    `victims_at_once` fixes the chunks, and so the random numbers; None leaves it to the device. With a policy, random crop and
    flip come before it, as in the published runs; without one the images are used as they are. `positive`: run each attack
    also where it is known to work.
    """

    data: str
    model: str
    attacks: tuple[str | tuple[str, Attack], ...]
    images: int
    checkpoint: Path | None = None
    batch_size: int = 1
    policy: Policy = field(default_factory=Policy)
    steps: int | None = None
    restarts: int | None = None
    labels: str = "known"
    protocol: Protocol = field(default_factory=Protocol)
    split: str = "test"
    first: int = 0
    victims_at_once: int | None = None
    image_size: int | None = None
    positive: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("images", 1), ("batch_size", 1), ("first", 0), ("victims_at_once", 1), ("steps", 1), ("restarts", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise GradveilError(f"{name.replace('_', ' ')} {value}: it must be at least {least}")
        if self.images % self.batch_size:
            raise GradveilError(f"{self.images} images in batches of {self.batch_size}: choose a multiple of the batch size")
        if self.labels not in LABELS:
            raise unknown("labels", self.labels, LABELS)
        self.find_attacks()

    def find_attacks(self) -> dict[str, Attack]:
        """By name, with the job's own steps and restarts where the attack has such a setting."""
        if not self.attacks:
            raise GradveilError("no attack was named: choose at least one")
        found: dict[str, Attack] = {}
        for one in self.attacks:
            name, attack = (one, find(one)) if isinstance(one, str) else one
            if name in found:
                raise GradveilError(f"attack {name!r} is named twice")
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", name):
                raise GradveilError(f"attack name {name!r}: files are named after it; choose up to 64 letters, digits and any of . _ + -")
            found[name] = attack
        for setting in SETTINGS:
            value = getattr(self, setting)
            if value is not None:
                found = _changed(found, setting, value)
        return found

    def on(self, device: torch.device) -> "AuditJob":
        """With the chunks of this device."""
        return self if self.victims_at_once else replace(self, victims_at_once=AT_ONCE.get(device.type, AT_ONCE["cpu"]))

    def preparation(self) -> Preparation | None:
        """What the client does to its images first."""
        return None if self.policy == Policy() else Preparation(policy=self.policy)

    def settings(self) -> dict[str, Any]:
        """As plain values, for the JSON files."""
        plain: dict[str, Any] = {part.name: getattr(self, part.name) for part in fields(self)} | asdict(self.protocol)
        del plain["protocol"]
        attacks = {name: repr(attack) for name, attack in self.find_attacks().items()}
        return plain | {"attacks": attacks, "policy": str(self.policy), "checkpoint": self.checkpoint and str(self.checkpoint)}


def shortened(attack: Attack) -> Attack:
    """One iteration of it, to see whether it suits a model; an attack without iterations as it is."""
    for setting in SETTINGS:
        attack = _with(attack, setting, 1) if _has(attack, setting) else attack
    return attack


def _changed(attacks: Mapping[str, Attack], setting: str, value: int) -> dict[str, Attack]:
    if not any(_has(attack, setting) for attack in attacks.values()):
        raise GradveilError(f"{setting} {value}: none of {', '.join(attacks)} has such a setting")
    return {name: _with(attack, setting, value) if _has(attack, setting) else attack for name, attack in attacks.items()}


def _has(attack: Attack, setting: str) -> bool:
    return is_dataclass(attack) and setting in {part.name for part in fields(attack)}


def _with(attack: Attack, setting: str, value: int) -> Attack:
    return replace(attack, **{setting: value})  # type: ignore[type-var]  # a dataclass, as `_has` made sure
