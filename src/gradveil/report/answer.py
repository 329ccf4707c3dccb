"""The answer of an audit in two sentences, what its attackers were given, and what is untested."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from gradveil.audits import AuditResult, CaseResult, Row
from gradveil.audits.attackers import without_name
from gradveil.audits.records import by_update
from gradveil.audits.results import LEVEL, NO_BETTER, TOO_FEW
from gradveil.core.errors import GradveilError
from gradveil.core.types import Protocol
from gradveil.report.audit import ORIGINAL, USED, number
from gradveil.report.provenance import images_words
from gradveil.stats import sign_test

Tone = Literal["leak", "unclear", "none"]
BARE = {
    "none": "Without a defense",
    "policy:none": "With random crops and mirror images alone",
}
"""Cases that defenses are compared with; the second is what searches compare policies with."""


@dataclass(frozen=True)
class Answer:
    """The answer: `tone` says whether a leak was shown, `sentences` say it to a non-expert.

    `worst` is the case that the first sentence is about, `best` that of the defense that leaks
    least; None where no defense was audited.
    """

    tone: Tone
    sentences: tuple[str, ...]
    worst: CaseResult
    best: CaseResult | None


def attacked(result: AuditResult) -> list[CaseResult]:
    """Return the cases with an attacked image; refuse an audit that has none."""
    found = [case for case in result.cases if case.of("attack")]
    if not found:
        raise GradveilError(f"{result.out} holds no attacked image yet: run the same command again")
    return found


def make_answer(result: AuditResult) -> Answer:
    """Find the strongest attack without a defense, and the defense that leaves least to attack.

    A defense is judged by its worst case, over all steps of training, beside its own baseline.
    Without a case of no defense, or where a defense alone was shown to leak, the first sentence is
    about the worst case of all.
    """
    cases = attacked(result)
    named = [case for case in cases if not case.control]
    defended: dict[tuple[str, bool], CaseResult] = {}
    for case in cases:
        if case.defense not in BARE and not case.control:
            key = case.defense, case.clean
            defended[key] = max(defended.get(key, case), case, key=leakage)
    others = [case for case in defended.values() if not case.clean or len(defended) == 1]
    best = min(others, key=leakage) if others else None
    worst = max(_bare(best, cases) or named or cases, key=leakage)
    if worst.strongest.doubt is not None:
        leaking = [case for case in others if case.strongest.doubt is None]
        worst = max(leaking, key=leakage, default=worst)
    row = worst.strongest
    tone: Tone = "leak" if row.doubt is None else "unclear"
    if row.doubt == NO_BETTER and row.failed < row.n and _works(worst, cases[0]):
        tone = "none"
    second = _best_words(best, others, worst, cases)
    return Answer(tone, (_worst_words(worst, cases[0]), second), worst, best)


def _bare(best: CaseResult | None, cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Return the cases without a defense, or else those of crop and flip beside the best one."""
    if found := [case for case in cases if case.defense == "none"]:
        return found
    beside = cases
    if best is not None:
        steps = [case for case in cases if case.defense == best.defense]
        beside = [other for case in steps if (other := baseline(case, cases)) is not None]
    return [case for case in beside if case.defense in BARE]


def baseline(case: CaseResult, cases: Sequence[CaseResult]) -> CaseResult | None:
    """Return the case that a defense is compared with, of the same training step; None without any.

    That is what it comes with, alone, at best on the same weights; where that was not audited, no
    defense.
    """
    beside = [other for other in cases if other.asked_step == case.asked_step]

    def fits(other: CaseResult) -> tuple[bool, bool]:
        same = other.settings["checkpoint"] == case.settings["checkpoint"]
        return same, other.clean == case.clean

    for defense in (case.comes_with, "none"):
        if found := [other for other in beside if other.defense == defense]:
            return max(found, key=fits)
    return None


def leakage(case: CaseResult) -> tuple[float, float]:
    """Return the share of rank 1 of the strongest attack, and its dB over blind, to compare."""
    row = case.strongest
    over = row.over_blind.mean
    return row.identified / row.n, -1e9 if over is None else over


def _worst_words(case: CaseResult, first: CaseResult) -> str:
    row = case.strongest
    attacks = len({r.attack for r in case.of("attack")})
    strongest, choice = row.attack, ""
    if attacks > 1:
        strongest = f"the strongest of {attacks} attacks, {row.attack},"
        choice = ", not corrected for the choice"
    under = BARE.get(case.defense, f"Under {case.name}")
    step = "" if case.asked_step is None or case.defense not in BARE else f" ({_step(case)})"
    said = f"{under}{step}, {strongest} {_result(row, choice)}"
    if row.doubt == NO_BETTER:
        said += f"; {_not_clearly(row)} a guess that never looked at an update"
        if not _works(case, first):
            said += ", and the attack was not shown to work on an easy model either"
    elif row.doubt == TOO_FEW:
        said += "; these are too few images to tell it from luck"
    return f"{said}."


def _result(row: Row, choice: str) -> str:
    """Say how many pictures were recognized, with the interval and what luck gives.

    `choice` says of the interval that the attack was chosen.
    """
    failed = f", {row.failed} failed" if row.failed else ""
    if not row.candidates:
        return (
            f"reached {number(row.psnr.mean, '.1f')} dB PSNR, "
            f"{number(row.over_blind.mean, '+.1f')} dB over a blind guess, on {row.n} pictures"
            f"{failed}; no line-up could be made"
        )
    low, high = row.identified_bounds
    true = "the true picture" if row.truth == USED else "the original picture"
    # In records of format 2 an image was compared with others of every class.
    kind = " of its class" if math.isclose(row.verdict.chance, 1 / row.candidates) else ""
    right = f"{row.identified} reconstruction{'' if row.identified == 1 else 's'}"
    return (
        f"attacked {row.n} private picture{'' if row.n == 1 else 's'}: {right} resembled {true} "
        f"more than {row.candidates - 1} others{kind} "
        f"(95% interval{choice}: {low:.0%} to {high:.0%}){failed}; "
        f"by luck it would be {few(row.n * row.verdict.chance)}"
    )


def _not_clearly(row: Row) -> str:
    return f"after a correction for {row.verdict.tests} tests that is not clearly more than"


def few(expected: float) -> str:
    """Write how many images are expected, with two digits where they are fewer than three."""
    return f"{expected:.0f}" if expected >= 3 else f"{expected:.2g}"


def _best_words(
    best: CaseResult | None,
    others: Sequence[CaseResult],
    worst: CaseResult,
    cases: Sequence[CaseResult],
) -> str:
    """Say how little the best of the defenses leaked, and its baseline where that is news."""
    if best is None:
        return "No defense was audited beside it."
    row, beside, count = best.strongest, baseline(best, cases), len(others)
    if count == 1 and beside is None:
        return "The same was not measured without a defense."
    if count == 1:
        least = f"Under {best.name} it was"
    elif row.candidates and beside is not None and not any(_helps(each, cases) for each in others):
        least = f"None of {count} defenses leaked less; under {best.name} it was"
    elif beside is not None and _helps(best, cases) and p_of_less(best, beside) * count >= LEVEL:
        least = f"Of {count} defenses {best.name} leaked least, which may be luck:"
    else:
        least = f"Of {count} defenses {best.name} leaked least:"
    doubt = {
        NO_BETTER: ", not clearly more than luck",
        TOO_FEW: ", too few images to tell from luck",
        None: ", still more than luck",
    }[row.doubt]
    said = [f"{least} {_figures(row)} by {row.attack}{doubt}{_cost(best)}."]
    if count == 1 and best is worst:  # then the first sentence has said it
        said = []
    if beside is not None and beside is not worst:
        under = BARE.get(beside.defense, f"Under {beside.defense}")
        no_more = "no more: " if row.candidates and not _helps(best, cases) else ""
        said.append(f"{under}, its baseline, it was {no_more}{_figures(beside.strongest)}.")
    return " ".join(said)


def _helps(case: CaseResult, cases: Sequence[CaseResult]) -> bool:
    """Whether a defense leaked less than its baseline."""
    beside = baseline(case, cases)
    return beside is not None and leakage(case)[0] < leakage(beside)[0]


def p_of_less(case: CaseResult, other: CaseResult) -> float:
    """Return the p-value, by a sign test over updates, that a case leaks less than another one."""
    ours, theirs = _hits(case), _hits(other)
    return sign_test([theirs[update] - ours[update] for update in ours.keys() & theirs.keys()])


def _hits(case: CaseResult) -> dict[int, float]:
    """Return the share of rank 1 of the strongest attack, by the first image of each update.

    Images that the attack failed on are left out: that says nothing of the defense.
    """
    row = case.strongest
    found = {}
    for update in by_update(case.of("attack", row.attack)):
        scores = [record.scores.get(row.truth, {}) for record in update if record.ok]
        hits = [each.get("rank") == 1 or each.get("identified") == 1 for each in scores]
        if hits:
            found[update[0].image] = sum(hits) / len(hits)
    return found


def _figures(row: Row) -> str:
    """Write how many pictures were recognized, with the interval; without line-ups the gain."""
    failed = f", {row.failed} failed" if row.failed else ""
    if not row.candidates:
        return f"{number(row.over_blind.mean, '+.1f')} dB over a blind guess{failed}"
    low, high = row.identified_bounds
    return f"{row.identified} of {row.n} ({low:.0%} to {high:.0%}{failed})"


def _cost(case: CaseResult) -> str:
    known = case.trained_so
    return (
        "" if known is None else f"; the model trained under it has {known.accuracy:.1%} accuracy"
    )


def _works(case: CaseResult, first: CaseResult) -> bool:
    """Whether the strongest attack has a positive control that worked; the first case has them."""
    return any(
        (row.kind, row.attack, row.truth) == ("positive", case.strongest.attack, USED)
        and row.doubt is None
        for row in (*first.rows, *case.rows)
    )


def _step(case: CaseResult) -> str:
    return f"training step {case.asked_step if case.step is None else case.step}"


HEADLINES: dict[Tone, str] = {
    "leak": "Private pictures leak from what is shared",
    "unclear": "Too little was measured to tell",
    "none": "No leak was shown by these attacks",
}


def given_words(result: AuditResult) -> list[tuple[str, str]]:
    """Say what every attacker was given: pairs of a short name and a sentence."""
    settings = result.settings
    batch = settings.get("batch_size", 1)
    known = {each.name: settings[each.name] for each in fields(Protocol) if each.name in settings}
    protocol = Protocol(**known)
    update = "the gradient of the loss"
    if protocol.moves(batch):
        steps, rate = protocol.in_words(batch), protocol.local_lr
        update = f"the change of the weights after {steps} at rate {rate:g}"
    pictures = "1 picture" if batch == 1 else f"{batch} pictures together"
    labels = {
        "known": "the true labels of the pictures",
        "inferred": "no labels: it inferred them from the update",
    }
    bare = all(case.defense in BARE for case in result.cases)
    under = "" if bare else ", under the defense"
    mode = "training mode" if settings.get("train_mode") else "evaluation mode"
    said = [
        ("The update", f"{update}, as the client shares it, of {pictures}{under}"),
        ("The model", f"the code and the weights of {settings['model']}, in {mode}"),
        ("Labels", labels.get(settings["labels"], settings["labels"])),
    ]
    said += [
        ("How it is taken", note) for note in {case.note: None for case in result.cases} if note
    ]
    alike: dict[str, list[str]] = {}
    for attack, told in _told(result.cases).items():
        alike.setdefault(told, []).append(attack)
    for told, attacks in alike.items():
        were = "was" if len(attacks) == 1 else "were"
        said.append((", ".join(attacks), f"{were} also told: {told}"))
    return said


def _told(cases: Sequence[CaseResult]) -> dict[str, str]:
    """Return what attacks were told beyond the labels, by the attack."""
    found: dict[str, list[str]] = {}
    for case in cases:
        for attack, words in case.settings.get("knows", {}).items():
            _, _, more = str(words).partition(", ")
            if more:
                found.setdefault(attack, []).append(f"{more} ({case.defense})")
    return {attack: "; ".join(dict.fromkeys(words)) for attack, words in found.items()}


def untested_words(result: AuditResult) -> list[str]:
    """Say what this audit leaves open, as far as its settings tell."""
    settings, cases = result.settings, attacked(result)
    said = [
        "Other attacks, settings and restarts than these; an attacker with more knowledge, or one "
        "who also changes the model that clients receive.",
        f"Images unlike the {images_words(settings, cases[0].strongest.n)} attacked here "
        f"({cases[0].classes_in_full}).",
        "Other models, seeds and stages of training; what many rounds give away together.",
    ]
    if settings.get("batch_size", 1) == 1:
        said.append("Updates of several pictures at once: one picture an update is the worst case.")
    if settings["labels"] == "known":
        said.append("Attackers that do not know the labels: here they are given.")
    said += dict.fromkeys(f"How the attacker took the updates: {c.note}." for c in cases if c.note)
    not_begun = len(settings.get("cases", ())) - len(cases)
    if not_begun > 0:
        said.append(f"{not_begun} of the cases asked for: the audit has not come to them yet.")
    left: dict[str, list[str]] = {}
    for case in cases:
        for attack, reason in case.settings.get("left_out", {}).items():
            words = f"{attack} was left out: {without_name(attack, str(reason))}"
            left.setdefault(words, []).append(case.name)
    for words, names in left.items():
        said.append(words + ("." if len(names) == len(cases) else f" ({'; '.join(names)})."))
    not_run: dict[str, dict[str, None]] = {}
    for case in cases:
        if case.defense not in BARE and (missing := case.breakers_not_run):
            not_run.setdefault(", ".join(missing), {})[case.name] = None
    for attacks, broken in not_run.items():
        against = "; ".join(broken)
        said.append(f"{attacks}: known to break {against}, and not run; --attack auto runs them.")
    failed = sum(row.failed for case in cases for row in case.rows if _counts(row))
    if failed:
        said.append(
            f"{failed} reconstructions failed; they count as tested, and as not recognized."
        )
        every = [row for case in cases for row in case.rows if _counts(row) and row.failed]
        said += dict.fromkeys(f"{row.attack}: {row.failures}." for row in every)
    return said


def _counts(row: Row) -> bool:
    return (row.kind, row.truth) == ("attack", USED)


def truth_words(truth: str) -> str:
    """Name the picture that a reconstruction is compared with."""
    return {USED: "the picture as used", ORIGINAL: "the original picture"}[truth]
