"""What the audits of a search come to: the policy found against none and random policies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradveil.audits import CaseResult, Row
from gradveil.audits.stage import GRADIENTS, NOISY, SHAM, UNDER_DRAWS
from gradveil.search.job import SEMI_TRAINED
from gradveil.stats import holm_cutoff, sign_test, signed_rank

MODELS = (SEMI_TRAINED, "untrained")
LEVEL = 0.05
HEADLINE = "lineup"
MEASURES = {HEADLINE: "rank 1", "over_blind": "dB over blind", "ssim": "SSIM"}
"""Rank 1 decides whether a policy leaks less. The others stand beside it: a policy changes what a
guess scores by them too."""

SATURATED = 0.95  # share of images with rank 1 from which on it cannot tell two policies apart
CONTROLS = {
    SHAM: SHAM,
    UNDER_DRAWS: "guess that knows the draws",
    NOISY: f"ceiling by the {NOISY}",
    GRADIENTS: f"ceiling by the {GRADIENTS}",
}
"""Controls of a line-up: names of their rows, and what sentences call them."""

AGAINST = ("none", "random")
TESTS = 2 * len(MEASURES) * len(AGAINST) * len(MODELS)
"""Comparisons of a search: 3 measures in 2 directions against 2 other rows on 2 models. These and
the tests of its audits, which flag what is no better than blind, err together in at most 5% of
cases (Holm)."""

FEWEST = math.ceil(-math.log2(LEVEL / TESTS))
"""Images below which no comparison can reject, even where every test of the audits does: with n
images no p-value is below 2 ** -n."""


@dataclass(frozen=True)
class Confirmation:
    """The audit of one model under one defense.

    `rows` are those of its table. `scores` are the attack's for each image that it reconstructed,
    by the number of the image, the truth they are measured against, and the measure. `p_values` are
    those of the audit before any correction.
    """

    attack: str
    defense: str
    rows: tuple[Row, ...]
    scores: Mapping[int, Mapping[str, Mapping[str, float]]]
    p_values: tuple[float, ...] = ()


def confirmation(case: CaseResult) -> Confirmation:
    """Return what the audit of one defense of a search says."""
    return Confirmation(
        next(iter(case.settings["attacks"])),
        case.defense,
        case.rows,
        {
            record.image: {
                truth: dict(scores)
                | ({HEADLINE: float(scores["rank"] == 1)} if "rank" in scores else {})
                for truth, scores in record.scores.items()
            }
            for record in case.of("attack")
            if record.ok
        },
        tuple(case.p_values),
    )


@dataclass(frozen=True)
class Comparison:
    """One measure on the n images that both audits reconstructed; higher means closer to them.

    `ours` and `theirs` are means; `less` and `more` are one-sided p-values. Without line-ups n of
    rank 1 is 0.
    """

    measure: str
    n: int
    ours: float
    theirs: float
    less: float
    more: float


def compare(ours: Confirmation, theirs: Confirmation, truth: str = "used") -> list[Comparison]:
    """Compare two audits of the same images, by every measure."""
    both = sorted(ours.scores.keys() & theirs.scores.keys())
    made = []
    for measure in MEASURES:
        pairs = [[side.scores[image][truth] for side in (ours, theirs)] for image in both]
        known = [pair for pair in pairs if all(measure in scores for scores in pair)]
        first, second = ([pair[side][measure] for pair in known] for side in (0, 1))
        differences = [a - b for a, b in zip(first, second, strict=True)]
        test = sign_test if measure == HEADLINE else signed_rank
        n = len(differences)
        means = (sum(first) / n, sum(second) / n) if n else (0.0, 0.0)
        made.append(
            Comparison(measure, n, *means, test([-d for d in differences]), test(differences))
        )
    return made


def compare_all(
    audits: Mapping[str, Mapping[str, Confirmation]],
) -> dict[str, dict[str, list[Comparison]]]:
    """Compare the policy found with none and with random policies, by model and other row."""
    return {
        model: {other: compare(rows[_found(rows)], rows[other]) for other in AGAINST}
        for model, rows in audits.items()
    }


def _found(rows: Mapping[str, Confirmation]) -> str:
    """Name the row of the policy that the search found."""
    return "hybrid" if "hybrid" in rows else "single"


def p_values(compared: Mapping[str, Mapping[str, Sequence[Comparison]]]) -> list[float]:
    """Return the p-values of all tests, in both directions."""
    return [
        p
        for others in compared.values()
        for tests in others.values()
        for test in tests
        for p in (test.less, test.more)
    ]


def verdict(compared: Sequence[Comparison], cutoff: float) -> str:
    """Return less, more, or open where the test of rank 1 does not reject; nothing else decides.

    Tests reject whose p-value is at most the `cutoff`.
    """
    return _side(_headline(compared), cutoff) or "open"


def _headline(compared: Sequence[Comparison]) -> Comparison:
    return next(test for test in compared if test.measure == HEADLINE)


def _side(test: Comparison, cutoff: float) -> str:
    """Name the side on which a test rejects; empty where it does on none."""
    if test.less <= cutoff:
        return "less"
    return "more" if test.more <= cutoff else ""


def saturated(test: Comparison) -> bool:
    """Tell whether nearly all images of both audits have rank 1, so that it separates nothing."""
    return test.n > 0 and min(test.ours, test.theirs) >= SATURATED


def in_words(compared: Sequence[Comparison], other: str, cutoff: float) -> str:
    """Write the verdict with the figures of every test, such as `leaks less than none (...)`."""
    decided, *beside = sorted(compared, key=lambda test: test.measure != HEADLINE)
    says = {
        "less": f"leaks less than {other}",
        "more": f"leaks more than {other}",
        "open": f"was not shown to leak less than {other}{_because(decided, beside, cutoff)}",
    }[verdict(compared, cutoff)]
    figures = ", ".join(_figure(test) for test in beside)
    first = _figure(decided) if decided.n else "no line-up"
    return f"{says} (n = {beside[0].n}: {first}; beside it {figures})"


def _because(decided: Comparison, beside: Sequence[Comparison], cutoff: float) -> str:
    """Say why rank 1 leaves it open where it had no chance, and where other measures reject."""
    if not decided.n:
        return ", since there are no line-ups, and nothing else decides it"
    parts = []
    if saturated(decided):
        parts.append("rank 1 is saturated and separates nothing at this setting")
    for side in ("less", "more"):
        if named := [MEASURES[test.measure] for test in beside if _side(test, cutoff) == side]:
            often = f"was not shown to be picked out {side} often"
            often = "is picked out as often" if decided.ours == decided.theirs else often
            parts.append(f"it resembles {side} ({', '.join(named)}), but {often}")
    return "".join(f"{start}{part}" for start, part in zip((": ", "; ", "; "), parts, strict=False))


def _figure(test: Comparison) -> str:
    form = {"over_blind": "+.2f", "ssim": ".3f", HEADLINE: ".1%"}[test.measure]
    side = "less" if test.less <= test.more else "more"
    return (
        f"{MEASURES[test.measure]} {test.ours:{form}} against {test.theirs:{form}}, "
        f"p = {min(test.less, test.more):.2g} for {side}"
    )


def verdicts(audits: Mapping[str, Mapping[str, Confirmation]]) -> list[str]:
    """Say for each model whether the policy found leaks less than none and than random policies.

    A line on the controls of the line-up follows each. The last says how many tests were made.
    """
    compared = compare_all(audits)
    family = p_values(compared)
    family += [p for rows in audits.values() for made in rows.values() for p in made.p_values]
    cutoff = holm_cutoff(family)
    lines = []
    for model, rows in audits.items():
        row = _found(rows)
        against = " and ".join(
            in_words(tests, other, cutoff) for other, tests in compared[model].items()
        )
        lines.append(
            f"{model} model, against the images used: the {row} {rows[row].defense} {against}."
            f"{_doubt(rows['none'])}"
        )
        lines += _control_words(model, rows)
    return [
        *lines,
        f"Rank 1 alone decides what leaks less. These comparisons and what is no better than "
        f"blind are decided at 5% over all {len(family)} tests together (Holm); each p is that of "
        "its own test, before this correction.",
    ]


def control(audit: Confirmation, name: str, truth: str = "used") -> Row | None:
    """Return a row of `CONTROLS`; None where the audit has none."""
    found = (row for row in audit.rows if (row.attack, row.truth) == (name, truth))
    return next((row for row in found if row.kind in ("sham", "bar", "ceiling")), None)


def _control_words(model: str, rows: Mapping[str, Confirmation]) -> list[str]:
    """Say how often the controls have rank 1, in the order of the rows; nothing without any."""
    said = []
    for name, words in CONTROLS.items():
        found = [control(audit, name) for audit in rows.values()]
        if any(found):
            said.append(f"{words} {', '.join('-' if row is None else row.lineup for row in found)}")
    if not said:
        return []
    return [f"{model} model, controls with rank 1 ({', '.join(rows)}): {'; '.join(said)}."]


def _doubt(none: Confirmation) -> str:
    (bare,) = (row for row in none.rows if (row.kind, row.truth) == ("attack", "used"))
    if bare.verdict.better:
        return ""
    return " The attack on unprotected images is itself no better than blind, so this says little."
