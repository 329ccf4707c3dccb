"""Thresholds held against audits: a decision for every case, for people and for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from gradveil.audits import AuditResult, CaseResult, Row
from gradveil.core.errors import unknown
from gradveil.core.formats import ThresholdsFile
from gradveil.core.reading import read_toml
from gradveil.report.answer import attacked, make_answer

VERDICT = "verdict.json"
FORMAT = "gradveil verdict 1"


@dataclass(frozen=True)
class Check:
    """A threshold held against a case: `holds` is None where the quantity was not measured.

    A check that does not hold, or cannot be told to, breaks the threshold.
    """

    run: str
    case: str
    quantity: str  # such as "most.identified"
    limit: float
    value: float | None
    holds: bool | None

    @property
    def words(self) -> str:
        """The check on one line."""
        side, _, name = self.quantity.rpartition(".")
        bound = "at least" if side == "least" else "at most"
        value = "was not measured" if self.value is None else f"is {self.value:.4g}"
        where = f"{self.run}: {self.case}" if self.run else self.case
        if not side:
            state = {True: "worked", False: "failed", None: "was not made"}[self.holds]
            return f"{where}: the positive control {state}"
        return f"{where}: {name} {value}, {bound} {self.limit:g} was asked for"


@dataclass(frozen=True)
class Decision:
    """The checks of one or several audits; without thresholds there are none."""

    results: Mapping[str, AuditResult]
    thresholds: ThresholdsFile | None
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool | None:
        """Whether every check holds; None without thresholds."""
        return None if self.thresholds is None else all(check.holds for check in self.checks)

    @property
    def broken(self) -> list[Check]:
        """The checks that do not hold, or cannot be told to."""
        return [check for check in self.checks if not check.holds]

    def plain(self) -> dict[str, Any]:
        """Return verdict.json."""
        return {
            "format": FORMAT,
            "passed": self.passed,
            "thresholds": None if self.thresholds is None else to_builtins(self.thresholds),
            "checks": [asdict(check) for check in self.checks],
            "runs": [_run(name, result) for name, result in self.results.items()],
        }


def read_thresholds(path: Path) -> ThresholdsFile:
    """Read a TOML file of thresholds."""
    return read_toml(path, ThresholdsFile)


def decide(results: Mapping[str, AuditResult], thresholds: ThresholdsFile | None) -> Decision:
    """Hold every case of the audits, by the names of their runs, against the thresholds.

    A control that was added protects nobody, and is held against none unless it is named there.
    """
    if thresholds is None:
        return Decision(results, None, ())
    cases = [(run, case) for run, result in results.items() for case in attacked(result)]
    if thresholds.defenses is not None:
        there = list(dict.fromkeys(case.defense for _, case in cases))
        for defense in thresholds.defenses:
            if defense not in there:
                raise unknown("defense of the thresholds", defense, there)
        cases = [(run, case) for run, case in cases if case.defense in thresholds.defenses]
    else:
        cases = [(run, case) for run, case in cases if not case.control]
    checks = [check for run, case in cases for check in _checks(run, case, thresholds)]
    if thresholds.positive_control:
        checks += [_positive(run, result) for run, result in results.items()]
    return Decision(results, thresholds, tuple(checks))


def _checks(run: str, case: CaseResult, asked: ThresholdsFile) -> list[Check]:
    found = []
    for name, limit in to_builtins(asked.most).items():
        if limit is not None:
            value = _worst(case, name)
            holds = None if value is None else value <= limit
            found.append(Check(run, case.name, f"most.{name}", limit, value, holds))
    reached = {
        "accuracy": None if case.model is None else case.model.accuracy,
        "images": float(case.strongest.n),
    }
    for name, limit in to_builtins(asked.least).items():
        if limit is not None:
            value = reached[name]
            holds = None if value is None else value >= limit
            found.append(Check(run, case.name, f"least.{name}", limit, value, holds))
    return found


def _worst(case: CaseResult, name: str) -> float | None:
    """Return the highest value over all attacks and truths; None where it was not measured."""
    values = [
        _value(row, name) for row in case.rows if row.kind == "attack" and row.truth in case.truths
    ]
    return max((value for value in values if value is not None), default=None)


def _value(row: Row, name: str) -> float | None:
    if name == "failed":
        return row.failed / row.n
    if name in ("identified", "identified_high"):
        if not row.candidates or row.failed == row.n:
            return None
        return row.identified / row.n if name == "identified" else row.identified_bounds[1]
    value: float | None = getattr(row, name).mean
    return value


def _positive(run: str, result: AuditResult) -> Check:
    """Tell whether any attack worked on the easy model; its rows stand in one of the cases."""
    rows = [
        row
        for case in result.cases
        for row in case.rows
        if (row.kind, row.truth) == ("positive", "used")
    ]
    works = any(row.doubt is None for row in rows) if rows else None
    return Check(run, "all", "positive_control", 1.0, None, works)


def _run(name: str, result: AuditResult) -> dict[str, Any]:
    answer = make_answer(result)
    return {
        "run": name,
        "data": result.settings["data"],
        "model": result.settings["model"],
        "seed": result.settings["seed"],
        "leak_shown": answer.tone == "leak",
        "answer": list(answer.sentences),
        "cases": [_case(case) for case in attacked(result)],
    }


def _case(case: CaseResult) -> dict[str, Any]:
    row = case.strongest
    return {
        "defense": case.defense,
        "clean": case.clean,
        "step": case.step,
        "accuracy": None if case.model is None else case.model.accuracy,
        "strongest": {
            "attack": row.attack,
            "truth": row.truth,
            "n": row.n,
            "failed": row.failed,
            "candidates": row.candidates,
            "identified": row.identified if row.candidates else None,
            "identified_bounds": list(row.identified_bounds) if row.candidates else None,
            "chance": row.verdict.chance if row.candidates else None,
            "over_blind": row.over_blind.mean,
            "psnr": row.psnr.mean,
            "ssim": row.ssim.mean,
            "better_than_blind": row.verdict.better,
            "doubt": row.doubt,
        },
    }


def verdict_words(decision: Decision) -> Sequence[str]:
    """Say what the thresholds come to; nothing without any."""
    if decision.thresholds is None:
        return []
    if not decision.checks:
        return ["Thresholds: the file names none."]
    if decision.passed:
        return [f"Thresholds: all {len(decision.checks)} hold."]
    return [
        f"Thresholds: {len(decision.broken)} of {len(decision.checks)} are broken.",
        *(f"Broken: {check.words}." for check in decision.broken),
    ]
