"""An audit as a table, and what its controls say in words."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from gradveil.audits import AuditResult, CaseResult, Certificate, Row
from gradveil.audits.certificates import ANY, LEVEL, Bound
from gradveil.audits.results import NO_BETTER, TRUTHS
from gradveil.report.layout import Fitted
from gradveil.stats import EACH, Summary

COLUMNS = ("", "n", "PSNR dB", "median", "worst\n5%", "over\nblind", "SSIM", "identi-\nfied", "")
NAME, FLAG = 17, 10  # letters of "blind: class mean", and of a line of "no better than blind"
FAILS = "it fails even there, so low scores of it say nothing about the model"
TITLES = {"used": "Against the images that were used", "original": "Against the original images"}


def audit_tables(result: CaseResult) -> list[Table]:
    """One table where images were used as they are; else one against the used images and one against the originals."""
    return [
        audit_table(result, truth, TITLES[truth] if len(result.truths) > 1 else "")
        for truth in result.truths
    ]


def audit_table(result: CaseResult, truth: str, title: str) -> Table:
    """The positive controls use images as they are, so they stand in the first table alone."""
    settings = result.settings
    acted = " in training only" if settings.get("clean") else ""
    facts = f"{settings['model']} on {settings['data']}, defense {result.defense}{acted}, labels {settings['labels']}"
    facts = f"{facts}, seed {settings['seed']}"
    made = Fitted(
        f"{title}: {facts}" if title else facts, COLUMNS, {len(COLUMNS) - 1: FLAG, 0: NAME}
    )
    for kind in ("attack", "blind", "positive") if truth == "used" else ("attack", "blind"):
        for row in result.rows:
            if (row.truth, row.kind) == (truth, kind):
                made.row(*_cells(row), style="bold" if kind == "attack" else "")
        made.add_section()
    return made


def controls_in_words(result: CaseResult) -> list[str]:
    """What the controls say, one line each, and what that makes of the attacks."""
    rows = [row for row in result.rows if row.truth == "used"]
    lines = [_blind_words([row for row in rows if row.kind == "blind"])]
    positives = {row.attack: row for row in rows if row.kind == "positive"}
    lines += [positive_words(row) for row in positives.values()]
    works = {name: row.verdict.better for name, row in positives.items()}
    lines += [_attack_words(row, works.get(row.attack)) for row in rows if row.kind == "attack"]
    return [line for line in (*lines, *knowledge_words(result), *left_out_words(result)) if line]


def knowledge_words(result: CaseResult) -> list[str]:
    """What attackers knew beyond the labels."""
    knows: dict[str, str] = result.settings.get("knows", {})
    return [f"{name} was told: {told}." for name, told in knows.items() if told != "labels"]


def left_out_words(result: CaseResult) -> list[str]:
    reasons: dict[str, str] = result.settings.get("left_out", {})
    return [
        f"Left out: {name}: {reason.removeprefix('attack ')}." for name, reason in reasons.items()
    ]


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
    return max(
        (row for row in rows if row.kind == "blind"),
        key=lambda row: -1e9 if row.psnr.mean is None else row.psnr.mean,
    )


def positive_words(row: Row) -> str:
    model = "mlp" if row.attack == "closed-form" else "lenet"
    found = f"{number(row.psnr.mean)} dB, {number(row.over_blind.mean, '+.2f')} dB over blind, {row.identified} of {row.n} identified"
    says = f"{_shown_by(row)}: the attack works" if row.verdict.better else FAILS
    return f"Positive control: {row.attack} on an untrained {model}, one image a victim and one gradient: {found}: {says}."


def _shown_by(row: Row) -> str:
    """By which of the two tests it is better than a guess: images may be recognized that are no closer in dB."""
    tests = {"identification": row.verdict.p_identified, "dB over blind": row.verdict.p_over_blind}
    return "clearly better than chance by " + " and by ".join(
        f"{name} (p = {p:.2g})" for name, p in tests.items() if p < EACH
    )


def _attack_words(row: Row, works: bool | None) -> str:
    """`works`: in its positive control, if it has one."""
    failed = f", {row.failed} failed" if row.failed else ""
    tests = f"p = {row.verdict.p_over_blind:.2g} for dB over blind, p = {row.verdict.p_identified:.2g} for identification"
    low, high = row.identified_bounds
    seen = f"{row.identified} of {row.n} identified (95%: {low:.1%} to {high:.1%}){failed}; {tests}"
    if row.verdict.better:
        return f"{row.attack}: better than blind: {seen}."
    because = ", and its positive control fails too: try more steps or another attack before calling the model safe"
    because = {
        True: "",
        False: because,
        None: ", and it has no positive control: it needs a defense to undo",
    }[works]
    return f"{row.attack}: {NO_BETTER}: {seen}{because}."


def spread(values: Summary, form: str = ".2f") -> str:
    return number(values.mean, form) + ("" if values.std is None else f" ± {values.std:{form}}")


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


RESULTS = (
    "defense",
    "accu-\nracy",
    "strongest attacker",
    "PSNR\ndB",
    "over\nblind",
    "SSIM",
    "identi-\nfied",
)
GRID_COLUMNS = ("defense", "attacker", "PSNR dB", "over\nblind", "SSIM", "identi-\nfied")
GRID_TITLES = {
    "used": "Every attacker, against the images that were used",
    "original": "Every attacker, against the original images",
}
DEFENSE, ATTACKER = 14, 23  # letters of "clean gradient", and of the longest name of an attack


def several_tables(result: AuditResult) -> list[Table]:
    """The defences' results; every attacker against the used images; and against the originals where a defence changes images."""
    changed = [part for part in result.cases if len(part.truths) > 1]
    tables = [results_table(result), attackers_table(result.cases, "used")]
    return [*tables, attackers_table(changed, "original")] if changed else tables


def results_table(result: AuditResult) -> Table:
    """One row for each defence: its strongest attacker, by identification, then by dB over blind."""
    settings = result.settings
    facts = f"{settings['model']} on {settings['data']}, labels {settings['labels']}, seed {settings['seed']}"
    made = Fitted(f"What is left of each defense: {facts}", RESULTS, {0: DEFENSE, 2: ATTACKER})
    for part in result.cases:
        row = part.strongest
        against = "\n (original image)" if row.truth != TRUTHS[0] else ""
        made.row(
            name(part),
            accuracy(part),
            row.attack + against,
            number(row.psnr.mean, ".1f"),
            *_scores(row),
        )
    return made


def attackers_table(parts: Sequence[CaseResult], truth: str) -> Table:
    """Defences by attackers, the strongest in bold; below each defence its best blind guess."""
    made = Fitted(GRID_TITLES[truth], GRID_COLUMNS, {0: DEFENSE, 1: ATTACKER})
    for part in parts:
        lines = iter(name(part).split("\n"))
        rows = [row for row in part.rows if row.truth == truth]
        best = part.strongest
        for row in (row for row in rows if row.kind == "attack"):
            style = "bold" if (row.attack, row.truth) == (best.attack, best.truth) else ""
            made.row(
                next(lines, ""),
                row.attack + _knows(part, row.attack),
                spread(row.psnr, ".1f"),
                *_scores(row),
                style=style,
            )
        blind = best_blind(rows)
        made.row(
            "\n".join(lines), blind.attack, spread(blind.psnr, ".1f"), *_scores(blind), style="dim"
        )
        if truth == TRUTHS[0]:
            for row in (row for row in rows if row.kind == "positive"):
                made.row(
                    "",
                    f"positive: {row.attack}",
                    spread(row.psnr, ".1f"),
                    *_scores(row),
                    style="dim",
                )
        made.add_section()
    return made


def several_in_words(result: AuditResult) -> list[str]:
    """The controls, what the clean rows mean, models that are not what a reader expects, and what was left out."""
    labels = {"known": "the labels", "inferred": "the labels it inferred"}[
        result.settings["labels"]
    ]
    lines = [
        "Strongest: the attacker that identifies most images, of equal ones the one with the most dB over blind.",
        f"Each attacker knows the model, what was shared and {labels}; what else it is told stands below its name. ≤: {NO_BETTER}.",
    ]
    first = result.cases[0]
    lines += [
        positive_words(row) for row in first.rows if (row.kind, row.truth) == ("positive", "used")
    ]
    said: dict[str, list[str]] = {}
    for part in result.cases:
        for word in _part_words(part):
            said.setdefault(word, []).append(part.name)
    everywhere = len(result.cases)
    return lines + [
        f"{'All' if 1 < everywhere == len(names) else '; '.join(names)}: {word}"
        for word, names in said.items()
    ]


def name(part: CaseResult) -> str:
    """The name of a case on up to three lines."""
    return part.name.replace(", ", "\n")


def accuracy(part: CaseResult) -> str:
    """Marked where the model was trained under something else."""
    if part.model is None:
        return "-"
    return f"{part.model.accuracy:.1%}" + ("" if part.model.under == part.defense else "*")


def _part_words(part: CaseResult) -> list[str]:
    settings, found = part.settings, part.model
    words = []
    if part.clean:
        words.append(
            "as published: the defense acts in training only, and the clean gradient is attacked."
        )
    if found is not None and found.under != part.defense:
        words.append(
            f"* the accuracy is that of a model trained under {found.under or 'what its file does not say'}."
        )
    if part.settings["checkpoint"] is None:
        words.append("the model is untrained.")
    elif found is None:
        words.append(
            "the checkpoint is of the plain model, so what the defense adds to it is untrained, and its accuracy unknown."
        )
    failed = {
        row.attack: row.failed
        for row in part.rows
        if row.failed and row.truth == "used" and row.kind == "attack"
    }
    words += [
        f"{attack} failed on {count} image(s), which count as tested."
        for attack, count in failed.items()
    ]
    return words + [
        f"left out: {attack}: {reason.removeprefix('attack ')}."
        for attack, reason in settings.get("left_out", {}).items()
    ]


def _knows(part: CaseResult, attack: str) -> str:
    _, _, more = str(part.settings.get("knows", {}).get(attack, "labels")).partition(", ")
    return "".join(f"\n + {one}" for one in more.split(", ") if one)


def _scores(row: Row) -> list[str]:
    mark = f"{row.identified}/{row.n}" + (" ≤" if NO_BETTER in row.flags else "  ")
    return [number(row.over_blind.mean, "+.1f"), number(row.ssim.mean, ".3f"), mark]


UNKNOWN = "Gamma is unknown where the accuracy of the model, or of one trained without a defense and audited beside it, is not known."
UNITS = {"psnr": "PSNR {:g} dB", "ssim": "SSIM {:g}"}
CERTIFICATE_COLUMNS = ("defense", "attacker", "against", "reached", "delta\nat most")


def certificate_table(certificates: Mapping[str, Certificate]) -> Table:
    """By the defence's name: each attack, the strongest in bold, all together, and the blind guess that reaches epsilon most often."""
    threshold = next(iter(certificates.values())).threshold
    title = f"Reached {UNITS[threshold.metric].format(threshold.epsilon)} or more; delta: exact bound, one-sided {LEVEL:.0%}"
    made = Fitted(title, CERTIFICATE_COLUMNS, {0: 14, 1: 23, 2: 8})
    for defense, one in certificates.items():
        first = defense
        for claim in one.claims:
            for truth, bound in claim.bounds.items():
                made.row(
                    first,
                    claim.attack,
                    truth,
                    *_certificate_cells(bound),
                    style="bold" if claim.attack == one.strongest else "",
                )
                first = ""
        made.row(
            "",
            ANY,
            "either" if len(one.blind.bounds) > 1 else next(iter(one.blind.bounds)),
            *_certificate_cells(one.overall),
        )
        for truth, bound in one.blind.bounds.items():
            made.row("", one.blind.attack, truth, *_certificate_cells(bound), style="dim")
        made.add_section()
    return made


def certificates_in_words(certificates: Mapping[str, Certificate], result: CaseResult) -> list[str]:
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


def untested(result: CaseResult, one: Certificate) -> str:
    """What the statement does not cover."""
    batch = result.settings.get("batch_size", 1)
    together = (
        f" Images of one batch of {batch} count as independent, which they are not quite."
        if batch > 1
        else ""
    )
    images = f"the {one.overall.n} of {result.settings['data']} {result.settings.get('split', 'test')} attacked here"
    return (
        f"Not tested: other attacks, settings and restarts than these; images unlike {images}; other models, seeds and stages of "
        f"training; what many rounds give away.{together}"
    )


def _decision(one: Certificate) -> str:
    """Privacy is a matter of both delta and gamma: with one of them alone only that one is decided."""
    asked = one.threshold
    delta = {True: "holds", False: "does not hold", None: f"undecided at n = {one.overall.n}"}[
        one.bounded
    ]
    gamma = {
        True: "holds",
        False: "does not hold",
        None: "undecided" if one.loss else "not tested",
    }[one.accurate]
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
    return (
        f" Mind that {one.blind.attack} reaches it on {most.hits} of {most.n} without a gradient."
        if most.hits
        else ""
    )


def _certificate_cells(bound: Bound) -> list[str]:
    failed = (
        ""
        if bound.upper_failed is None
        else f"\n({bound.upper_failed:.3f} with {bound.failed} failed)"
    )
    return [f"{bound.hits}/{bound.n}", f"{bound.upper:.3f}{failed}"]
