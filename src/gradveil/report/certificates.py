"""Certificates of an audit as a table, in sentences, and as a section of the page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.table import Table

from gradveil.audits import AuditResult, CaseResult, Certificate, Threshold, certify
from gradveil.audits.certificates import (
    ANY,
    CANNOT,
    LEVEL,
    LINEUP,
    STRONGEST,
    UNDECIDED,
    Bound,
    DecidedRow,
    PositiveControl,
    percent,
)
from gradveil.report.answer import baseline
from gradveil.report.audit import ATTACKER, DEFENSE
from gradveil.report.layout import Fitted
from gradveil.report.markup import Html, breakable, element, joined, scrolled
from gradveil.report.provenance import images_words

UNKNOWN = "unknown"
UNKNOWN_LOSS = (
    "Gamma is unknown where no model that was trained under the defense, or none that was trained "
    "without one, is among those audited."
)
SAME_WEIGHTS = (
    "Gamma was not measured where the weights are those of the model without a defense, bit for "
    "bit (equal digests): they do not show what training under the defense costs."
)
CLAIMED = (
    "The accuracies were measured on the weights audited; that these were trained under the "
    "defenses named is what their files say."
)
UNITS = {"psnr": "PSNR {:g} dB or more", "ssim": "SSIM {:g} or more", "lineup": "rank {:g}"}
CERTIFICATE_COLUMNS = ("defense", "attacker", "against", "reached", "delta\nat most")


def certify_cases(
    result: AuditResult, threshold: Threshold, cases: int | None = None
) -> list[tuple[CaseResult, Certificate]]:
    """Return a certificate for each case that the threshold can be measured on.

    The loss of accuracy is against the model of the same training step that was trained and
    audited without a defense. The bounds hold at once for as many `cases` as a command shows, by
    default those of the audit.
    """
    count = result.count if cases is None else cases
    return [(case, _certified(case, result, threshold, count)) for case in result.cases]


def _certified(
    case: CaseResult, result: AuditResult, threshold: Threshold, count: int
) -> Certificate:
    """Return the certificate of a case, with the baseline and positive controls of its audit."""
    made = certify(
        case,
        threshold,
        trained=case.trained_so,
        baseline=result.baselines.get(case.asked_step),
        cases=count,
        beside=result.cases,
    )
    without = baseline(case, [other for other in result.cases if other.of("attack")])
    if without is None or without is case or not made.bounded:
        return made
    held = certify(without, threshold, cases=count, beside=result.cases).bounded
    return replace(made, holds_without=without.name) if held else made


def certificate_table(certificates: Mapping[str, Certificate]) -> Table:
    """Make a table of certificates, by the names of their cases.

    A case has a row for each attack, then the strongest, any attacker, and the blind guess that
    reaches epsilon most often. What was asked for is decided in each.
    """
    first = next(iter(certificates.values()))
    threshold = first.threshold
    level = UNITS[threshold.metric].format(threshold.epsilon)
    kind = "bound over updates" if _in_batches(first.overall) else "exact bound"
    together = "it and gamma" if first.cases == 1 else f"it and gamma in all {first.cases} cases"
    title = (
        f"Share of images that reached {level}; delta: {kind}, one-sided {percent(first.each)}, "
        f"so that {together} hold together at {LEVEL:.0%}"
    )
    decided = _decided_head(threshold)
    columns = CERTIFICATE_COLUMNS if decided is None else (*CERTIFICATE_COLUMNS, decided)
    gives = {0: DEFENSE, 1: ATTACKER, 2: 9} | ({} if decided is None else {5: 9})
    made = Fitted(title, columns, gives)
    for name, certificate in certificates.items():
        names = iter([name])
        for row in certificate.rows:
            style = "bold" if row.kind == STRONGEST else ""
            cells = *_bound_cells(row.bound), *_decided(row, threshold)
            made.row(next(names, ""), row_name(row), row.against, *cells, style=style)
        for truth, bound in certificate.blind.bounds.items():
            cells = *_bound_cells(bound), *([] if decided is None else [""])
            made.row("", certificate.blind.attack, truth, *cells, style="dim")
        made.add_section()
    return made


def row_name(row: DecidedRow) -> str:
    """Write whose row it is: an attack, `strongest: NAME` or any attacker."""
    if row.attack is None:
        return ANY
    return f"{STRONGEST}: {row.attack}" if row.kind == STRONGEST else row.attack


def _decided_head(asked: Threshold) -> str | None:
    """Return the heading of the column of decisions; None where delta was not asked for."""
    if asked.delta is None:
        return None
    return f"delta {asked.delta:g}" if asked.gamma is None else "verdict"


def _decided(row: DecidedRow, asked: Threshold) -> list[str]:
    """Return what is decided in a row: a cell, or none where delta was not asked for."""
    if asked.delta is None:
        return []
    if row.verdict is not None:
        return [row.verdict]
    return [_holds(row.bounded, UNDECIDED if row.works else CANNOT)]


def _bound_cells(bound: Bound) -> tuple[str, list[str]]:
    upper = [f"{bound.upper:.3f}"]
    if bound.upper_failed is not None:
        upper.append(f"({bound.upper_failed:.3f} with {bound.failed} failed)")
    return f"{bound.hits}/{bound.n}", upper


def certificates_in_words(certificates: Mapping[str, Certificate], case: CaseResult) -> list[str]:
    """Return a sentence for each certificate, and the limits of all of them.

    `case` is any of the cases: its data and batch size are those of the whole audit.
    """
    lines = [f"{name}: {_certificate_words(made)}" for name, made in certificates.items()]
    joint = next(iter(certificates.values())).joint
    if joint is not None:
        lines.append(joint)
    if any(made.loss is None and not made.same_weights for made in certificates.values()):
        lines.append(UNKNOWN_LOSS)
    if any(made.same_weights for made in certificates.values()):
        lines.append(SAME_WEIGHTS)
    if any(made.loss is not None for made in certificates.values()):
        lines.append(CLAIMED)
    lines += _scored_words(case)
    lines += [f"The attacker's view: {case.note}."] if case.note else []
    return [*lines, _untested(case, next(iter(certificates.values())))]


def _scored_words(case: CaseResult) -> list[str]:
    """Warn of bounds that rest on images which the search of a defense has used."""
    scored = case.settings.get("victims_scored", 0)
    if not scored:
        return []
    return [
        f"Mind that the search that chose a defense has used {scored} of the "
        f"{case.settings['images']} images: these bounds do not hold for it."
    ]


def _certificate_words(certificate: Certificate) -> str:
    """State the bounds with n, decided where that was asked for, and what they rest on."""
    bound, loss, asked = certificate.overall, certificate.loss, certificate.threshold
    level = "rank 1 in the line-up" if asked.metric == LINEUP else str(asked)
    either = ", against the image used or the original" if len(certificate.strongest) > 1 else ""
    reached = (
        f"{bound.hits} of n = {bound.n} images{_updates(bound)} reached {level} by any attack "
        f"here{either}, so the share of such images is at most {bound.upper:.3g} (delta, "
        f"{percent(certificate.each)})"
    )
    if bound.upper_failed is not None:
        reached += f" (<= {bound.upper_failed:.3g} if the {bound.failed} failed count as reached)"
    lost = "not measured, the weights being the baseline's" if certificate.same_weights else UNKNOWN
    if loss is not None:
        side = f"each side {percent(certificate.each)}"
        lost = f"{loss.value:+.1%} ({loss.low:+.1%} to {loss.high:+.1%}, {side})"
    return (
        f"{reached}; accuracy loss gamma {lost}."
        f"{_decision(certificate)}{_control_words(certificate)}{_praise(certificate)}"
        f"{_reached_blindly(certificate)}{_recognized(certificate)}"
    )


def _recognized(certificate: Certificate) -> str:
    """Warn of a bound on likeness beside pictures that are recognized all the same."""
    asked, by = certificate.threshold, certificate.recognized
    if asked.metric == LINEUP or asked.delta is None or certificate.bounded is False or not by:
        return ""
    return f" Mind that pictures are recognized all the same: rank 1 by {by}."


def _in_batches(bound: Bound) -> bool:
    """Whether an update has several images."""
    return bound.updates < bound.n


def _updates(bound: Bound) -> str:
    """Say how many updates the images were shared in, where that is less than an update each."""
    return f" in {bound.updates} updates" if _in_batches(bound) else ""


def _decision(certificate: Certificate) -> str:
    """Say whether delta and gamma hold; the defense is private only if both were asked for."""
    asked = certificate.threshold
    bound = certificate.overall
    open_delta = f"{UNDECIDED} at n = {bound.n}{_updates(bound)}"
    delta = _holds(certificate.bounded, open_delta if certificate.working else CANNOT)
    gamma = _holds(certificate.accurate, UNDECIDED if certificate.loss else "not tested")
    if asked.delta is None and asked.gamma is None:
        return ""
    if asked.gamma is None:
        return f" delta {asked.delta:g} {delta}; gamma was not asked for."
    if asked.delta is None:
        return f" gamma {asked.gamma:g} {gamma}; delta was not asked for."
    return (
        f" ({asked}, {asked.delta:g}, {asked.gamma:g}): {certificate.verdict}: "
        f"delta {asked.delta:g} {delta}, gamma {asked.gamma:g} {gamma}."
    )


def _holds(decided: bool | None, otherwise: str) -> str:
    if decided is None:
        return otherwise
    return "holds" if decided else "does not hold"


def _control_words(certificate: Certificate) -> str:
    """Name the attacks that were not shown to work: that they reach few images shows nothing."""
    reasons: dict[str, list[str]] = {}
    for attack, control in certificate.controls.items():
        if not control.works:
            reasons.setdefault(_doubt(control, certificate.threshold), []).append(attack)
    if not reasons:
        return ""
    said = "; ".join(f"{', '.join(attacks)}: {reason}" for reason, attacks in reasons.items())
    if certificate.working:
        return f" Shown to work: {', '.join(certificate.working)}. Not shown to work: {said}."
    if certificate.bounded is False:
        return f" Not shown to work otherwise: {said}."
    return (
        f" No attack here was shown to work, so images that were not reached say nothing. {said}."
    )


def _praise(certificate: Certificate) -> str:
    """Say what keeps a low share from being praise of the defense.

    Without it the attacks may reach as few, and those known to break it may not have been run.
    """
    said = ""
    if certificate.holds_without:
        said += (
            f" Delta holds under {certificate.holds_without} too: that it holds is not shown to be "
            "this defense's doing."
        )
    if certificate.not_run and certificate.bounded is not False:
        said += f" Known to break this defense, and not run: {', '.join(certificate.not_run)}."
    return said


def _doubt(control: PositiveControl, asked: Threshold) -> str:
    """Say why a positive control does not show that its attack works."""
    if not control.n:
        return "no positive control"
    level = "rank 1" if asked.metric == LINEUP else str(asked)
    reached = f"{level} in {control.reached} of {control.n} images"
    doubt = "" if control.doubt is None else f", {control.doubt}"
    return f"its positive control does not show it ({reached}{doubt})"


def _reached_blindly(certificate: Certificate) -> str:
    """Warn of a threshold that a guess reaches: it says nothing about gradients."""
    blind = certificate.blind
    most = max(blind.bounds.values(), key=lambda bound: bound.hits)
    if not most.hits:
        return ""
    return f" Mind that {blind.attack} reaches it on {most.hits} of {most.n} without a gradient."


def _untested(case: CaseResult, certificate: Certificate) -> str:
    """Name the limits of a statement."""
    settings = case.settings
    batch = settings.get("batch_size", 1)
    images = f"{images_words(settings, certificate.overall.n)} ({case.classes_in_full})"
    said = (
        "Not tested: other attacks, settings and restarts than these; images unlike the "
        f"{images} attacked here; other models, seeds and stages of training; what many rounds "
        "give away."
    )
    if _in_batches(certificate.overall):
        said += f" Images of one batch of {batch} are not independent: bounds are over updates."
    elif batch > 1:  # records of format 2 do not say which images were shared together
        said += f" Images of one batch of {batch} count as independent, which they are not quite."
    return said


# The page

HEADS = ("defense", "accuracy lost", "attacker", "against", "reached", "at most")
REACHED = {
    "lineup": "A picture counts as reached if an attack brought it to rank 1 in its line-up.",
    "psnr": "A picture counts as reached if an attack came as close as {:g} dB PSNR.",
    "ssim": "A picture counts as reached if an attack came to an SSIM of {:g}.",
}


def certificate_section(
    result: AuditResult,
    threshold: Threshold | None,
    name_of: Callable[[CaseResult], str],
    count: int,
) -> Html | None:
    """Return the certificates of an audit for the page; without a threshold those of the line-up.

    The bounds hold at once for all `count` cases of the page. None where no case has a line-up and
    no threshold was asked for.
    """
    cases = result.cases
    if threshold is None:
        cases = tuple(case for case in cases if _has_ranks(case))
        threshold = Threshold(LINEUP)
    if not cases:
        return None
    found = [(case, _certified(case, result, threshold, count)) for case in cases]
    first = found[0][1]
    together = f", and together with the most accuracy lost with {LEVEL:.0%}"
    intro = (
        f"{REACHED[threshold.metric].format(threshold.epsilon)} Each attack has a row, and so has "
        f'the strongest; "{ANY}" counts a picture that any of them reached, and decides. '
        "From the pictures attacked here "
        'follows a bound for all pictures of their kind: "at most" is the largest share of them '
        f"that these attacks would reach, with {percent(first.each)} certainty"
        f"{together if first.joint is None else ''}. It says nothing of other attacks."
    )
    intro += "" if first.joint is None else f" {first.joint}"
    if _in_batches(first.overall):
        intro += " Pictures of one update are not independent, so the bounds are over updates."
    intro += f" Attacked here: {cases[0].classes_in_full}."
    decided = _decided_head(threshold)
    columns = HEADS if decided is None else (*HEADS, decided)
    heads = [element("th", head, scope="col") for head in columns]
    table = element(
        "table",
        element("thead", element("tr", *heads)),
        *(element("tbody", *_page_rows(name_of(case), made, columns)) for case, made in found),
        class_="bounds",
    )
    region = scrolled(table, "Table of certificates")
    notes = [(name_of(case), _page_words(made)) for case, made in found]
    words = [element("li", f"{name}: {said}") for name, said in notes if said]
    lines = element("ul", *words, class_="lines") if words else None
    warned = [element("p", line) for line in _scored_words(cases[0])]
    return joined([element("p", intro), *warned, region, lines])


def _has_ranks(case: CaseResult) -> bool:
    """Whether the case has line-ups; in records of format 2 there are no ranks."""
    first = case.of("attack")[:1]
    return bool(first and first[0].candidates and first[0].chance is None)


def _page_words(certificate: Certificate) -> str:
    """Return what is decided and what it rests on; nothing where there is nothing to say."""
    same = f" {SAME_WEIGHTS}" if certificate.same_weights else ""
    said = _decision(certificate), _control_words(certificate), _praise(certificate)
    return f"{''.join(said)}{_recognized(certificate)}{same}".strip()


def _page_rows(name: str, certificate: Certificate, columns: Sequence[str]) -> list[Html]:
    """Return the rows of a case, the first with its name and its accuracy.

    Each cell holds the head of its column too, which stands beside it where the page is narrow.
    """
    asked = certificate.threshold
    lines = [
        [row_name(row), row.against, *_page_cells(row.bound), *_decided(row, asked)]
        for row in certificate.rows
    ]
    empty = [] if asked.delta is None else [""]
    blind = certificate.blind
    lines += [
        [blind.attack, truth, *_page_cells(found), *empty] for truth, found in blind.bounds.items()
    ]
    over = str(len(lines))
    heads = [
        element("th", breakable(name), scope="rowgroup", rowspan=over),
        element("td", _lost(certificate), rowspan=over, data_head=columns[1]),
    ]
    return [
        element(
            "tr",
            *(heads if number == 0 else []),
            *(
                element("td", cell, data_head=head)
                for cell, head in zip(line, columns[2:], strict=True)
            ),
        )
        for number, line in enumerate(lines)
    ]


def _page_cells(bound: Bound) -> list[str]:
    high = bound.upper if bound.upper_failed is None else bound.upper_failed
    failed = f", {bound.failed} failed" if bound.failed else ""
    return [f"{bound.hits} of {bound.n}{_updates(bound)}{failed}", f"{high:.1%}"]


def _lost(certificate: Certificate) -> str:
    loss = certificate.loss
    if loss is None:
        return "not measured" if certificate.same_weights else "not known"
    if loss.low == loss.value == loss.high:  # the model that others are compared with
        return "0%"
    return f"{loss.value:+.1%} ({loss.low:+.1%} to {loss.high:+.1%})"
