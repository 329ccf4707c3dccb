"""Records, as the sections of RESULTS.md read them, and how figures are written."""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from gradveil.audits.records import Record, read_records
from gradveil.audits.results import AuditResult, CaseResult, Row, make_row
from gradveil.papers.published import published
from gradveil.stats import Summary, clopper_pearson

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results"


@cache
def audit(name: str) -> AuditResult:
    """Return an audit of several cases, by its folder below `grids`."""
    return AuditResult.read(RECORDS / "grids" / name)


def row(case: CaseResult, attack: str, kind: str = "attack", truth: str = "used") -> Row:
    """Return a row of a case."""
    for found in case.rows:
        if (found.kind, found.attack, found.truth) == (kind, attack, truth):
            return found
    raise SystemExit(f"{case.out}: no row of {kind} {attack} against {truth}")


def guess(case: CaseResult) -> Row:
    """Return the row of the blind guess that the images used are held against."""
    return row(case, case.settings["guess"]["used"], "blind")


def rows_of(path: str, truth: str = "used") -> dict[tuple[str, str], Row]:
    """Return the rows of a file of records, by kind and attack."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in read_records(RECORDS / path):
        groups.setdefault((record.kind, record.attack), []).append(record)
    return {key: make_row(some, truth) for key, some in groups.items()}


def facts(path: str) -> Any:
    """Return a JSON file of figures."""
    return json.loads((RECORDS / path).read_text())


def lines(path: str) -> list[Any]:
    """Return the lines of a file of JSON lines."""
    return [json.loads(line) for line in (RECORDS / path).read_text().splitlines()]


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    made = [f"| {' | '.join(cells)} |" for cells in (head, *body)]
    return "\n".join([made[0], "|" + "--|" * len(head), *made[1:]])


def anchor(title: str) -> str:
    """Return the name that a heading of Markdown has on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def link(title: str) -> str:
    """Return a link to the section or the experiment of this heading."""
    return f"[{title}](#{anchor(title)})"


def contents(text: str) -> str:
    """Return a list of a text's sections, and the parts of each."""
    found: list[tuple[str, list[str]]] = []
    for marks, title in re.findall(r"^(##|###) (.+)$", text, re.MULTILINE):
        if marks == "##":
            found.append((title, []))
        else:
            found[-1][1].append(link(title))
    lines = [f"- {link(title)}{': ' * bool(parts)}{', '.join(parts)}" for title, parts in found]
    return "\n".join(["**Contents**", "", *lines])


def chance(candidates: int) -> str:
    """Write the chance of rank 1 in a line-up."""
    return percent(1 / candidates, 0)


def spread(of: Summary, digits: int = 1) -> str:
    """Write mean ± standard deviation."""
    if of.mean is None:
        return "-"
    return f"{of.mean:.{digits}f}" + ("" if of.std is None else f" ± {of.std:.{digits}f}")


def mean(of: Summary, digits: int = 3) -> str:
    """Write the mean."""
    return "-" if of.mean is None else f"{of.mean:.{digits}f}"


def hits(found: Row) -> str:
    """Write rank 1 as a count with its exact 95% interval."""
    return share(found.identified, found.n)


def share(k: int, n: int) -> str:
    """Write k of n with its exact 95% interval."""
    low, high = clopper_pearson(k, n)
    return f"{k}/{n} ({100 * low:.0f} to {100 * high:.0f}%)"


def mcnemar(left: Sequence[bool], right: Sequence[bool]) -> tuple[int, int, float]:
    """Return how many only the left and only the right has, and the exact two-sided p."""
    pairs = [*zip(left, right, strict=True)]
    ours, theirs = (sum(a and not b for a, b in some) for some in (pairs, [p[::-1] for p in pairs]))
    return ours, theirs, float(binomtest(ours, max(1, ours + theirs)).pvalue)


def ranked_first(case: CaseResult, attack: str, truth: str = "used") -> dict[int, bool]:
    """Return whether each image of a case has rank 1."""
    return {r.image: r.scores[truth].get("rank") == 1 for r in case.of("attack", attack) if r.ok}


def p_value(value: float) -> str:
    """Write a p-value."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def percent(value: float, digits: int = 1) -> str:
    """Write a share as a percentage."""
    return f"{100 * value:.{digits}f}%"


def published_correlation() -> str:
    """Write Pearson's r of S_pri with PSNR, as paper and replication print it."""
    found = published()["correlation"]
    return f"{found['paper']} and {found['replication']}"
