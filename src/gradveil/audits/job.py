"""The job of an audit: its model, images, cases and attacks, and all settings of its result."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from gradveil.attacks import Attack, GradientMatching, find, names
from gradveil.attacks.base import check_attack, not_an_attack
from gradveil.attacks.presets import is_file, split_name
from gradveil.audits.attackers import (
    AUTO,
    LONGEST,
    automatic,
    find_automatic,
    on_equal_terms,
)
from gradveil.clients import Client
from gradveil.core.boundary import check_fields, check_shown
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.types import Protocol
from gradveil.data import Images
from gradveil.defenses import Defense
from gradveil.defenses.applied import check_defense
from gradveil.models import NormalizedName
from gradveil.models.factories import check_weights_exist
from gradveil.models.normalized import constants_setting, plain_name

LABELS = ("known", "inferred")
CLEAN = {"no": (False,), "yes": (True,), "both": (True, False)}
END = "end"
CHANGEABLE = ("steps", "restarts")
"""Settings of an attack that a job may change for all its attacks."""

VICTIMS_AT_ONCE = {"cpu": 16, "cuda": 100}
"""Victims attacked together: what a processor's cache and a GPU's memory take."""

TUNED = "tuned"  # the name of an attack.toml
LONGEST_FOLDER = 80  # letters of a case's folder


@dataclass(frozen=True)
class Case:
    """A defense on a set of weights: a row of the audit's table, with a folder for its records.

    `weights` is a checkpoint; None takes the model as it is, which is untrained where the model
    is given by name. `clean` leaves out what the defense does to gradients, as published
    evaluations did. `step` is the training step asked for, a number or `end`. `label` names the
    case where defense and step do not tell it from another. `control` is the text of the defense
    whose control it is, where it was added as one.
    """

    defense: Defense = field(default_factory=Defense)
    weights: Path | None = None
    clean: bool = False
    step: str | None = None
    label: str = ""
    control: str = ""

    @property
    def acting(self) -> Defense:
        """The part of the defense that acts on what is shared."""
        return self.defense.without_gradients() if self.clean else self.defense

    @property
    def before_gradients(self) -> Defense:
        """The part of the defense that acts before gradients are computed."""
        return self.defense.without_gradients()

    @property
    def changes_images(self) -> bool:
        """Whether the images used differ from those that the client has."""
        return self.acting.changes("batch")

    @property
    def folder(self) -> str:
        """The name of the case's folder."""
        parts = [slug(self.label) if self.label else slug(str(self.defense))]
        parts += ["clean"] if self.clean else []
        parts += [f"at-{self.step}"] if self.step else []
        name = "-".join(parts)
        if len(name) <= LONGEST_FOLDER:
            return name
        return f"{name[:LONGEST_FOLDER]}-{sha256(repr(self).encode()).hexdigest()[:8]}"

    def plain(self) -> dict[str, Any]:
        """Return the case as JSON has it."""
        plain = {
            "defense": str(self.defense),
            "checkpoint": self.weights and str(self.weights),
            "clean": self.clean,
            "step": self.step,
            "folder": self.folder,
        }
        return plain | ({"control": self.control} if self.control else {})


@dataclass(frozen=True, eq=False)
class AuditJob:
    """Attack `images` images of `data`, `batch_size` to a victim, in every case.

    They are drawn over all classes by the seed, or are those from `first` on; none of `apart` is
    drawn, images by their numbers that a score, a search or a tuning has used, and none of the
    images that a defense was `scored_on`.

    `model` is a module or its name, perhaps with a loader's normalization; `data` the images that
    victims are taken from, or the name of a data set, whose `split` is meant. `public` are images
    of the same kind that anyone may have, for blind guesses; a named data set has its training
    split. `channels` 3 makes gray images color, 1 the reverse. `attacks` are by name; with `auto`
    come the standard attack, those known to undo the case's defense and the exact one, as far as
    they suit. `steps` and `restarts` change every attack that has such a setting.
    `victims_at_once` fixes the chunks, and so the random numbers; None leaves it to the device.
    `positive` runs each attack that needs no defense also where it is known to work; `sham` runs
    the strongest attack also on updates of other images. `budget` are minutes that the attacks
    shall take at most: each then makes the same `share` of its iterations, which is measured where
    it is None.
    `recorded` turns each case's client into one whose updates are those of a server's record, and
    `note` says how an attacker takes these, where that is not exactly what they are, and which of
    them are not attacked.
    """

    model: nn.Module | str | NormalizedName
    data: Images | str
    attacks: Mapping[str, Attack] = field(default_factory=dict)
    auto: bool = False
    cases: tuple[Case, ...] = (Case(),)
    images: int = 1
    public: Images | None = None
    batch_size: int = 1
    steps: int | None = None
    restarts: int | None = None
    labels: str = "known"
    protocol: Protocol = field(default_factory=Protocol)
    split: str = "test"
    first: int | None = None
    apart: tuple[int, ...] = ()
    victims_at_once: int | None = None
    image_size: int | None = None
    channels: int | None = None
    positive: bool = True
    sham: bool = True
    budget: float | None = None
    share: float | None = None
    seed: int = 0
    recorded: Callable[[Client], Client] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise GradveilError(
                    f"{name.replace('_', ' ')} {value}: it must be at least {least}"
                )
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise GradveilError(f"budget {self.budget}: minutes must be above 0 and finite")
        if self.share is not None and not 0 < self.share <= 1:
            raise GradveilError(f"share {self.share}: of the iterations, above 0 and at most 1")
        if self.images % self.batch_size:
            raise GradveilError(
                f"{self.images} images in batches of {self.batch_size}: choose a multiple of the "
                "batch size"
            )
        if self.labels not in LABELS:
            raise unknown("labels", self.labels, LABELS)
        if not self.attacks and not self.auto:
            raise GradveilError("no attack was named: choose at least one")
        for name, attack in self.attacks.items():
            _check_name(name)
            check_attack(attack)
            check_shown(attack, "__repr__", "attack")
        if isinstance(self.model, nn.Module):
            check_weights_exist(self.model)
        self._check_cases()
        for case in self.cases:
            self.attacks_on(case)

    def _check_cases(self) -> None:
        if not self.cases:
            raise GradveilError("no defense was named: choose at least one, such as none")
        folders: dict[str, Case] = {}
        for case in self.cases:
            check_defense(case.defense)
            check_shown(case.defense, "__str__", "defense")
            other = folders.setdefault(case.folder, case)
            if other is case:
                continue
            if str(other.defense) == str(case.defense):
                raise GradveilError(f"defense {str(case.defense)!r} is named twice")
            raise GradveilError(
                f"defenses {other.defense} and {case.defense} would share the folder "
                f"{case.folder}; audit them one by one"
            )

    def attacks_on(self, case: Case, model: nn.Module | None = None) -> dict[str, Attack]:
        """Return the attacks on this case by name, with the job's steps and restarts.

        Those of `auto` come first, on equal terms; with a `model` they also undo the draws of its
        layers. One that is named too is the same attack, unless it has settings of its own.
        """
        chosen, own, drawn = dict(self.attacks), set(self.attacks), tuple[str, ...]()
        usual: dict[str, Attack] = {}
        if self.auto:
            drawn = automatic(case.acting, model, self.protocol.train_mode, self.batch_size)
            own -= {name for name in drawn if self.attacks.get(name) == find(name)}
            named = {name: attack for name, attack in self.attacks.items() if name in own}
            usual = find_automatic(drawn)
            chosen = usual | named
        for setting in CHANGEABLE:
            if (value := getattr(self, setting)) is not None:
                if not any(_has(attack, setting) for attack in chosen.values()):
                    names = ", ".join(chosen)
                    raise GradveilError(f"{setting} {value}: none of {names} has such a setting")
                chosen, usual = (_changed(some, setting, value) for some in (chosen, usual))
        if self.auto:
            chosen = on_equal_terms(chosen, own, own - {*drawn}, usual.values())
        return chosen if self.share is None else shorter(chosen, self.share)

    @property
    def known(self) -> Literal["known", "inferred"]:
        """`labels`, as a type checker wants it."""
        return "known" if self.labels == "known" else "inferred"

    @property
    def scored_on(self) -> frozenset[str]:
        """Short digests of the images that searches chose the defenses by."""
        return frozenset(digest for case in self.cases for digest in case.defense.scored_on)

    def on(self, device: torch.device) -> "AuditJob":
        """Return the job with the chunks that suit this device."""
        if self.victims_at_once:
            return self
        usual = VICTIMS_AT_ONCE.get(device.type, VICTIMS_AT_ONCE["cpu"])
        return replace(self, victims_at_once=usual)

    def settings(self) -> dict[str, Any]:
        """Return the settings that all cases have in common, as JSON has them."""
        left_out = {"attacks", "auto", "cases", "data", "model", "protocol", "public", "positive"}
        left_out |= {"recorded", "channels", "note"}
        left_out |= {"apart"}  # the images that were drawn have a digest
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        named = data_name(self.data), plain_name(self.model)
        plain |= constants_setting(self.model)
        plain |= {} if self.channels is None else {"channels": self.channels}
        plain |= {"scored": len(self.scored_on)} if self.scored_on else {}
        plain |= {"split": self.data.split} if isinstance(self.data, Images) else {}
        return plain | self.protocol.settings() | dict(zip(("data", "model"), named, strict=True))


LEAST = {
    "images": 1,
    "batch_size": 1,
    "first": 0,
    "victims_at_once": 1,
    "steps": 1,
    "restarts": 1,
}


def data_name(data: Images | str) -> str:
    """Return the name of a data set, given by name or as images."""
    return data if isinstance(data, str) else data.name


def slug(name: str) -> str:
    """Replace every letter that a file's name should not have by a dash."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name)


def name_attacks(
    attacks: Iterable[str | Attack | tuple[str, Attack]],
) -> tuple[bool, dict[str, Attack]]:
    """Return whether `auto` is among the attacks, and the others by name.

    A text is the name of a preset, `A+B` for several in one search, `package.module:NAME`, or the
    path of an attack file; an `attack.toml` is called tuned. An attack without a name takes that of
    the preset it was made from, or of its class.
    """
    auto, found, texts = False, dict[str, Attack](), dict[str, str]()
    for attack in attacks:
        if attack == AUTO:
            auto = True
            continue
        name, value = _named(attack)
        if name in found:
            if isinstance(attack, str) and texts.get(name, attack) != attack:
                raise GradveilError(
                    f"attacks {texts[name]} and {attack} would both be called {name}: rename a "
                    "file or a value, since its name is used"
                )
            raise GradveilError(f"attack {name!r} is named twice")
        found[name] = value
        texts |= {name: attack} if isinstance(attack, str) else {}
    return auto, found


def _named(attack: object) -> tuple[str, Attack]:
    match attack:
        case str():
            found = find(attack, also=(AUTO,))
            return short_name(attack), found
        case Attack():
            return _name_of(attack), attack
        case (str() as name, Attack() as value):
            return name, value
    raise not_an_attack(attack, "attacks", " or a pair of a name and an Attack")


def short_name(name: str) -> str:
    """Return what tables call the attack that `find` finds by this name.

    An attack of a user is called by its last name, a file by its stem.
    """
    return "+".join(map(_short_part, split_name(name)))


def _short_part(part: str) -> str:
    if not is_file(part):
        return part.rpartition(":")[2]
    stem = slug(Path(part).stem)
    return TUNED if stem == "attack" else stem


def _name_of(attack: Attack) -> str:
    """Name the preset that differs in steps, restarts or frames alone, else the class."""
    for name in names():
        preset = find(name)
        if type(preset) is type(attack) and _alike(preset, attack):
            return name
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(attack).__name__).lower()


def _alike(preset: Attack, attack: Attack) -> bool:
    assert is_dataclass(preset)
    kept = [f.name for f in fields(preset) if f.name not in (*CHANGEABLE, "frames")]
    return all(getattr(preset, name) == getattr(attack, name) for name in kept)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name) or len(name) > LONGEST:
        allowed = f"up to {LONGEST} letters, digits and any of . _ + -"
        raise GradveilError(f"attack name {name!r}: files are named after it; choose {allowed}")


def shorter(attacks: Mapping[str, Attack], share: float) -> dict[str, Attack]:
    """Return the attacks with this share of their iterations, at least one each."""
    return {
        name: replace(attack, steps=max(1, math.floor(attack.steps * share)))
        if isinstance(attack, GradientMatching)
        else attack
        for name, attack in attacks.items()
    }


def shortened(attack: Attack) -> Attack:
    """Return the attack with a single iteration, to see whether it suits the model."""
    for setting in CHANGEABLE:
        attack = _with(attack, setting, 1) if _has(attack, setting) else attack
    return attack


def _changed(attacks: Mapping[str, Attack], setting: str, value: int) -> dict[str, Attack]:
    return {
        name: _with(attack, setting, value) if _has(attack, setting) else attack
        for name, attack in attacks.items()
    }


def _has(attack: Attack, setting: str) -> bool:
    return is_dataclass(attack) and setting in {f.name for f in fields(attack)}


def _with(attack: Attack, setting: str, value: int) -> Attack:
    return replace(attack, **{setting: value})  # type: ignore[type-var]  # `_has` made sure


def make_cases(
    defenses: Sequence[Defense],
    *,
    checkpoints: Mapping[str, Path] | None = None,
    runs: Mapping[str, Path] | None = None,
    at: Sequence[str] = (),
    clean: str = "no",
) -> tuple[Case, ...]:
    """Return the cases of some defenses, in order.

    `checkpoints` are by the defense's text, and under "" for all others; `runs` likewise are
    folders of trainings whose weights after the steps `at` are audited. `clean`: no, yes, or both
    for two cases of each defense that acts on gradients.
    """
    checkpoints, runs = checkpoints or {}, runs or {}
    if clean not in CLEAN:
        raise unknown("clean", clean, CLEAN)
    if bool(at) != bool(runs):
        given, absent = ("at", "run") if at else ("run", "at")
        raise GradveilError(
            f"--{given} without --{absent}: steps are those of a training's folder; give both"
        )
    if at and checkpoints:
        raise GradveilError(
            "--checkpoint and --at: the checkpoints are those of the training; give one of them"
        )
    found = []
    for defense in defenses:
        text = check_shown(defense, "__str__", "defense")
        acts_on_gradients = str(defense.without_gradients()) != text
        for cleaned in CLEAN[clean] if acts_on_gradients else (False,):
            if at:
                run = runs.get(text, runs.get(""))
                found += [Case(defense, saved(run, text, s), cleaned, s) for s in at]
            else:
                path = checkpoints.get(text, checkpoints.get(""))
                found.append(Case(defense, path, cleaned))
    return tuple(found)


def with_controls(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return the cases, and last the controls of their defenses that are not among them.

    A control has the weights of the case it stands beside, and serves all cases of these weights.
    """
    there = {(str(case.defense), case.step) for case in cases}
    added: dict[tuple[str, str | None, bool, Path | None], Case] = {}
    for case in cases:
        control = case.defense.control
        if control is None or (str(control), case.step) in there:
            continue
        clean = case.clean and str(control.without_gradients()) != str(control)
        key = str(control), case.step, clean, case.weights
        made = Case(control, case.weights, clean, case.step, control=str(case.defense))
        added.setdefault(key, made)
    several = Counter(key[:3] for key in added)
    labelled = [
        replace(case, label=f"{case.defense} beside {case.control}")
        if several[key[:3]] > 1
        else case
        for key, case in added.items()
    ]
    return (*cases, *labelled)


def controls_in_words(cases: Sequence[Case], left_out_by: str) -> str:
    """Say which controls were added, and what leaves them out; empty without any."""
    said = dict.fromkeys(f"{case.defense} beside {case.control}" for case in cases if case.control)
    if not said:
        return ""
    return f"added as control: {', '.join(said)} (without: {left_out_by})"


def saved(run: Path | None, defense: str, step: str) -> Path:
    """Return the path of the weights that a training saved after this step, a number or `end`."""
    from gradveil.training.job import FINAL, STEPS, step_path

    if run is None:
        raise GradveilError(
            f"defense {defense}: no --run was given for it; give --run {defense}=FOLDER, or one "
            "for all"
        )
    path = run / FINAL if step == END else step_path(run, int(step))
    if not path.is_file():
        files = sorted((run / STEPS).glob("step-*.safetensors"))
        there = [str(int(file.stem.removeprefix("step-"))) for file in files]
        there += [END] if (run / FINAL).is_file() else []
        has = f"it has {', '.join(there)}" if there else "it holds no weights"
        raise GradveilError(f"step {step}: {run} has not saved it: {has}; train with --save-at")
    return path
