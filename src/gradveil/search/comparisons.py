"""Whether one audit leaks less than another, image by image: paired tests, and their outcome in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.audits import AuditResult

LEVEL = 0.05
MEASURES = {"over_blind": "dB over blind", "ssim": "SSIM", "identified": "identified"}
EACH = LEVEL / (2 * len(MEASURES))  # three measures and two directions: together they err in at most 5% of cases (Bonferroni)
FEWEST = math.ceil(-math.log2(EACH))  # images below which no test can reject: the smallest p is 2 ** -n


@dataclass(frozen=True)
class Comparison:
    """One measure on the n images that both audits reconstructed; higher leaks more. `less` and `more` are one-sided p-values."""

    measure: str
    n: int
    ours: float
    theirs: float
    less: float
    more: float


def compare(ours: AuditResult, theirs: AuditResult, truth: str = "used") -> list[Comparison]:
    """The attacks of two audits of the same images."""
    pairs = _pairs(ours, theirs, truth)
    made = []
    for measure in MEASURES:
        first, second = ([one[measure] for one in side] for side in pairs)
        differences = [a - b for a, b in zip(first, second, strict=True)]
        test = _sign if measure == "identified" else _signed_rank
        n = len(differences)
        means = (sum(first) / n, sum(second) / n) if n else (0.0, 0.0)
        made.append(Comparison(measure, n, *means, test([-d for d in differences]), test(differences)))
    return made


def verdict(found: Sequence[Comparison]) -> str:
    """less, more, mixed where the measures disagree, or open where no test rejects."""
    less, more = (any(getattr(one, side) < EACH for one in found) for side in ("less", "more"))
    return "mixed" if less and more else "less" if less else "more" if more else "open"


def in_words(found: Sequence[Comparison], other: str) -> str:
    """Such as `leaks less than none (...)`, with the figures of every test."""
    figures = ", ".join(_figure(one) for one in found)
    says = {
        "less": f"leaks less than {other}",
        "more": f"leaks more than {other}",
        "mixed": f"leaks less than {other} by one measure and more by another",
        "open": f"was not shown to leak less than {other}",
    }[verdict(found)]
    return f"{says} (n = {found[0].n}: {figures})"


def _figure(one: Comparison) -> str:
    form = {"over_blind": "+.2f", "ssim": ".3f", "identified": ".1%"}[one.measure]
    side = "less" if one.less <= one.more else "more"
    return f"{MEASURES[one.measure]} {one.ours:{form}} against {one.theirs:{form}}, p = {min(one.less, one.more):.2g} for {side}"


def _pairs(ours: AuditResult, theirs: AuditResult, truth: str) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    sides = [{record.image: dict(record.scores[truth]) for record in one.of("attack") if record.ok} for one in (ours, theirs)]
    both = sorted(sides[0].keys() & sides[1].keys())
    return [sides[0][image] for image in both], [sides[1][image] for image in both]


def _signed_rank(differences: Sequence[float]) -> float:
    """Of values above 0. Zeros are left out, as Wilcoxon's test does."""
    from scipy.stats import wilcoxon

    moved = [value for value in differences if value]
    return float(wilcoxon(moved, alternative="greater").pvalue) if moved else 1.0


def _sign(differences: Sequence[float]) -> float:
    """Exact, of those that differ: McNemar's test for identified or not."""
    from scipy.stats import binomtest

    moved = [value > 0 for value in differences if value]
    return float(binomtest(sum(moved), len(moved), 0.5, alternative="greater").pvalue) if moved else 1.0
