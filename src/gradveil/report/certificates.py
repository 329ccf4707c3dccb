"""Certificates as a table and in words: m of n reconstructed, the exact bound on delta, and what was not tested."""

from collections.abc import Mapping

from rich.table import Table

from gradveil.audits import AuditResult, Certificate
from gradveil.audits.certificates import ANY, LEVEL, Bound
from gradveil.report.layouts import Fitted

UNKNOWN = "Gamma is unknown where the accuracy of the model, or of one trained without a defense and audited beside it, is not known."
UNITS = {"psnr": "PSNR {:g} dB", "ssim": "SSIM {:g}"}
COLUMNS = ("defense", "attacker", "against", "reached", "delta\nat most")


def certificate_table(certificates: Mapping[str, Certificate]) -> Table:
    """By the defence's name: each attack, the strongest in bold, all together, and the blind guess that reaches epsilon most often."""
    threshold = next(iter(certificates.values())).threshold
    title = f"Reached {UNITS[threshold.metric].format(threshold.epsilon)} or more; delta: exact bound, one-sided {LEVEL:.0%}"
    made = Fitted(title, COLUMNS, {0: 14, 1: 23, 2: 8})
    for defense, one in certificates.items():
        first = defense
        for claim in one.claims:
            for truth, bound in claim.bounds.items():
                made.row(first, claim.attack, truth, *_cells(bound), style="bold" if claim.attack == one.strongest else "")
                first = ""
        made.row("", ANY, "either" if len(one.blind.bounds) > 1 else next(iter(one.blind.bounds)), *_cells(one.overall))
        for truth, bound in one.blind.bounds.items():
            made.row("", one.blind.attack, truth, *_cells(bound), style="dim")
        made.add_section()
    return made


def certificates_in_words(certificates: Mapping[str, Certificate], result: AuditResult) -> list[str]:
    """A line for each defence, and what all of them leave open. `result` is any of the audits, for what they have in common."""
    lines = [f"{defense}: {certificate_in_words(one)}" for defense, one in certificates.items()]
    if any(one.loss is None for one in certificates.values()):
        lines.append(UNKNOWN)
    return [*lines, untested(result, next(iter(certificates.values())))]


def certificate_in_words(one: Certificate) -> str:
    """Definition 2 of the paper, with n; decided where it was asked."""
    bound, asked = one.overall, one.threshold
    said = f"{bound.hits} of n = {bound.n} images reached {asked} by any attack here, so delta <= {bound.upper:.3g} at {LEVEL:.0%}"
    if bound.upper_failed is not None:
        said += f" (<= {bound.upper_failed:.3g} if the {bound.failed} failed count as reached)"
    if one.loss is None:
        loss = "; accuracy loss gamma unknown"
    else:
        loss = f"; accuracy loss gamma {one.loss.value:+.1%} ({one.loss.low:+.1%} to {one.loss.high:+.1%}, each side {LEVEL:.0%})"
    return f"{said}{loss}.{_decision(one)}{_blind(one)}"


def untested(result: AuditResult, one: Certificate) -> str:
    """What the statement does not cover."""
    batch = result.settings.get("batch_size", 1)
    together = f" Images of one batch of {batch} count as independent, which they are not quite." if batch > 1 else ""
    images = f"the {one.overall.n} of {result.settings['data']} {result.settings.get('split', 'test')} attacked here"
    return (
        f"Not tested: other attacks, settings and restarts than these; images unlike {images}; other models, seeds and stages of "
        f"training; what many rounds give away.{together}"
    )


def _decision(one: Certificate) -> str:
    """Privacy is a matter of both delta and gamma: with one of them alone only that one is decided."""
    asked = one.threshold
    delta = {True: "holds", False: "does not hold", None: f"undecided at n = {one.overall.n}"}[one.bounded]
    gamma = {True: "holds", False: "does not hold", None: "undecided" if one.loss else "not tested"}[one.accurate]
    if asked.delta is None and asked.gamma is None:
        return ""
    if asked.gamma is None:
        return f" delta {asked.delta:g} {delta}; gamma was not asked for."
    if asked.delta is None:
        return f" gamma {asked.gamma:g} {gamma}; delta was not asked for."
    whole = {True: "private", False: "not private", None: "undecided"}[one.private]
    return f" ({asked}, {asked.delta:g}, {asked.gamma:g}): {whole}: delta {asked.delta:g} {delta}, gamma {asked.gamma:g} {gamma}."


def _blind(one: Certificate) -> str:
    """A threshold that a guess reaches says nothing about gradients."""
    most = max(one.blind.bounds.values(), key=lambda bound: bound.hits)
    return f" Mind that {one.blind.attack} reaches it on {most.hits} of {most.n} without a gradient." if most.hits else ""


def _cells(bound: Bound) -> list[str]:
    failed = "" if bound.upper_failed is None else f"\n({bound.upper_failed:.3f} with {bound.failed} failed)"
    return [f"{bound.hits}/{bound.n}", f"{bound.upper:.3f}{failed}"]
