"""Results of an audit: its cases, their records, and a row for each attack and control."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from gradveil.audits.model import ModelFacts, read_facts
from gradveil.audits.records import RECORDS, Record, images_path, load_images, read_records
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.formats import AuditSettings, CaseSettings
from gradveil.core.job_folder import Kind
from gradveil.core.text import SafeConsole, printable
from gradveil.stats import Summary, Verdict, better_than_blind, can_tell, clopper_pearson, summary

FORMAT = "gradveil audit 2"
AUDIT = Kind("an audit", "audit", format=FORMAT, schema=AuditSettings)
CASE = Kind("a case of an audit", "case of an audit", format=FORMAT, schema=CaseSettings)
TRUTHS = ("used", "original")
NO_BETTER = "no better than blind"
TOO_FEW = "too few to tell"
MEASURES = ("psnr", "over_blind", "ssim", "psnr_affine", "mse")
COLUMNS = ("defense", "attack", "n", "PSNR dB", "over blind", "SSIM", "identified", "")


@dataclass(frozen=True)
class Row:
    """The summaries of an attack or control against one truth.

    n counts the failed images too; the summaries are of those that did not fail.
    """

    kind: str
    attack: str
    truth: str
    n: int
    failed: int
    psnr: Summary
    over_blind: Summary
    ssim: Summary
    psnr_affine: Summary
    mse: Summary
    identified: int
    identified_bounds: tuple[float, float]  # exact, 95%
    candidates: int
    labels_right: int | None  # None where it names no labels
    seconds: float
    verdict: Verdict

    @property
    def doubt(self) -> str | None:
        """Why the row shows no leak: `NO_BETTER`, `TOO_FEW`, or None where it shows one."""
        if self.verdict.better:
            return None
        return NO_BETTER if can_tell(self.n, self.verdict.chance) else TOO_FEW

    @property
    def flags(self) -> tuple[str, ...]:
        """The row's warnings: no better than blind or too few to tell; the images that failed."""
        flags = [] if self.kind == "blind" or self.doubt is None else [self.doubt]
        return (*flags, f"{self.failed} failed") if self.failed else tuple(flags)

    def plain(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return asdict(self) | {"flags": list(self.flags)}


@dataclass(frozen=True)
class CaseResult:
    """A case of an audit: its folder, settings and records, and the facts of its model."""

    out: Path
    settings: Mapping[str, Any]
    records: tuple[Record, ...]
    model: ModelFacts | None

    @classmethod
    def read(cls, out: Path) -> "CaseResult":
        """Read a case's folder, whole or not."""
        records = tuple(read_records(out / RECORDS))
        return cls(out, CASE.read(out), records, read_facts(out))

    @property
    def defense(self) -> str:
        """The defense, as text."""
        return str(self.settings["defense"])

    @property
    def clean(self) -> bool:
        """Whether the clean gradient was attacked, the defense acting in training only."""
        return bool(self.settings["clean"])

    @property
    def asked_step(self) -> str | None:
        """The training step that was asked for: a number or `end`; None where none was."""
        step = self.settings["step"]
        return None if step is None else str(step)

    @property
    def step(self) -> int | None:
        """The training step of the weights; None where it is not known."""
        if self.asked_step is not None and self.asked_step.isdecimal():
            return int(self.asked_step)
        return None if self.model is None else self.model.step

    @property
    def trained_so(self) -> ModelFacts | None:
        """The facts of the model, where it was trained under the same defense."""
        known = self.model
        return known if known is not None and known.under == self.defense else None

    @property
    def name(self) -> str:
        """The case on one line: defense, clean gradient, step."""
        parts = [self.defense, *(["clean gradient"] if self.clean else [])]
        if (asked := self.asked_step) is not None:
            known = f" ({self.step})" if not asked.isdecimal() and self.step is not None else ""
            parts.append(f"step {asked}{known}")
        return ", ".join(parts)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Attacks, blind and positive controls, against the images used, then the originals."""
        kinds = ("attack", "blind", "positive")
        names = dict.fromkeys((r.kind, r.attack) for kind in kinds for r in self.of(kind))
        return tuple(
            make_row(self.of(kind, name), truth) for truth in TRUTHS for kind, name in names
        )

    @property
    def truths(self) -> tuple[str, ...]:
        """The truths that differ: both where the defense changes images, else `used`."""
        return TRUTHS if self.settings["changes_images"] else TRUTHS[:1]

    @property
    def strongest(self) -> Row:
        """The attack that identifies most images, against either truth.

        Of equal ones it is that with the most dB over blind.
        """
        rows = [row for row in self.rows if row.kind == "attack" and row.truth in self.truths]
        if not rows:
            raise GradveilError(
                f"{self.out} holds no attacked image yet: run the same command again"
            )
        return max(rows, key=_strength)

    def of(self, kind: str, attack: str | None = None) -> list[Record]:
        """Return the records of this kind, and of this attack."""
        return [r for r in self.records if r.kind == kind and attack in (None, r.attack)]

    def images(self, attack: str) -> dict[str, Tensor]:
        """Return original, used and found images of an attack, (n, C, H, W) in [0, 1]."""
        names = dict.fromkeys(record.attack for record in self.of("attack"))
        if attack not in names:
            raise unknown("attack", attack, names)
        chunks = sorted({record.chunk for record in self.of("attack", attack)})
        files = [load_images(images_path(self.out, "attack", attack, c))[0] for c in chunks]
        return {
            name: torch.cat([tensors[name] for tensors in files]).float() / 255
            for name in ("original", "used", "found")
        }

    def plain(self) -> dict[str, Any]:
        """Return the case as JSON has it; `strongest` is the defense's result."""
        return {
            "defense": self.defense,
            "checkpoint": self.settings["checkpoint"],
            "clean": self.clean,
            "step": self.asked_step,
            "folder": self.out.name,
            "trained": self.model and asdict(self.model),
            "strongest": self.strongest.plain(),
            "rows": [row.plain() for row in self.rows],
            "knows": self.settings["knows"],
            "left_out": self.settings["left_out"],
        }


@dataclass(frozen=True)
class AuditResult:
    """An audit: its folder, its settings, and its cases in order. It shows itself as a table."""

    out: Path
    settings: Mapping[str, Any]
    cases: tuple[CaseResult, ...]

    @classmethod
    def read(cls, out: str | Path) -> "AuditResult":
        """Read an audit's folder; cases that were not begun are left out."""
        folder = Path(out)
        settings = AUDIT.read(folder)
        named = [folder / str(case["folder"]) for case in settings["cases"]]
        done = [path for path in named if (path / RECORDS).is_file()]
        return cls(folder, settings, tuple(map(CaseResult.read, done)))

    @property
    def baselines(self) -> dict[str | None, ModelFacts]:
        """The models trained and audited without a defense, by the step asked for."""
        return {
            case.asked_step: case.trained_so
            for case in self.cases
            if case.defense == "none" and case.trained_so is not None
        }

    def case(self, defense: str, *, clean: bool = False, step: str | None = None) -> CaseResult:
        """Return the case of this defense."""
        for case in self.cases:
            if (case.defense, case.clean, case.asked_step) == (defense, clean, step):
                return case
        raise unknown("case", defense, (case.name for case in self.cases))

    def images(self, attack: str, defense: object = None) -> dict[str, Tensor]:
        """Return original, used and found images of an attack, (n, C, H, W) in [0, 1].

        They are those of the first case, or of the case of a defense.
        """
        if not self.cases:
            raise GradveilError(f"{self.out} holds no case yet: run the same command again")
        return (self.cases[0] if defense is None else self.case(str(defense))).images(attack)

    def plain(self) -> list[dict[str, Any]]:
        """Return the cases as JSON has them."""
        return [case.plain() for case in self.cases]

    def to_pandas(self) -> Any:
        """Return a data frame with a line for each case, attack or control, and truth."""
        try:
            import pandas
        except ImportError:
            raise GradveilError("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame([*self._flat()])

    def _flat(self) -> Iterator[dict[str, Any]]:
        for case in self.cases:
            for row in case.rows:
                if row.truth in case.truths:
                    yield {
                        "defense": case.defense,
                        "clean": case.clean,
                        "step": case.step,
                        "kind": row.kind,
                        "attack": row.attack,
                        "truth": row.truth,
                        "n": row.n,
                        "failed": row.failed,
                        **{name: getattr(row, name).mean for name in MEASURES},
                        **{f"{name}_std": getattr(row, name).std for name in MEASURES},
                        "identified": row.identified,
                        "identified_low": row.identified_bounds[0],
                        "identified_high": row.identified_bounds[1],
                        "candidates": row.candidates,
                        "better_than_blind": row.verdict.better,
                    }

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for case in self.cases:
            for row in case.rows:
                if row.truth == TRUTHS[0]:
                    name = f"positive: {row.attack}" if row.kind == "positive" else row.attack
                    mean = "-" if row.psnr.mean is None else f"{row.psnr.mean:.2f}"
                    spread = "" if row.psnr.std is None else f" ± {row.psnr.std:.2f}"
                    over = "-" if row.over_blind.mean is None else f"{row.over_blind.mean:+.1f}"
                    like = "-" if row.ssim.mean is None else f"{row.ssim.mean:.3f}"
                    share = f"{row.identified}/{row.n}"
                    flags = ", ".join(row.flags)
                    yield case.name, name, str(row.n), mean + spread, over, like, share, flags

    def __rich__(self) -> Table:
        facts = f"{self.settings['model']} on {self.settings['data']}"
        title = Text(printable(f"{facts}, seed {self.settings['seed']}"), overflow="fold")
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(COLUMNS):
            if number in (0, 1, 7):  # names go on in the next line: cut, two could look alike
                table.add_column(column, overflow="fold")
            else:
                table.add_column(column, justify="right", no_wrap=True)
        for cells in self._cells():
            # Names are a user's: they are no markup, and no codes that a terminal obeys.
            table.add_row(*(Text(printable(cell)) for cell in cells))
        return table

    def __str__(self) -> str:
        console = SafeConsole(width=110, color_system=None)
        with console.capture() as text:
            console.print(self.__rich__())
        return text.get()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
        lines = (
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
            for cells in self._cells()
        )
        return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _strength(row: Row) -> tuple[float, float]:
    over = row.over_blind.mean
    return row.identified / row.n, -math.inf if over is None else over


def make_row(records: Sequence[Record], truth: str) -> Row:
    """Summarize the records of an attack or control against one truth."""
    good = [record.scores[truth] for record in records if record.ok]
    columns = {name: [scores[name] for scores in good] for name in MEASURES}
    hits = sum(int(scores["identified"]) for scores in good)
    n, first = len(records), records[0]
    named = [r.label_found == r.label for r in records if r.label_found is not None]
    over, chance = columns["over_blind"], first.chance[truth]
    return Row(
        kind=first.kind,
        attack=first.attack,
        truth=truth,
        n=n,
        failed=n - len(good),
        **{name: summary(values, high_leaks=name != "mse") for name, values in columns.items()},
        identified=hits,
        identified_bounds=clopper_pearson(hits, n),
        candidates=first.candidates,
        labels_right=sum(named) if named else None,
        seconds=sum(record.seconds for record in records),
        verdict=better_than_blind(over, hits, n, first.candidates, chance=chance),
    )
