"""The result of a tuning: the attack with its gain, and the files it leaves."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from gradveil import __version__
from gradveil.attacks import GradientMatching
from gradveil.attacks.attack_files import FORMAT, attack_table, read_attack, read_attack_file
from gradveil.core.errors import GradveilError
from gradveil.core.files import remove_unfinished, shown, write_text
from gradveil.core.formats import (
    AttackFile,
    Compared,
    ImagesUsed,
    TunedTrial,
    TuningCost,
    TuningFile,
    TuningGain,
)
from gradveil.core.reading import check_format, read_json
from gradveil.core.toml import toml_lines, toml_list
from gradveil.stats import sign_test, signed_rank
from gradveil.tuning.job import ATTACK, RESULT

TUNING_FORMAT = "gradveil tuning 1"
DIGITS = 6  # of a mean: where a tuning was stopped can change the last bits of its figures
SURE = 0.05
MOST = 64 << 20  # bytes of tuning.json
HEADER = """\
# An attack tuned by `gradveil tune` on public images. To use it:
#   gradveil audit --attack {name} ...
#   gradveil.attacks.find("{name}")      in Python
# An audit refuses it where a victim is among the images that it was tuned on.
"""


def compare(tuned: Mapping[str, Sequence[float]], standard: Mapping[str, Sequence[float]]) -> Any:
    """Return line-up and SSIM of two attacks on the same updates, with one-sided p.

    For the line-up it is McNemar's exact test, for SSIM Wilcoxon's signed-rank test.
    """
    found = {}
    for name, test in (("lineup", sign_test), ("ssim", signed_rank)):
        pairs = list(zip(tuned[name], standard[name], strict=True))
        ours, theirs = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        p = test([tried - usual for tried, usual in pairs])
        found[name] = Compared(*(float(f"{value:.{DIGITS}g}") for value in (ours, theirs, p)))
    return found


@dataclass(frozen=True, eq=False)
class TuningResult:
    """A tuned attack, what it costs and gains, and every trial.

    `seconds` are those of an image, by `tuned` and `standard`. `file` has the tables of
    attack.toml.
    """

    out: Path
    settings: Mapping[str, Any]
    attack: GradientMatching
    file: AttackFile
    trials: tuple[TunedTrial, ...]
    best: int
    seconds: Mapping[str, float]
    notes: tuple[str, ...]
    study: str
    storage: str

    @property
    def gain(self) -> TuningGain:
        """What the attack gained over the standard attack, on images it was not tuned on."""
        return self.file.gain

    @property
    def drawn(self) -> Mapping[str, str | float]:
        """The settings of the best trial."""
        return next(trial.drawn for trial in self.trials if trial.number == self.best)

    @property
    def words(self) -> list[str]:
        """Say what the tuning came to."""
        gain, cost = self.gain, self.file.cost
        dropped = sum(trial.state == "dropped" for trial in self.trials)
        lineup, ssim = gain.lineup, gain.ssim
        better = [
            name
            for name, found in (("the line-up", lineup), ("SSIM", ssim))
            if found.p < SURE / 2 and found.tuned > found.standard
        ]
        verdict = (
            f"better in {' and '.join(better)}" if better else "no gain could be shown"
        )  # two tests at 2.5% each
        return [
            f"Trial {self.best} of {len(self.trials)} ({dropped} dropped early): "
            + ", ".join(
                f"{name} {value:.2g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in self.drawn.items()
            ),
            f"On {gain.n} images it was not tuned on, against the standard attack with as many "
            f"iterations: {verdict}.",
            f"Line-up (rank 1 of {gain.candidates}): {lineup.tuned:.1%} against "
            f"{lineup.standard:.1%}, p {lineup.p:.2g}.",
            f"SSIM: {ssim.tuned:.3f} against {ssim.standard:.3f}, p {ssim.p:.2g}.",
            f"Cost of an image: {cost.tuned:,} iterations against {cost.standard:,}, "
            f"{self.seconds['tuned']:.2g} s against {self.seconds['standard']:.2g}.",
            *self.notes,
        ]

    def __repr__(self) -> str:
        return "\n".join(self.words)

    def plain(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {
            "format": TUNING_FORMAT,
            "settings": dict(self.settings),
            "trials": to_builtins(self.trials),
            "best": self.best,
            "seconds": dict(self.seconds),
            "notes": list(self.notes),
            "study": self.study,
            "storage": self.storage,
        }

    def write(self) -> None:
        """Write both files. attack.toml comes last: where it is, everything is."""
        remove_unfinished(self.out, (".*.part",))
        write_text(self.out / RESULT, json.dumps(self.plain(), allow_nan=False) + "\n")
        write_text(self.out / ATTACK, attack_text(self.file, ATTACK))

    @classmethod
    def read(cls, out: Path) -> "TuningResult":
        """Read the folder of a tuning that has ended."""
        attack, file, path = read_attack(out / ATTACK), read_attack_file(out / ATTACK), out / RESULT
        try:
            found = read_json(path, TuningFile, most=MOST)
            check_format(found.format, TUNING_FORMAT, path)
            if found.best not in [trial.number for trial in found.trials]:
                raise GradveilError("best: expected the number of a trial")
            for name in ("tuned", "standard"):
                if name not in found.seconds:
                    raise GradveilError(f"seconds.{name}: missing")
        except GradveilError as error:
            problem = str(error).removeprefix(f"{shown(path)}: ")
            raise GradveilError(
                f"{shown(path)} is damaged ({problem}): delete it and {ATTACK}, and run the tuning "
                "again"
            ) from None
        return cls(
            out,
            found.settings,
            attack,
            file,
            tuple(found.trials),
            found.best,
            found.seconds,
            tuple(found.notes),
            found.study,
            found.storage,
        )


def make_file(
    attack: GradientMatching,
    settings: Mapping[str, Any],
    cost: TuningCost,
    gain: TuningGain,
    images: ImagesUsed,
) -> AttackFile:
    """Return the tables of attack.toml."""
    shown_frames = replace(attack, frames=GradientMatching.frames)
    return AttackFile(
        FORMAT, __version__, attack_table(shown_frames), dict(settings), cost, gain, images
    )


def attack_text(file: AttackFile, name: str) -> str:
    """Return the text of attack.toml."""
    plain = to_builtins(file)
    head = {"format": file.format, "gradveil": file.gradveil}
    parts = [HEADER.format(name=name) + toml_lines(head)]
    for table in ("attack", "tuning", "cost", "gain"):
        parts.append(f"[{table}]\n" + toml_lines(plain[table]))
    used = (toml_list(key, values) for key, values in plain["images"].items())
    return "\n".join([*parts, "[images]\n" + "".join(used)])
