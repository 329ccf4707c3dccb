"""Results of an audit: its cases, their records, and a row for each attack and control."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from gradveil.audits.model import ModelFacts, read_facts
from gradveil.audits.records import (
    RECORDS,
    Record,
    by_update,
    images_path,
    load_images,
    read_records,
)
from gradveil.audits.victims import mixed_classes, passed_over_words
from gradveil.controls import TRUTHS
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.formats import AuditSettings, CaseSettings
from gradveil.core.job_folder import Kind
from gradveil.core.text import SafeConsole, html_table, on_one_line
from gradveil.defenses import REGISTRY
from gradveil.defenses.chain import THEN
from gradveil.stats import (
    EACH,
    Summary,
    Verdict,
    can_tell,
    holm,
    share_of_updates,
    signed_rank,
    summary,
)

FORMAT = "gradveil audit 3"
OLDER = ("gradveil audit 2",)  # read, and never written or gone on with
AUDIT = Kind("an audit", "audit", format=FORMAT, older=OLDER, schema=AuditSettings)
CASE = Kind(
    "a case of an audit", "case of an audit", format=FORMAT, older=OLDER, schema=CaseSettings
)
NO_BETTER = "no better than blind"
TOO_FEW = "too few to tell"
MEASURES = ("psnr", "over_blind", "ssim", "psnr_affine", "mse")
COLUMNS = ("defense", "attack", "n", "line-up", "95%", "PSNR dB", "over blind", "SSIM", "")
KINDS = ("attack", "blind", "bar", "ceiling", "sham", "positive")
TESTED = ("attack", "sham", "positive")
"""Kinds of rows whose p-values are printed, and so count as tests."""

JUDGED = ("attack", "positive")
REASONS, LONGEST = 2, 200  # of failed images: how many are told, and with how many characters
LEVEL = 0.05
WRONG = 1e-9  # mean squared error of an image above which a pixel is off by more than rounding


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
    identified: int  # images with rank 1 in their line-up
    identified_bounds: tuple[float, float]  # 95%
    top5: int | None  # images with rank 5 or better; None in records of format 2
    percentile: float | None  # mean of the ranks over the number of candidates
    candidates: int  # of each line-up; 0 where there is none
    labels_right: int | None  # None where it names no labels
    seconds: float
    verdict: Verdict
    certain: int | None = None  # images that the attack calls exact; None where it makes no claim
    certain_wrong: int = 0  # of these, those with a wrong pixel
    reasons: tuple[tuple[str, int], ...] = ()  # why images failed, and how many; the most first
    updates: int = 1  # that the n images were shared in; each counts once in the tests
    largest_update: int = 1  # images of the largest of them

    @property
    def title(self) -> str:
        """The attack or control, with its kind where the name does not say it."""
        known = self.kind in (*PLAIN, self.attack)
        return self.attack if known else f"{self.kind}: {self.attack}"

    @property
    def doubt(self) -> str | None:
        """Why the row shows no leak: `NO_BETTER`, `TOO_FEW`, or None where it shows one."""
        if self.verdict.better:
            return None
        chance, tests = self.verdict.chance, self.verdict.tests
        told = can_tell(self.updates, chance, self.largest_update, tests)
        return NO_BETTER if told else TOO_FEW

    @property
    def flags(self) -> tuple[str, ...]:
        """The row's warnings: no better than blind or too few to tell; the images that failed."""
        flags = [] if self.kind not in JUDGED or self.doubt is None else [self.doubt]
        return (*flags, f"{self.failed} failed") if self.failed else tuple(flags)

    @property
    def failures(self) -> str:
        """How many images failed and why, such as `8 failed: no unit …`; empty where none did."""
        said = [f"{count} failed: {_short(reason)}" for reason, count in self.reasons[:REASONS]]
        others = self.failed - sum(count for _, count in self.reasons[:REASONS])
        return "; ".join([*said, f"{others} failed for other reasons"] if others else said)

    @property
    def lineup(self) -> str:
        """Rank 1 as `3/8`, or a dash where there is no line-up."""
        return f"{self.identified}/{self.n}" if self.candidates else "-"

    @property
    def interval(self) -> str:
        """The 95% interval of rank 1 as `12-37%`, or a dash where there is no line-up."""
        low, high = self.identified_bounds
        return f"{100 * low:.0f}-{100 * high:.0f}%" if self.candidates else "-"

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
    others: tuple[float, ...] = ()
    """The p-values of the audit's other cases, and of tests beside the audit, for which those of
    this case are corrected."""
    cases: int = 1
    """The cases of the audit, this one included, for which the bounds of a certificate are."""

    @classmethod
    def read(cls, out: Path) -> "CaseResult":
        """Read a case's folder, whole or not."""
        records = tuple(read_records(out / RECORDS))
        return cls(out, CASE.read(out), records, read_facts(out), cases=_count_cases(out))

    def beside(self, p_values: Sequence[float]) -> "CaseResult":
        """Return the case with its p-values corrected for these too, of tests made beside it."""
        corrected = replace(self, others=(*self.others, *p_values))
        vars(corrected)["_rows"] = self._rows  # slow to make, and the same for both
        return corrected

    @property
    def defense(self) -> str:
        """The defense, as text."""
        return str(self.settings["defense"])

    @property
    def control(self) -> str:
        """The defense that it is the control of, as text, where it was added as one."""
        return str(self.settings.get("control", ""))

    @property
    def comes_with(self) -> str:
        """The control of its defense, as text: what a policy comes with; empty where it is none."""
        return str(self.settings.get("comes_with") or "")

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
        """The case on one line: defense, what it is a control of, clean gradient, step."""
        parts = [self.defense, *([f"control of {self.control}"] if self.control else [])]
        parts += ["clean gradient"] if self.clean else []
        if (asked := self.asked_step) is not None:
            known = "" if self.step is None else f" ({self.step})"
            parts.append(f"step {asked}" if asked.isdecimal() else f"last step{known}")
        return ", ".join(parts)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Attacks and controls of every kind, against the images used, then the originals."""
        made, p_values = self._rows, [*self.p_values, *self.others]
        adjusted = dict(zip(self._tests, holm(p_values), strict=False))
        return tuple(
            replace(row, verdict=_judged(row, adjusted, len(p_values), self.truths)) for row in made
        )

    @cached_property
    def _rows(self) -> tuple[Row, ...]:
        names = dict.fromkeys((r.kind, r.attack) for kind in KINDS for r in self.of(kind))
        return tuple(
            make_row(self.of(kind, name), truth) for truth in TRUTHS for kind, name in names
        )

    @property
    def _tests(self) -> list[tuple[str, str, str, str]]:
        """The tests of this case: kind, attack, truth, and which p-value."""
        return [
            (row.kind, row.attack, row.truth, test)
            for row in self._rows
            if row.kind in TESTED and row.truth in self.truths
            for test in P_VALUES
            if row.candidates or test != "p_identified"
        ]

    @property
    def p_values(self) -> list[float]:
        """The p-values of this case, as they are before any correction."""
        rows = {(row.kind, row.attack, row.truth): row for row in self._rows}
        return [
            float(getattr(rows[kind, attack, truth].verdict, test))
            for kind, attack, truth, test in self._tests
        ]

    def class_of(self, label: int) -> str:
        """Return the name of a class; where it has none, its number."""
        names: Mapping[str, str] = self.settings.get("class_names") or {}
        return names.get(str(label), str(label))

    @property
    def classes(self) -> str:
        """The mix of classes of the images attacked, in words."""
        labels = {record.image: record.label for record in self.records}
        return mixed_classes([*labels.values()])

    @property
    def passed_over(self) -> str:
        """Which classes were too small to draw images of, in words; empty where none was."""
        classes: Mapping[str, int] = self.settings.get("passed_over") or {}
        return passed_over_words(classes) if classes else ""

    @property
    def note(self) -> str:
        """How recorded updates are taken, and which are not attacked; empty where all is exact."""
        return self.settings.get("note") or ""

    @property
    def classes_in_full(self) -> str:
        """The mix of classes, and which were too small to draw images of, in words."""
        return "; ".join(words for words in (self.classes, self.passed_over) if words)

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

    @property
    def breakers_not_run(self) -> tuple[str, ...]:
        """The attacks known to break the case's defense that were neither run nor left out.

        The defense is looked up by its name: its text is a file's, and so is never parsed.
        """
        if self.clean:
            return ()
        names = *(record.attack for record in self.of("attack")), *self.settings["left_out"]
        run = {part for name in names for part in str(name).split("+")}
        known: dict[str, None] = {}
        for text in self.defense.split(THEN):
            name = text.strip().partition(":")[0]
            policy = name[:1].isdecimal() or "(" in name  # such as 3-1-7, or translate_x(9)
            kind = REGISTRY.get("policy" if policy else name)
            known |= dict.fromkeys(() if kind is None else kind.breakers)
        return tuple(name for name in known if name not in run)

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
            "control": self.control or None,
            "clean": self.clean,
            "step": self.asked_step,
            "folder": self.out.name,
            "trained": self.model and asdict(self.model),
            "strongest": self.strongest.plain(),
            "rows": [row.plain() for row in self.rows],
            "passed_over": dict(self.settings.get("passed_over") or {}),
            **({"note": self.note} if self.note else {}),
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
        cases = [*map(CaseResult.read, done)]
        tests = [case.p_values for case in cases]
        for number, case in enumerate(cases):
            others = [p for k, some in enumerate(tests) if k != number for p in some]
            cases[number] = case.beside(others)
        return cls(folder, settings, tuple(cases))

    def beside(self, p_values: Sequence[float]) -> "AuditResult":
        """Return the audit with its p-values corrected for these too, of tests made beside it."""
        return replace(self, cases=tuple(case.beside(p_values) for case in self.cases))

    @property
    def count(self) -> int:
        """The number of cases of the audit, also of those that were not begun."""
        return max(len(self.cases), len(self.settings.get("cases", ())))

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
        return pandas.DataFrame([*self.flat()])

    def flat(self) -> Iterator[dict[str, Any]]:
        """Give the lines of `to_pandas`, of audit.csv and of the page's table, as plain values."""
        for case in self.cases:
            strongest = case.strongest if case.of("attack") else None
            for row in case.rows:
                if row.truth in case.truths:
                    yield {
                        "defense": case.defense,
                        "clean": case.clean,
                        "step": case.step,
                        "folder": case.out.name,
                        "accuracy": None if case.model is None else case.model.accuracy,
                        "kind": row.kind,
                        "attack": row.attack,
                        "truth": row.truth,
                        "strongest": row is strongest,
                        "n": row.n,
                        "failed": row.failed,
                        **{name: getattr(row, name).mean for name in MEASURES},
                        **{f"{name}_std": getattr(row, name).std for name in MEASURES},
                        "identified": row.identified,
                        "identified_low": row.identified_bounds[0],
                        "identified_high": row.identified_bounds[1],
                        "top5": row.top5,
                        "percentile": row.percentile,
                        "candidates": row.candidates,
                        "chance": row.verdict.chance if row.candidates else None,
                        "p_identified": row.verdict.p_identified,
                        "p_over_blind": row.verdict.p_over_blind,
                        "better_than_blind": row.verdict.better,
                        "flags": "; ".join(row.flags),
                    }

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for case in self.cases:
            for row in case.rows:
                if row.truth == TRUTHS[0]:
                    mean = "-" if row.psnr.mean is None else f"{row.psnr.mean:.2f}"
                    spread = "" if row.psnr.std is None else f" ± {row.psnr.std:.2f}"
                    over = "-" if row.over_blind.mean is None else f"{row.over_blind.mean:+.1f}"
                    like = "-" if row.ssim.mean is None else f"{row.ssim.mean:.3f}"
                    flags = ", ".join(row.flags)
                    figures = row.lineup, row.interval, mean + spread, over, like
                    yield case.name, row.title, str(row.n), *figures, flags

    def __rich__(self) -> Table:
        facts = f"{self.settings['model']} on {self.settings['data']}"
        title = Text(on_one_line(f"{facts}, seed {self.settings['seed']}"), overflow="fold")
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(COLUMNS):
            # Names go on in the next line: cut, two could look alike.
            if number in (0, 1, len(COLUMNS) - 1):
                table.add_column(column, overflow="fold")
            else:
                table.add_column(column, justify="right", no_wrap=True)
        for cells in self._cells():
            # Names are a user's: they are no markup, and no codes that a terminal obeys.
            table.add_row(*(Text(on_one_line(cell)) for cell in cells))
        return table

    def __str__(self) -> str:
        console = SafeConsole(width=110, color_system=None)
        with console.capture() as text:
            console.print(self.__rich__())
        return text.get()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table for a notebook."""
        return html_table(COLUMNS, self._cells())


def _count_cases(out: Path) -> int:
    """Count the cases of the audit that a case's folder lies in; 1 where it lies in none."""
    try:
        cases = AUDIT.read(out.parent)["cases"]
    except GradveilError:
        return 1
    return len(cases) if out.name in {str(case["folder"]) for case in cases} else 1


def _strength(row: Row) -> tuple[float, float]:
    over = row.over_blind.mean
    return row.identified / row.n, -math.inf if over is None else over


def make_row(records: Sequence[Record], truth: str) -> Row:
    """Summarize the records of an attack or control against one truth."""
    good = [record.scores[truth] for record in records if record.ok]
    columns = {name: [scores[name] for scores in good] for name in MEASURES}
    n, first = len(records), records[0]
    named = [r.label_found == r.label for r in records if r.label_found is not None]
    claims = [r.certain for r in records if r.certain is not None]
    ranks = [scores["rank"] for scores in good if "rank" in scores]
    chance = _chance(first, truth)
    hits = _hits(records, truth)
    share = share_of_updates(hits, chance)
    by_rank = signed_rank(_gains(records, truth))
    better = min(by_rank, share.p) < LEVEL / 2
    return Row(
        kind=first.kind,
        attack=first.attack,
        truth=truth,
        n=n,
        failed=n - len(good),
        **{name: summary(values, high_leaks=name != "mse") for name, values in columns.items()},
        identified=share.hits,
        identified_bounds=share.bounds,
        top5=sum(rank <= 5 for rank in ranks) if ranks else None,
        percentile=sum(ranks) / len(ranks) / first.candidates if ranks else None,
        candidates=first.candidates,
        labels_right=sum(named) if named else None,
        seconds=sum(record.seconds for record in records),
        verdict=Verdict(better, by_rank, share.p, chance),
        certain=sum(claims) if claims else None,
        certain_wrong=sum(
            bool(r.certain) and r.scores[truth]["mse"] > WRONG for r in records if r.ok
        ),
        reasons=tuple(_reasons(records)),
        updates=len(hits),
        largest_update=max(map(len, hits)),
    )


def _reasons(records: Sequence[Record]) -> list[tuple[str, int]]:
    """Return why images failed, each with their number, the most frequent first."""
    said = [r.status.removeprefix("failed").removeprefix(": ") for r in records if not r.ok]
    return Counter(said).most_common()


def _short(reason: str) -> str:
    """Return a reason's first words, as many as fit."""
    if len(reason) <= LONGEST:
        return reason
    return f"{reason[:LONGEST].rpartition(' ')[0]} …"


def _chance(record: Record, truth: str) -> float:
    """Return how often an image has rank 1 by chance; 1 where there is no line-up."""
    if record.chance is not None:
        return record.chance[truth]
    return 1 / record.candidates if record.candidates else 1.0


def _hits(records: Sequence[Record], truth: str) -> list[list[bool]]:
    """Return whether each image has rank 1, by update; one that failed has not."""

    def hit(record: Record) -> bool:
        scores = record.scores.get(truth, {})
        return scores.get("rank") == 1 or scores.get("identified") == 1

    return [[*map(hit, update)] for update in by_update(records)]


def _gains(records: Sequence[Record], truth: str) -> list[float]:
    """Return the mean dB over blind of each update, of its images that did not fail."""
    good = by_update([record for record in records if record.ok])
    return [
        sum(record.scores[truth]["over_blind"] for record in update) / len(update)
        for update in good
    ]


P_VALUES = ("p_over_blind", "p_identified")
PLAIN = ("attack", "blind")  # kinds that a row's name need not say


def _judged(
    row: Row, adjusted: Mapping[tuple[str, str, str, str], float], tests: int, truths: Sequence[str]
) -> Verdict:
    """Return the verdict after the correction; a truth that is no other one has that one's.

    A positive control says nothing of the victims' images, so that its line-up is enough without
    the correction: it works where that alone is better than chance.
    """
    truth = row.truth if row.truth in truths else TRUTHS[0]
    mine = [adjusted.get((row.kind, row.attack, truth, test), 1.0) for test in P_VALUES]
    works = row.kind == "positive" and row.verdict.p_identified < EACH
    return replace(row.verdict, better=min(mine) < LEVEL or works, tests=tests)
