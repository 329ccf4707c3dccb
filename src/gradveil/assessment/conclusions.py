"""What an assessment comes to: each defense judged by what still leaks and by its accuracy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradveil.assessment.job import FORMAT, THEN, AssessJob
from gradveil.audits import AuditResult, CaseResult
from gradveil.checks import Diagnosis
from gradveil.report.answer import few, p_of_less
from gradveil.report.write import Report
from gradveil.stats import Difference, difference, holm

LEVEL = 0.05
FEW_ITERATIONS = 0.25  # share of the attacks' iterations below which they may be too weak


@dataclass(frozen=True)
class Assessed:
    """A defense after the assessment: what still leaks, what it costs, and whether it helps.

    `p_less` is the p-value, after Holm's correction for all defenses, that fewer images are
    identified than without a defense after the same training, by a sign test of the same images.
    """

    defense: str
    attack: str
    identified: int
    n: int
    bounds: tuple[float, float]
    leaks: bool
    accuracy: float
    cost: Difference
    p_less: float
    helps: bool
    reason: str


@dataclass(frozen=True, eq=False)
class Assessment:
    """The result: the doctor's findings, the audit, its page, a line for each defense, and advice.

    `recommended` is the text of a defense; None where none is recommended, and `advice` says why.
    """

    out: Path
    diagnosis: Diagnosis
    result: AuditResult
    report: Report
    defenses: tuple[Assessed, ...]
    recommended: str | None
    advice: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Return the assessment as JSON has it."""
        now = self.result.cases[0].strongest
        return {
            "format": FORMAT,
            "recommended": self.recommended,
            "advice": list(self.advice),
            "now": now.plain(),
            "defenses": [asdict(each) for each in self.defenses],
            "doctor": self.diagnosis.plain(),
            "page": str(self.report.page),
        }


def conclude(
    job: AssessJob,
    diagnosis: Diagnosis,
    result: AuditResult,
    write: Callable[[Sequence[str]], Report],
    out: Path,
) -> Assessment:
    """Judge every defense by the line-up and by its accuracy, and say what to do.

    `write` makes the report, with this advice in it.
    """
    now, bare, *defended = result.cases
    tested = {case.defense: case.model for case in result.cases if case.asked_step == THEN}
    p_less = holm([p_of_less(case, bare) for case in defended])
    judged = tuple(
        _judged(case, bare, tested, p, job.most_loss)
        for case, p in zip(defended, p_less, strict=True)
    )
    best = min(
        (each for each in judged if each.helps),
        key=lambda each: (each.identified, each.cost.value),
        default=None,
    )
    advice = [*_on_now(now), *_on_best(best, judged, bare), *_on_limits(result, now)]
    recommended = best.defense if best else None
    return Assessment(out, diagnosis, result, write(advice), judged, recommended, tuple(advice))


def _judged(
    case: CaseResult,
    bare: CaseResult,
    tested: Mapping[str, Any],
    p_less: float,
    most_loss: float,
) -> Assessed:
    """Judge a defense; both models were tested on the same number of images."""
    row, facts, plain = case.strongest, tested[case.defense], tested[bare.defense]
    hits, n, accuracy = (facts.hits, facts.tested, facts.accuracy) if facts else (0, 1, 0.0)
    others = (plain.hits, plain.tested) if plain else (0, 1)
    cost = difference(others[0], others[1], hits, n)
    cheap, less = cost.value <= most_loss, p_less < LEVEL
    before = bare.strongest
    figures = f"{row.identified} of {row.n} images are identified, {before.identified} without it"
    if not less:
        reason = f"it was not shown to leak less: {figures} (p = {p_less:.2g})"
    elif not cheap:
        reason = f"it leaks less ({figures}), but costs {100 * cost.value:.1f} points of accuracy"
    else:
        reason = f"{figures} (p = {p_less:.2g})"
    return Assessed(
        case.defense,
        row.attack,
        row.identified,
        row.n,
        row.identified_bounds,
        row.doubt is None,
        accuracy,
        cost,
        p_less,
        less and cheap,
        reason,
    )


def _on_now(now: CaseResult) -> list[str]:
    row = now.strongest
    low, high = row.identified_bounds
    chance = row.verdict.chance * row.n
    figures = (
        f"the strongest attack, {row.attack}, identifies {row.identified} of {row.n} images "
        f"(95%, not corrected for the choice of the attack: {low:.0%} to {high:.0%}; by luck it "
        f"would be {few(chance)})"
    )
    if row.doubt is None:
        return [f"Now: {figures}."]
    return [
        f"Now: {figures}: {row.doubt}. Nothing was shown to leak, which is no proof that nothing "
        "does."
    ]


def _on_best(best: Assessed | None, judged: Sequence[Assessed], bare: CaseResult) -> list[str]:
    if best is not None:
        low, high = best.cost.low, best.cost.high
        left = "It still leaks: " if best.leaks else "What is left is no better than blind: "
        share = f"{best.bounds[0]:.0%} to {best.bounds[1]:.0%}"
        return [
            f"Recommended: {best.defense}. {best.reason}; it costs {100 * best.cost.value:.1f} "
            f"points of accuracy (90%: {100 * low:.1f} to {100 * high:.1f}).",
            f"{left}95% bounds on the share identified are {share}.",
        ]
    if bare.strongest.doubt is not None:
        why = f"without a defense no attack was shown to work either ({bare.strongest.doubt})"
        return [f"None of these was shown to help: {why}."]
    return [
        "None of these was shown to help:",
        *(f"  {each.defense}: {each.reason}" for each in judged),
    ]


def _on_limits(result: AuditResult, now: CaseResult) -> list[str]:
    """Say what makes the figures weaker than they look."""
    share = result.settings.get("share") or 1.0
    lines = []
    if share < FEW_ITERATIONS:
        lines.append(
            f"The attacks made {100 * share:.2g}% of their iterations in this budget: stronger "
            "ones may leak more. A larger --budget, or a GPU, settles it."
        )
    if not now.strongest.candidates:
        lines.append(
            f"There was no line-up ({now.settings.get('no_lineup')}), so nothing could be "
            "identified: give more images of each class."
        )
    lines.append(
        "A defense was judged by the attacks that are known here, on images like these; tests were "
        f"corrected for the number of defenses, {len(result.cases) - 2}. There may be leaks that "
        "nobody has tried."
    )
    return lines
