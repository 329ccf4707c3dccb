"""What an audit found: its records, and for each attack and control what they come to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gradveil.audits.folders import read_settings
from gradveil.audits.jobs import changes_images
from gradveil.audits.records import RECORDS, Record, read_records
from gradveil.defenses import parse
from gradveil.stats import Summary, Verdict, better_than_blind, clopper_pearson, summary

TRUTHS = ("used", "original")
NO_BETTER = "no better than blind"


@dataclass(frozen=True)
class Row:
    """One attack or control against one truth. n counts the failed images too; the summaries are of those that did not fail."""

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
    def flags(self) -> tuple[str, ...]:
        flags = [] if self.kind == "blind" or self.verdict.better else [NO_BETTER]
        return (*flags, f"{self.failed} failed") if self.failed else tuple(flags)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"flags": list(self.flags)}


@dataclass(frozen=True)
class AuditResult:
    """Where the audit is, what it was, and what it found."""

    out: Path
    settings: Mapping[str, Any]
    records: tuple[Record, ...]

    @classmethod
    def read(cls, out: Path) -> "AuditResult":
        """From the folder of an audit, whole or not."""
        return cls(out, read_settings(out), tuple(read_records(out / RECORDS)))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The attacks, the blind controls and the positive ones, against the images used and then against the originals."""
        names = dict.fromkeys(
            (record.kind, record.attack)
            for kind in ("attack", "blind", "positive")
            for record in self.of(kind)
        )
        return tuple(
            make_row(self.of(kind, name), truth) for truth in TRUTHS for kind, name in names
        )

    @property
    def defense(self) -> str:
        """As text; in the folder of an older version a policy alone."""
        return str(self.settings.get("defense", self.settings["policy"]))

    @property
    def truths(self) -> tuple[str, ...]:
        """Both where the defence changes images; else they are one and the same."""
        return TRUTHS if changes_images(parse(self.defense)) else TRUTHS[:1]

    @property
    def strongest(self) -> Row:
        """The attack that identifies most images, against either truth; of equal ones that with the most dB over blind."""
        rows = [row for row in self.rows if row.kind == "attack" and row.truth in self.truths]
        return max(
            rows,
            key=lambda row: (
                row.identified / row.n,
                -math.inf if row.over_blind.mean is None else row.over_blind.mean,
            ),
        )

    def of(self, kind: str, attack: str | None = None) -> list[Record]:
        return [
            record
            for record in self.records
            if record.kind == kind and attack in (None, record.attack)
        ]


def make_row(records: Sequence[Record], truth: str) -> Row:
    good = [record.scores[truth] for record in records if record.ok]
    columns = {
        name: [scores[name] for scores in good]
        for name in ("psnr", "over_blind", "ssim", "psnr_affine", "mse")
    }
    n, hits, first = len(records), sum(int(scores["identified"]) for scores in good), records[0]
    named = [
        record.label_found == record.label for record in records if record.label_found is not None
    ]
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
        verdict=better_than_blind(
            columns["over_blind"], hits, n, first.candidates, chance=first.chance[truth]
        ),
    )
