"""Meters of the page: the share of rank 1 of every attack and control, with its interval."""

from collections.abc import Sequence

from gradveil.audits import CaseResult, Row
from gradveil.report.answer import leakage, truth_words
from gradveil.report.audit import CONTROLS, accuracy_words, chosen_blind, number
from gradveil.report.markup import Html, breakable, element

OPEN = 6  # cases up to which every attack and control is shown at once


def percent(share: float) -> str:
    """Write a share for a style sheet."""
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


def meters(cases: Sequence[tuple[str, CaseResult]]) -> Html:
    """Return a meter for each attack and control of the cases, which are named."""
    wide = len(cases) <= OPEN
    marks = [element("i", f"{k / 4:.0%}", style=f"left:{k / 4:.0%}") for k in range(5)]
    scale = element("div", element("span", *marks, class_="scale"), class_="meter axis")
    made = (_case(name, case, wide) for name, case in cases)
    return element("div", scale, *made, class_="meters")


def _case(name: str, case: CaseResult, is_open: bool) -> Html:
    best = case.strongest
    rows = [row for row in case.rows if row.truth == best.truth]
    attacks = [row for row in rows if row.kind == "attack" and row is not best]
    attacks.sort(key=lambda row: -row.identified / row.n)
    blind = [chosen_blind(rows)] if any(row.kind == "blind" for row in rows) else []
    controls = blind + [row for row in rows if row.kind in (*CONTROLS, "positive")]
    accuracy = "" if case.model is None else f"accuracy {accuracy_words(case)}"
    against = f"against {truth_words(best.truth)}" if len(case.truths) > 1 else ""
    head = element(
        "summary",
        element("span", breakable(name), class_="name"),
        element("span", ", ".join(filter(None, [accuracy, against])), class_="aside"),
        _meter(best, "strongest"),
    )
    parts = [
        *(_meter(row, "attack") for row in attacks),
        *(_meter(row, "control") for row in controls),
    ]
    return element("details", head, *parts, open=is_open)


def _meter(row: Row, kind: str) -> Html:
    name = row.title if kind == "control" else row.attack
    low, high = row.identified_bounds
    over = f"{number(row.over_blind.mean, '+.1f')} dB"
    if not row.candidates:
        track = element("span", "no line-up", class_="track bare")
        said = f"{name}: no line-up, {over} over blind"
    else:
        share = row.identified / row.n
        track = element(
            "span",
            element("i", class_="luck", style=f"left:{percent(row.verdict.chance)}"),
            element("i", class_="range", style=f"left:{percent(low)};width:{percent(high - low)}"),
            element("i", class_="dot", style=f"left:{percent(share)}"),
            class_="track",
        )
        said = (
            f"{name}: rank 1 in {row.identified} of {row.n} line-ups of {row.candidates}, 95% "
            f"interval {low:.0%} to {high:.0%}, luck {row.verdict.chance:.1%}; {over} over blind"
        )
    flags = [element("em", flag, class_="flag") for flag in row.flags]
    return element(
        "span",
        element("span", name, *flags, class_="who"),
        track,
        element("span", row.lineup.replace("/", " of "), class_="count"),
        element("span", over, class_="over"),
        class_=f"meter {kind}",
        data_tip=said,
    )


def by_leakage(cases: Sequence[tuple[str, CaseResult]]) -> list[tuple[str, CaseResult]]:
    """Return the cases, those that leak most first."""
    return sorted(cases, key=lambda pair: leakage(pair[1]), reverse=True)
