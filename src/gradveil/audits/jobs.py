"""What an audit is asked for: everything that decides its result."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from gradveil.attacks import PRESETS, Attack
from gradveil.audits.attackers import AUTO, LONGEST, automatic
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.types import Batch, Protocol
from gradveil.defenses import Defense, PolicyDefense, parse
from gradveil.transforms import Policy

LABELS = ("known", "inferred")
SETTINGS = ("steps", "restarts")  # of an attack, that a job may change
AT_ONCE = {
    "cpu": 16,
    "cuda": 100,
}  # victims attacked together: what a processor's cache and a GPU's memory take


@dataclass(frozen=True)
class AuditJob:
    """The victims are `images` images of the split from `first` on, `batch_size` to a victim. An attack is the name of a preset, or a
    name of your own and the attack; `auto` stands for the standard attack, those that are known to undo the defence, and the
    closed form, as far as they suit the model.

    `victims_at_once` fixes the chunks, and so the random numbers; None leaves it to the device. `defense` is a text such as
    `prune:0.95`. With a policy, random crop and flip come before it, as in the published runs; without one the images are used as
    they are. `clean`: what the defence does to gradients is left out, as in published evaluations. `fitting`: attacks that do not suit the
    model or the defence are left out, with the reason, in place of an error. `positive`: run each attack that needs no
    defence also where it is known to work.
    """

    data: str
    model: str
    attacks: tuple[str | tuple[str, Attack], ...]
    images: int
    checkpoint: Path | None = None
    batch_size: int = 1
    policy: Policy = field(default_factory=Policy)
    defense: str = "none"
    clean: bool = False
    steps: int | None = None
    restarts: int | None = None
    labels: str = "known"
    protocol: Protocol = field(default_factory=Protocol)
    split: str = "test"
    first: int = 0
    victims_at_once: int | None = None
    image_size: int | None = None
    fitting: bool = False
    positive: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("images", 1),
            ("batch_size", 1),
            ("first", 0),
            ("victims_at_once", 1),
            ("steps", 1),
            ("restarts", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise GradveilError(
                    f"{name.replace('_', ' ')} {value}: it must be at least {least}"
                )
        if self.images % self.batch_size:
            raise GradveilError(
                f"{self.images} images in batches of {self.batch_size}: choose a multiple of the batch size"
            )
        if self.labels not in LABELS:
            raise unknown("labels", self.labels, LABELS)
        if self.policy != Policy() and parse(self.defense).parts():
            raise GradveilError(
                f"policy {self.policy} and defense {self.defense}: give one of them; a policy is a defense too"
            )
        self.find_attacks()

    @cached_property
    def protection(self) -> Defense:
        """The defence as a value; a policy is one too."""
        return parse(self.defense) if self.policy == Policy() else PolicyDefense(self.policy)

    @cached_property
    def acting(self) -> Defense:
        """What of it acts on what is shared."""
        return self.protection.without_gradients() if self.clean else self.protection

    def find_attacks(self) -> dict[str, Attack]:
        """By name, with the job's own steps and restarts where the attack has such a setting."""
        if not self.attacks:
            raise GradveilError("no attack was named: choose at least one")
        found: dict[str, Attack] = {}
        for one in self._named():
            name, attack = (one, _preset(one)) if isinstance(one, str) else one
            if name in found:
                raise GradveilError(f"attack {name!r} is named twice")
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name) or len(name) > LONGEST:
                allowed = f"up to {LONGEST} letters, digits and any of . _ + -"
                raise GradveilError(
                    f"attack name {name!r}: files are named after it; choose {allowed}"
                )
            found[name] = attack
        for setting in SETTINGS:
            value = getattr(self, setting)
            if value is not None:
                found = _changed(found, setting, value)
        return found

    @property
    def known(self) -> Literal["known", "inferred"]:
        """`labels`, as a type checker wants it."""
        return "known" if self.labels == "known" else "inferred"

    def optional(self) -> set[str]:
        """The attacks that may be left out where they do not suit."""
        named = {one if isinstance(one, str) else one[0] for one in self.attacks}
        return set(self.find_attacks()) - (set() if self.fitting else named)

    def _named(self) -> list[str | tuple[str, Attack]]:
        """With what `auto` stands for, but for what is named beside it."""
        others = [one for one in self.attacks if one != AUTO]
        return (
            [*(name for name in automatic(self.acting) if name not in others), *others]
            if AUTO in self.attacks
            else others
        )

    def on(self, device: torch.device) -> "AuditJob":
        """With the chunks of this device."""
        return (
            self
            if self.victims_at_once
            else replace(self, victims_at_once=AT_ONCE.get(device.type, AT_ONCE["cpu"]))
        )

    def preparation(self) -> Callable[[Tensor, Generator], Tensor] | None:
        """What the defence does to images, as uint8."""
        return partial(_prepared, self.acting) if changes_images(self.acting) else None

    def settings(self) -> dict[str, Any]:
        """As plain values, for the JSON files."""
        plain: dict[str, Any] = {
            part.name: getattr(self, part.name) for part in fields(self)
        } | asdict(self.protocol)
        del plain["protocol"]
        attacks = {name: repr(attack) for name, attack in self.find_attacks().items()}
        defense = self.protection
        policy = (
            defense.policy if isinstance(defense, PolicyDefense) and defense.augment else Policy()
        )
        texts = {
            "policy": str(policy),
            "defense": str(defense),
            "checkpoint": self.checkpoint and str(self.checkpoint),
        }
        return plain | texts | {"attacks": attacks}


def changes_images(defense: Defense) -> bool:
    """Whether the images used are others than the client's own."""
    return any(part.acts_on == "batch" for part in defense.parts())


def _prepared(defense: Defense, images: Tensor, rng: Generator) -> Tensor:
    batch = Batch(images.float() / 255, torch.zeros(len(images), dtype=torch.long))
    return (defense.protect_batch(batch, rng).images * 255).round().to(torch.uint8)


def shortened(attack: Attack) -> Attack:
    """One iteration of it, to see whether it suits a model; an attack without iterations as it is."""
    for setting in SETTINGS:
        attack = _with(attack, setting, 1) if _has(attack, setting) else attack
    return attack


def _preset(name: str) -> Attack:
    if name not in PRESETS:
        raise unknown("attack", name, (*PRESETS, AUTO))
    return PRESETS[name]


def _changed(attacks: Mapping[str, Attack], setting: str, value: int) -> dict[str, Attack]:
    if not any(_has(attack, setting) for attack in attacks.values()):
        raise GradveilError(f"{setting} {value}: none of {', '.join(attacks)} has such a setting")
    return {
        name: _with(attack, setting, value) if _has(attack, setting) else attack
        for name, attack in attacks.items()
    }


def _has(attack: Attack, setting: str) -> bool:
    return is_dataclass(attack) and setting in {part.name for part in fields(attack)}


def _with(attack: Attack, setting: str, value: int) -> Attack:
    return replace(attack, **{setting: value})  # type: ignore[type-var]  # a dataclass, as `_has` made sure
