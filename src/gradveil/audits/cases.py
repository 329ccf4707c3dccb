"""The cases of a grid: each defence, on the shared or on the clean gradient, on one model or on those of several training steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from gradveil.audits.folders import slug
from gradveil.audits.jobs import AuditJob
from gradveil.core.errors import GradveilError, unknown
from gradveil.defenses import parse

CLEAN = {"no": (False,), "yes": (True,), "both": (True, False)}
END = "end"
LONGEST = 80  # letters of a folder's name


@dataclass(frozen=True)
class Case:
    """One audit of a grid, into the folder of this name."""

    defense: str
    clean: bool
    step: str | None  # as asked for: a number, or end
    checkpoint: Path | None

    @property
    def folder(self) -> str:
        name = (
            slug(self.defense)
            + ("-clean" if self.clean else "")
            + (f"-at-{self.step}" if self.step else "")
        )
        return (
            name
            if len(name) <= LONGEST
            else f"{name[:LONGEST]}-{sha256(repr(self).encode()).hexdigest()[:8]}"
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {part.name: getattr(self, part.name) for part in fields(self)} | {
            "checkpoint": self.checkpoint and str(self.checkpoint)
        }


@dataclass(frozen=True)
class GridJob:
    """`base` says what all audits have in common, its attacks too; each defence takes its place in turn.

    `checkpoints` are by defence, and under "" for all others; `runs` likewise are folders of trainings, for `at`: the steps to audit,
    as text, `end` being the whole training. `clean`: no, yes, or both for two rows of each defence that acts on gradients.
    """

    base: AuditJob
    defenses: tuple[str, ...]
    checkpoints: Mapping[str, Path]
    runs: Mapping[str, Path]
    at: tuple[str, ...] = ()
    clean: str = "no"

    def __post_init__(self) -> None:
        if self.base.protection.parts() or self.base.clean or self.base.checkpoint:
            raise GradveilError(
                "the base of a grid has a defense or checkpoint of its own: give them to the grid"
            )
        if not self.defenses:
            raise GradveilError("no defense was named: choose at least one, such as none")
        if self.clean not in CLEAN:
            raise unknown("clean", self.clean, CLEAN)
        texts = canonical(self.defenses)
        for text in texts:
            if texts.count(text) > 1:
                raise GradveilError(f"defense {text!r} is named twice")
        if bool(self.at) != bool(self.runs):
            given, absent = ("at", "run") if self.at else ("run", "at")
            raise GradveilError(
                f"--{given} without --{absent}: steps are those of a training's folder; give both"
            )
        if len({slug(text) for text in texts}) < len(texts):
            raise GradveilError(
                f"defenses {', '.join(texts)}: two of them would share one folder; audit them one by one"
            )
        if self.at and self.checkpoints:
            raise GradveilError(
                "--checkpoint and --at: the checkpoints are those of the training; give one of them"
            )

    def cases(self) -> list[Case]:
        found = []
        for text in canonical(self.defenses):
            changed = str(parse(text).without_gradients()) != text
            for clean in CLEAN[self.clean] if changed else (False,):
                if self.at:
                    found += [Case(text, clean, step, self._saved(text, step)) for step in self.at]
                else:
                    found.append(
                        Case(
                            text, clean, None, self.checkpoints.get(text, self.checkpoints.get(""))
                        )
                    )
        return found

    def job(self, case: Case, positive: bool) -> AuditJob:
        """Attacks that do not suit a defence are left out, with the reason: the other defences have the same list."""
        return replace(
            self.base,
            defense=case.defense,
            clean=case.clean,
            checkpoint=case.checkpoint,
            fitting=True,
            positive=positive,
        )

    def settings(self) -> dict[str, Any]:
        """As plain values, for the JSON files."""
        plain = self.base.settings()
        attacks = [
            one if isinstance(one, str) else f"{one[0]}: {one[1]!r}" for one in self.base.attacks
        ]
        for key in ("policy", "defense", "clean", "checkpoint", "fitting", "positive"):
            del plain[key]
        return plain | {"attacks": attacks, "cases": [case.plain() for case in self.cases()]}

    def _saved(self, defense: str, step: str) -> Path:
        from gradveil.training.job import (  # Lightning takes seconds to import
            FINAL,
            STEPS,
            step_path,
        )

        run = self.runs.get(defense, self.runs.get(""))
        if run is None:
            raise GradveilError(
                f"defense {defense}: no --run was given for it; give --run {defense}=FOLDER, or one for all"
            )
        path = run / FINAL if step == END else step_path(run, int(step))
        if not path.is_file():
            there = [
                str(int(one.stem.removeprefix("step-")))
                for one in sorted((run / STEPS).glob("step-*.safetensors"))
            ]
            there += [END] if (run / FINAL).is_file() else []
            has = (
                f"it has {', '.join(there)}; train with --save-at"
                if there
                else "it holds no weights; train with --save-at"
            )
            raise GradveilError(f"step {step}: {run} has not saved it: {has}")
        return path


def canonical(defenses: Sequence[str]) -> list[str]:
    """As `str` of a defence writes them; an error for one that cannot be."""
    return [str(parse(text)) for text in defenses]


def parse_steps(text: str) -> tuple[str, ...]:
    """From `0,1,10,end`, in order and without repeats."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for part in parts:
        if part != END and not (part.isdecimal() and part.isascii()):
            raise GradveilError(
                f"at {text!r}: {part!r} is no step; write whole numbers with commas and end, such as 0,1,10,end"
            )
    numbers = sorted({int(part) for part in parts if part != END})
    return (*map(str, numbers), *([END] if END in parts else []))


def parse_paths(values: Sequence[str], defenses: Sequence[str], option: str) -> dict[str, Path]:
    """From PATH, for all, and DEFENSE=PATH, where a defence's own text may hold `=` too."""
    found: dict[str, Path] = {}
    for value in values:
        key, path = _split(value, canonical(defenses), option)
        if key in found:
            raise GradveilError(
                f"--{option} was given twice for {key or 'all defenses'}: {found[key]} and {path}"
            )
        found[key] = path
    return found


def _split(value: str, defenses: Sequence[str], option: str) -> tuple[str, Path]:
    for position in (number for number, letter in enumerate(value) if letter == "="):
        try:
            (text,) = canonical([value[:position]])
        except GradveilError:
            continue
        if text in defenses:
            return text, Path(value[position + 1 :])
        if not Path(value).exists():
            raise GradveilError(
                f"--{option} {value}: {text} is not among the defenses audited, {', '.join(defenses)}"
            )
    return "", Path(value)
