"""An audit as tables and in sentences, with a single case or with several."""

from collections.abc import Callable, Sequence

from rich.table import Table

from gradveil.attacks import PRESETS
from gradveil.audits import AuditResult, CaseResult, Row
from gradveil.audits.attackers import without_name
from gradveil.audits.results import NO_BETTER, TESTED, TOO_FEW
from gradveil.audits.stage import CLIENTS, GRADIENTS
from gradveil.controls import TRUTHS
from gradveil.core.types import MEANINGS
from gradveil.report.layout import Fitted
from gradveil.stats import EACH, Summary

USED, ORIGINAL = TRUTHS

GUESS, FLAG = 17, 10  # letters of "blind: class mean", and of a line of "no better than blind"
DEFENSE, ATTACKER = 14, 23  # letters of "clean gradient", and of the longest name of an attack


def audit_tables(result: AuditResult) -> list[Table]:
    """Make the tables of an audit: its attacks if it has a single case, else its defenses."""
    return case_tables(result.cases[0]) if len(result.cases) == 1 else several_tables(result)


def audit_in_words(
    result: AuditResult,
    name_of: Callable[[CaseResult], str] | None = None,
    *,
    on_page: bool = False,
) -> list[str]:
    """Return sentences on the controls and on everything that a reader would not expect.

    `name_of` is what cases are called, where not by their names. They stand below the tables of a
    terminal, or `on_page`.
    """
    if len(result.cases) == 1:
        return case_in_words(result.cases[0])
    return several_in_words(result, name_of, on_page=on_page)


def spread(values: Summary, form: str = ".2f") -> str:
    """Write a mean with its standard deviation, where there is any."""
    return number(values.mean, form) + ("" if values.std is None else f" ± {values.std:{form}}")


def number(value: float | None, form: str = ".2f") -> str:
    """Write a number; a dash where it is not known."""
    return "-" if value is None else format(value, form)


def rank_cells(row: Row) -> list[str]:
    """Write what else a line-up tells: rank 5 or better, the mean percentile of the rank, and p.

    p against chance is that of the tests alone which are corrected for their number.
    """
    top5 = "-" if row.top5 is None else f"{row.top5}/{row.n}"
    tested = row.candidates and row.kind in TESTED
    p = f"{row.verdict.p_identified:.2g}" if tested else ""
    return [top5, number(row.percentile, ".0%"), p]


def best_blind(rows: Sequence[Row]) -> Row:
    """Return the blind guess with the highest mean PSNR."""
    return max(
        (row for row in rows if row.kind == "blind"),
        key=lambda row: -1e9 if row.psnr.mean is None else row.psnr.mean,
    )


def chosen_blind(rows: Sequence[Row]) -> Row:
    """Return the blind guess that gains are measured from, whose own gain is 0 for every image.

    In older records there is none: gains were over the best guess for each image.
    """
    levels = [row for row in rows if row.kind == "blind" and row.over_blind.n]
    zero = [row for row in levels if row.over_blind.low == row.over_blind.high == 0]
    return best_blind(zero or rows)


def lineup_head(cases: Sequence[CaseResult]) -> str:
    """Return the heading of the column with the headline measure."""
    sizes = {record.candidates for case in cases for record in case.records[:1]}
    size = max(sizes, default=0)
    older = any(record.chance is not None for case in cases for record in case.records[:1])
    if older:
        return f"among\n{size:,}"
    return f"line-up\nof {size}" if size else "line-up"


# A single case

RANKS = ("top 5", "mean\nrank", "p")
CASE_COLUMNS = (
    "",
    "n",
    "{lineup}",
    "95%",
    *RANKS,
    "PSNR dB",
    "median",
    "worst\n5%",
    "over\nblind",
    "SSIM",
    "",
)
LUCKY = 2  # times as many of rank 1 as by luck at most: no more than luck
CASE_EXTRAS = (8, 5, 6, 4)  # the median; mean rank, p and top 5 stand in the sentences too
CONTROLS = ("bar", "ceiling", "sham")
CASE_KINDS = {
    USED: ("attack", "blind", *CONTROLS, "positive"),
    ORIGINAL: ("attack", "blind", *CONTROLS),
}
AGAINST = {USED: "against the images that were used", ORIGINAL: "against the original images"}


def case_tables(case: CaseResult) -> list[Table]:
    """Make a table of the attacks and controls against the images used.

    Where the defense changes images, a second table is against the originals.
    """
    settings = case.settings
    acted = " in training only" if settings.get("clean") else ""
    facts = (
        f"{settings['model']} on {settings['data']}, defense {case.defense}{acted}, "
        f"labels {settings['labels']}, seed {settings['seed']}"
    )
    several = len(case.truths) > 1
    return [
        _case_table(case, truth, (f"{AGAINST[truth].capitalize()}: " if several else "") + facts)
        for truth in case.truths
    ]


def _case_table(case: CaseResult, truth: str, title: str) -> Table:
    """Positive controls use images as they are, so they stand in the first table alone."""
    columns = [name.format(lineup=lineup_head([case])) for name in CASE_COLUMNS]
    made = Fitted(title, columns, {len(columns) - 1: FLAG, 0: GUESS}, CASE_EXTRAS)
    for kind in CASE_KINDS[truth]:
        rows = [row for row in case.rows if (row.truth, row.kind) == (truth, kind)]
        for row in rows:
            made.row(*_case_cells(row), style="bold" if kind == "attack" else "")
        if rows:
            made.add_section()
    return made


def _case_cells(row: Row) -> list[str | Sequence[str]]:
    return [
        row.title,
        str(row.n),
        row.lineup,
        row.interval,
        *rank_cells(row),
        spread(row.psnr),
        number(row.psnr.median, ".1f"),
        number(row.psnr.worst5, ".1f"),
        number(row.over_blind.mean, "+.1f"),
        number(row.ssim.mean, ".3f"),
        row.flags,
    ]


def case_in_words(case: CaseResult) -> list[str]:
    """Return a sentence for each control and attack, for what was told, and for what is left out.

    An attack that is no better than blind is judged by its positive control.
    """
    positives = {
        row.attack: row for row in case.rows if (row.kind, row.truth) == ("positive", USED)
    }
    lines = []
    for truth in case.truths:
        rows = [row for row in case.rows if row.truth == truth]
        against = f" {AGAINST[truth]}" if len(case.truths) > 1 else ""
        lines += _blind_words(rows, against)
        if truth == USED:
            lines += [_positive_words(row, [case]) for row in positives.values()]
        attacks = [row for row in rows if row.kind == "attack"]
        for row in attacks:
            lines.append(_attack_words(row, positives.get(row.attack), against, _undoes(case, row)))
        if truth == USED:
            lines += [f"{row.attack}: {row.failures}." for row in attacks if row.failed]
    knows: dict[str, str] = case.settings.get("knows", {})
    return [
        *_victim_words(case),
        *lines,
        *_control_words(case),
        *(f"{line[0].upper()}{line[1:]}" for line in _search_words(case)),
        *(f"{attack} was told: {told}." for attack, told in knows.items() if told != "labels"),
        *(f"Left out: {line}" for line in _left_out(case)),
    ]


def _victim_words(case: CaseResult) -> list[str]:
    """Say which classes were attacked, and how the line-ups were made."""
    first, lines = case.records[0], [f"Images attacked: {case.classes}."]
    if "1 class only" in case.classes:
        lines = [f"Warning: the images attacked are of {case.classes}: others may leak otherwise."]
    if case.passed_over:
        lines.append(f"Warning: {case.passed_over}.")
    lines += [f"The attacker's view: {case.note}."] if case.note else []
    lines += _scored_words(case)
    if first.chance is not None:
        return lines
    if not first.candidates:
        return [*lines, f"No line-up: {case.settings.get('no_lineup', '')}."]
    after = ", put through the victim's own draws of the defense" if len(case.truths) > 1 else ""
    size = first.candidates
    return [
        *lines,
        f"Line-up: does the reconstruction resemble the true picture more than {size - 1} others "
        f"of its class{after}? By chance {1 / size:.1%} do.",
    ]


def _scored_words(case: CaseResult) -> list[str]:
    """Say whether images that the search of a defense has scored were attacked."""
    scored, attacked = (case.settings.get(name, 0) for name in ("scored", "victims_scored"))
    if attacked:
        return [
            f"Warning: {attacked} of the {case.settings['images']} images attacked were used by "
            "the search that chose a defense, which may look better on them than on others."
        ]
    if scored:
        return [f"None of them is among the {scored:,} that the search of a defense has scored."]
    return []


def _blind_words(rows: Sequence[Row], against: str) -> list[str]:
    """Say which guess the gains are measured from."""
    guess = chosen_blind(rows)
    if guess.psnr.mean is None:
        return []
    return [
        f"Blind guesses look at no gradient: gains{against} are over "
        f"{guess.attack.removeprefix('blind: ')}, the best on public images, which scores "
        f"{number(guess.psnr.mean)} dB here; PSNR up to there shows nothing by itself."
    ]


def _control_words(case: CaseResult) -> list[str]:
    """Say what the sham, the ceilings and the correction for many tests mean."""
    rows = {(row.kind, row.attack): row for row in case.rows if row.truth == USED}
    shams = [row for (kind, _), row in rows.items() if kind == "sham"]
    ceilings = [row for (kind, _), row in rows.items() if kind == "ceiling"]
    lines = []
    strongest = case.strongest.attack
    for row in shams:
        others = f"Sham: {strongest} on updates of other images of the same labels"
        if row.failed == row.n:
            lines.append(f"{others} fails on all {row.n}, and shows nothing.")
            continue
        lines.append(
            f"{others} has rank 1 in {row.lineup} (p = {row.verdict.p_identified:.2g}), SSIM "
            f"{number(row.ssim.mean, '.3f')}: what its prior gives without the victim's update."
        )
    if ceilings:
        said = ", ".join(
            f"{row.attack} {'not made' if row.failed == row.n else row.lineup}" for row in ceilings
        )
        lines.append(
            f"Ceilings of the line-up: {said}. The first has noise of the size of {strongest}'s "
            "error; the second ranks the candidates by their gradients."
        )
    lines += [
        f"Warning: by their gradients {row.lineup} of the images given are recognized, as by luck: "
        "unless the defense hides even that, the clients did not use these images, or not in this "
        "order, and nothing here says what their updates give away."
        for row in ceilings
        if case.settings["data"] == CLIENTS and row.attack == GRADIENTS and row.failed < row.n
        if row.identified * row.candidates <= LUCKY * row.n
    ]
    tests = max(row.verdict.tests for row in case.rows)
    alone = ""
    if any(kind == "positive" and row.candidates for (kind, _), row in rows.items()):
        alone = f"; a positive control also at {EACH:.1%} by its line-up alone"
    lines.append(f"Better than blind: at 5% over all {tests} tests together (Holm){alone}.")
    return lines


def _positive_words(row: Row, cases: Sequence[CaseResult]) -> str:
    """Say how an attack did on the easy model; the cases tell whether it undoes a defense."""
    undone = [case for case in cases if _undoes(case, row)]
    random = any(MEANINGS["random_layers"].short in _told(case, row) for case in undone)
    preset = PRESETS.get(row.attack)
    model = "mlp" if random or (preset and preset.easy_model == "mlp") else "lenet"
    under = ", what it undoes at a mild setting" if undone else ""
    says = f"{NO_BETTER} even there, so low scores of it say nothing about the model"
    if row.doubt is None:
        says = f"{_shown_by(row)}: the attack works"
    elif row.doubt == TOO_FEW:
        among = f"among {row.candidates} candidates" if row.candidates else "without a line-up"
        says = f"{row.n} {among} are {TOO_FEW} whether the attack works"
    return (
        f"Positive control: {row.attack} on an untrained {model}{under}, one image a victim "
        f"and one gradient: {number(row.psnr.mean)} dB, {number(row.over_blind.mean, '+.2f')} dB "
        f"over blind, {_lineup_words(row)}: {says}."
    )


def _lineup_words(row: Row) -> str:
    return f"rank 1 in {row.lineup} line-ups" if row.candidates else "no line-up"


def _rank_words(row: Row) -> str:
    """Say how often the rank is 5 or better, and its mean."""
    if row.top5 is None or row.percentile is None:
        return ""
    return f", top 5 in {row.top5}/{row.n}, mean percentile of the rank {row.percentile:.0%}"


def _shown_by(row: Row) -> str:
    """Name the tests that show it: images may be recognized that are no closer in dB."""
    tests = {"the line-up": row.verdict.p_identified, "dB over blind": row.verdict.p_over_blind}
    return "clearly better than chance by " + " and by ".join(
        f"{test} (p = {p:.2g})" for test, p in tests.items() if p < EACH
    )


def _attack_words(row: Row, positive: Row | None, against: str, undoes: bool) -> str:
    """Say how an attack did; `positive` is the row of its positive control, None without any.

    `undoes` tells whether the attack undoes a defense, and so needs one that is mild there.
    """
    low, high = row.identified_bounds
    failed = f", {row.failed} failed" if row.failed else ""
    tested = f" (95%: {low:.1%} to {high:.1%}, p = {row.verdict.p_identified:.2g})"
    figures = (
        f"{_lineup_words(row)}{tested if row.candidates else ''}{_rank_words(row)}{failed}; "
        f"p = {row.verdict.p_over_blind:.2g} for dB over blind{certain_words(row)}"
    )
    if row.doubt is None:
        return f"{row.attack}{against}: better than blind: {figures}."
    because = ""
    if positive is None:
        because = ", and it has no positive control"
        because += ": it undoes a defense that declares no mild setting" if undoes else ""
    elif positive.doubt == NO_BETTER:
        because = (
            f", and its positive control is {NO_BETTER} ({_lineup_words(positive)}): try more "
            "steps or another attack before concluding anything about the model"
        )
    return f"{row.attack}{against}: {row.doubt}: {figures}{because}."


def _undoes(case: CaseResult, row: Row) -> bool:
    """Whether the attack is told more than anyone may know without a defense."""
    return not _told(case, row) <= {"labels", "labels it inferred", MEANINGS["means"].short}


def _told(case: CaseResult, row: Row) -> set[str]:
    """Return what the attack is told in this case, in words."""
    return {*str(case.settings.get("knows", {}).get(row.attack, "labels")).split(", ")}


def certain_words(row: Row) -> str:
    """Say how many images the attack calls exact, and how many of them are not."""
    if row.certain is None:
        return ""
    wrong = f", {row.certain_wrong} of them wrongly" if row.certain_wrong else ""
    return f"; exact: {row.certain} of {row.n}, certain without the truth{wrong}"


def _search_words(case: CaseResult) -> list[str]:
    """Say how many restarts and steps the attacks have, heats first; nothing of older records."""
    groups: dict[str, list[str]] = {}
    for attack, search in (case.settings.get("searches") or {}).items():
        groups.setdefault(search, []).append(attack)
    said = "; ".join(f"{', '.join(attacks)}: {search}" for search, attacks in groups.items())
    return [f"restarts x steps of an image: {said}."] if said else []


def _left_out(case: CaseResult) -> list[str]:
    """Return the attacks that do not suit the case, each with the reason."""
    reasons: dict[str, str] = case.settings.get("left_out", {})
    return [f"{attack}: {without_name(attack, reason)}." for attack, reason in reasons.items()]


# Several cases

STRONGEST_COLUMNS = (
    "defense",
    "accu-\nracy",
    "strongest attacker",
    "{lineup}",
    "95%",
    *RANKS,
    "PSNR\ndB",
    "over\nblind",
    "SSIM",
)
STRONGEST_EXTRAS = (6, 7, 5)
ATTACKER_COLUMNS = (
    "defense",
    "attacker",
    "{lineup}",
    "95%",
    *RANKS,
    "PSNR dB",
    "over\nblind",
    "SSIM",
)
ATTACKER_EXTRAS = (5, 6, 4)
ATTACKER_TITLES = {
    USED: "Every attacker, against the images that were used",
    ORIGINAL: "Every attacker, against the original images",
}


MEASURED_ON = {
    "others": "of the images given that are no victims",
    "victims": "images, the victims themselves: there are no others",
}


def several_tables(result: AuditResult) -> list[Table]:
    """Make a table of the strongest attacker on each defense, and a table of every attacker.

    A third is against the original images, for the defenses that change images.
    """
    changed = [case for case in result.cases if len(case.truths) > 1]
    tables = [_strongest_table(result), _attackers_table(result.cases, USED)]
    return [*tables, _attackers_table(changed, ORIGINAL)] if changed else tables


def _strongest_table(result: AuditResult) -> Table:
    settings = result.settings
    title = (
        f"What is left of each defense: {settings['model']} on {settings['data']}, "
        f"labels {settings['labels']}, seed {settings['seed']}"
    )
    columns = [name.format(lineup=lineup_head(result.cases)) for name in STRONGEST_COLUMNS]
    made = Fitted(title, columns, {0: DEFENSE, 2: ATTACKER}, STRONGEST_EXTRAS)
    for case in result.cases:
        row = case.strongest
        attacker = [row.attack, *([] if row.truth == USED else [" (original image)"])]
        figures = [*_lineup_cells(row), number(row.psnr.mean, ".1f"), *_scores(row)]
        made.row(_on_lines(case), accuracy_words(case), attacker, *figures)
    return made


def _attackers_table(cases: Sequence[CaseResult], truth: str) -> Table:
    """Below a defense's attackers stand the blind guess to beat and the other controls, dim."""
    columns = [name.format(lineup=lineup_head(cases)) for name in ATTACKER_COLUMNS]
    made = Fitted(ATTACKER_TITLES[truth], columns, {0: DEFENSE, 1: ATTACKER}, ATTACKER_EXTRAS)
    for case in cases:
        lines = iter(_on_lines(case))
        rows = [row for row in case.rows if row.truth == truth]
        best = case.strongest
        for row in rows:
            if row.kind == "attack":
                strongest = (row.attack, row.truth) == (best.attack, best.truth)
                cells = _attacker_cells([row.attack, *_knows(case, row.attack)], row)
                made.row(next(lines, ""), *cells, style="bold" if strongest else "")
        blind = chosen_blind(rows)
        made.row([*lines], *_attacker_cells([blind.attack], blind), style="dim")
        for row in rows:
            if row.kind in CASE_KINDS[truth][2:]:
                made.row("", *_attacker_cells([row.title], row), style="dim")
        made.add_section()
    return made


def _attacker_cells(attacker: Sequence[str], row: Row) -> list[str | Sequence[str]]:
    return [attacker, *_lineup_cells(row), spread(row.psnr, ".1f"), *_scores(row)]


def _lineup_cells(row: Row) -> list[str]:
    return [_mark(row), row.interval, *rank_cells(row)]


def _mark(row: Row) -> str:
    marks = {NO_BETTER: " ≤", TOO_FEW: " ?"}
    return row.lineup + next((marks[flag] for flag in row.flags if flag in marks), "  ")


def _scores(row: Row) -> list[str]:
    return [number(row.over_blind.mean, "+.1f"), number(row.ssim.mean, ".3f")]


def _on_lines(case: CaseResult) -> list[str]:
    """Write the name of a case on up to three lines."""
    return case.name.split(", ")


def accuracy_words(case: CaseResult) -> str:
    """Write the accuracy, marked where the model is not known to be trained under the defense."""
    if case.model is None:
        return "-"
    return f"{case.model.accuracy:.1%}" + ("" if case.model.under == case.defense else "*")


def _knows(case: CaseResult, attack: str) -> list[str]:
    """Write lines below an attacker's name: its knowledge beyond the labels."""
    _, _, more = str(case.settings.get("knows", {}).get(attack, "labels")).partition(", ")
    return [f" + {known}" for known in more.split(", ") if known]


def several_in_words(
    result: AuditResult,
    name_of: Callable[[CaseResult], str] | None = None,
    *,
    on_page: bool = False,
) -> list[str]:
    """Return sentences on the columns, on the positive controls, and on unusual cases."""
    tests = f"at 5% over all {max(row.verdict.tests for row in result.cases[0].rows)} tests"
    if on_page:
        told = 'under "What the attacker was given"'
        marks = f'"{NO_BETTER}": {tests} together (Holm).'
        guess = "the guess among each defense's controls that was"
    else:
        told = "below its name"
        marks = f"≤: {NO_BETTER}, {tests} together (Holm); ?: {TOO_FEW}."
        guess = "the guess below each defense's attackers,"
    labels = {"known": "the labels", "inferred": "the labels it inferred"}
    lines = [
        *_victim_words(result.cases[0]),
        "Strongest: the attacker with most images of rank 1 in the line-up, of equal ones the one "
        "with the most dB over blind. Its 95% interval is not corrected for that choice.",
        f"Each attacker knows the model, what was shared and {labels[result.settings['labels']]}; "
        f"what else it is told stands {told}. {marks} dB over blind are over {guess} chosen on "
        "public images.",
    ]
    for row in result.cases[0].rows:
        if (row.kind, row.truth) == ("positive", USED):
            lines.append(_positive_words(row, result.cases))
    said: dict[str, list[str]] = {}
    for case in result.cases:
        for sentence in _unusual(case):
            said.setdefault(sentence, []).append(name_of(case) if name_of else case.name)
    for sentence, names in said.items():
        everywhere = 1 < len(result.cases) == len(names)
        lines.append(f"{'All' if everywhere else '; '.join(names)}: {sentence}")
    return lines


def _unusual(case: CaseResult) -> list[str]:
    """Return sentences on a case that is not what a reader expects, without its name."""
    model = case.model
    lines = []
    if case.clean:
        lines.append(
            "as published: the defense acts in training only, and the clean gradient is attacked."
        )
    if model is not None and model.under != case.defense:
        under = f"that of a model trained under {model.under}"
        if not model.under:
            under = "of weights whose file does not say under which defense they were trained"
        lines.append(f"* the accuracy is {under}.")
    if model is not None and model.measured_on in MEASURED_ON:
        lines.append(
            f"the accuracy was measured on {model.tested} {MEASURED_ON[model.measured_on]}."
        )
    if case.settings["checkpoint"] is None:
        lines.append("the model is untrained.")
    elif model is None:
        lines.append(
            "the checkpoint is of the plain model, so what the defense adds to it is untrained, "
            "and its accuracy unknown."
        )
    for row in case.rows:
        if row.failed and (row.kind, row.truth) == ("attack", USED):
            lines.append(f"{row.attack}: {row.failures}; they count as tested.")
        if row.certain is not None and (row.kind, row.truth) == ("attack", USED):
            lines.append(f"{row.attack}{certain_words(row).replace(';', ':', 1)}.")
    lines += _search_words(case)
    return lines + [f"left out: {line}" for line in _left_out(case)]
