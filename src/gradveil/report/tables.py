"""An audit as a table, and what its controls say in words."""

from collections.abc import Sequence

from rich.table import Table

from gradveil.audits import AuditResult, Row
from gradveil.audits.results import NO_BETTER
from gradveil.report.layouts import Fitted
from gradveil.statistics import EACH, Summary

COLUMNS = ("", "n", "PSNR dB", "median", "worst\n5%", "over\nblind", "SSIM", "identi-\nfied", "")
NAME, FLAG = 17, 10  # letters of "blind: class mean", and of a line of "no better than blind"
FAILS = "it fails even there, so low scores of it say nothing about the model"
TITLES = {"used": "Against the images that were used", "original": "Against the original images"}


def audit_tables(result: AuditResult) -> list[Table]:
    """One table where images were used as they are; else one against the used images and one against the originals."""
    return [audit_table(result, truth, TITLES[truth] if len(result.truths) > 1 else "") for truth in result.truths]


def audit_table(result: AuditResult, truth: str, title: str) -> Table:
    """The positive controls use images as they are, so they stand in the first table alone."""
    settings = result.settings
    acted = " in training only" if settings.get("clean") else ""
    facts = f"{settings['model']} on {settings['data']}, defense {result.defense}{acted}, labels {settings['labels']}"
    facts = f"{facts}, seed {settings['seed']}"
    made = Fitted(f"{title}: {facts}" if title else facts, COLUMNS, {len(COLUMNS) - 1: FLAG, 0: NAME})
    for kind in ("attack", "blind", "positive") if truth == "used" else ("attack", "blind"):
        for row in result.rows:
            if (row.truth, row.kind) == (truth, kind):
                made.row(*_cells(row), style="bold" if kind == "attack" else "")
        made.add_section()
    return made


def controls_in_words(result: AuditResult) -> list[str]:
    """What the controls say, one line each, and what that makes of the attacks."""
    rows = [row for row in result.rows if row.truth == "used"]
    lines = [_blind_words([row for row in rows if row.kind == "blind"])]
    positives = {row.attack: row for row in rows if row.kind == "positive"}
    lines += [positive_words(row) for row in positives.values()]
    works = {name: row.verdict.better for name, row in positives.items()}
    lines += [_attack_words(row, works.get(row.attack)) for row in rows if row.kind == "attack"]
    return [line for line in (*lines, *knowledge_words(result), *left_out_words(result)) if line]


def knowledge_words(result: AuditResult) -> list[str]:
    """What attackers knew beyond the labels."""
    knows: dict[str, str] = result.settings.get("knows", {})
    return [f"{name} was told: {told}." for name, told in knows.items() if told != "labels"]


def left_out_words(result: AuditResult) -> list[str]:
    reasons: dict[str, str] = result.settings.get("left_out", {})
    return [f"Left out: {name}: {reason.removeprefix('attack ')}." for name, reason in reasons.items()]


def _cells(row: Row) -> list[str]:
    return [
        f"positive: {row.attack}" if row.kind == "positive" else row.attack,
        str(row.n),
        spread(row.psnr),
        number(row.psnr.median, ".1f"),
        number(row.psnr.worst5, ".1f"),
        number(row.over_blind.mean, "+.1f"),
        number(row.ssim.mean, ".3f"),
        f"{row.identified / row.n:.1%}",
        "\n".join(row.flags),
    ]


def _blind_words(rows: Sequence[Row]) -> str:
    scored = [row for row in rows if row.psnr.mean is not None]
    if not scored:
        return ""
    best = max(scored, key=lambda row: row.psnr.mean or 0)
    return (
        f"Blind controls look at no gradient: the best, {best.attack.removeprefix('blind: ')}, scores {number(best.psnr.mean)} dB, "
        f"so PSNR up to there shows nothing by itself; a guess identifies {best.verdict.chance:.1%} among {best.candidates}."
    )


def best_blind(rows: Sequence[Row]) -> Row:
    return max((row for row in rows if row.kind == "blind"), key=lambda row: -1e9 if row.psnr.mean is None else row.psnr.mean)


def positive_words(row: Row) -> str:
    model = "mlp" if row.attack == "closed-form" else "lenet"
    found = f"{number(row.psnr.mean)} dB, {number(row.over_blind.mean, '+.2f')} dB over blind, {row.identified} of {row.n} identified"
    says = f"{_shown_by(row)}: the attack works" if row.verdict.better else FAILS
    return f"Positive control: {row.attack} on an untrained {model}, one image a victim and one gradient: {found}: {says}."


def _shown_by(row: Row) -> str:
    """By which of the two tests it is better than a guess: images may be recognized that are no closer in dB."""
    tests = {"identification": row.verdict.p_identified, "dB over blind": row.verdict.p_over_blind}
    return "clearly better than chance by " + " and by ".join(f"{name} (p = {p:.2g})" for name, p in tests.items() if p < EACH)


def _attack_words(row: Row, works: bool | None) -> str:
    """`works`: in its positive control, if it has one."""
    failed = f", {row.failed} failed" if row.failed else ""
    tests = f"p = {row.verdict.p_over_blind:.2g} for dB over blind, p = {row.verdict.p_identified:.2g} for identification"
    low, high = row.identified_bounds
    seen = f"{row.identified} of {row.n} identified (95%: {low:.1%} to {high:.1%}){failed}; {tests}"
    if row.verdict.better:
        return f"{row.attack}: better than blind: {seen}."
    because = ", and its positive control fails too: try more steps or another attack before calling the model safe"
    because = {True: "", False: because, None: ", and it has no positive control: it needs a defense to undo"}[works]
    return f"{row.attack}: {NO_BETTER}: {seen}{because}."


def spread(values: Summary, form: str = ".2f") -> str:
    return number(values.mean, form) + ("" if values.std is None else f" ± {values.std:{form}}")


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)
