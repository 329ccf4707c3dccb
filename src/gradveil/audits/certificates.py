"""Exact statements on all images, from those that were reconstructed beyond a threshold.

By Definition 2 of the paper a defense is (epsilon, delta, gamma)-private if
Pr[PSNR >= epsilon] <= delta and training under it loses less than gamma of accuracy. That few
images were reached shows this only where the attack was shown to work: see `PositiveControl`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from gradveil.audits.model import ModelFacts
from gradveil.audits.records import Record
from gradveil.audits.results import CaseResult
from gradveil.controls import TRUTHS
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.text import read_number
from gradveil.stats import EACH, Difference, bounds_over_updates, difference

LEVEL = 0.95  # of the bounds on delta and gamma together, of all cases of a command
LINEUP = "lineup"
METRICS = ("psnr", "ssim", LINEUP)
SPELLINGS = ("psnr=NUMBER", "ssim=NUMBER", LINEUP)
STRONGEST, ANY = "strongest", "any attacker"
EITHER = "any truth"
PRIVATE, NOT_PRIVATE = "private", "not private"
UNDECIDED, CANNOT = "undecided", "cannot be told"
USED, ORIGINAL = TRUTHS


@dataclass(frozen=True)
class Threshold:
    """epsilon with its metric, and the bounds `delta` and `gamma` to be decided, if any.

    By the metric `lineup` an image counts as reached that has rank 1 in its line-up; epsilon is 1.
    """

    metric: str
    epsilon: float = 1.0
    delta: float | None = None
    gamma: float | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise unknown("metric of certify", self.metric, METRICS)
        in_range = self.metric != "ssim" or -1 <= self.epsilon <= 1
        if not (math.isfinite(self.epsilon) and in_range):
            raise GradveilError(
                f"certify {self}: expected a finite number of dB for psnr, one from -1 to 1 for "
                "ssim"
            )
        for name in ("delta", "gamma"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise GradveilError(
                    f"{name} {value:g}: it is a share; choose above 0 and below 1, such as 0.05"
                )

    @classmethod
    def parse(
        cls, text: str, delta: float | None = None, gamma: float | None = None
    ) -> "Threshold":
        """Parse `psnr=15`, `ssim=0.5` or `lineup`."""
        metric, equals, value = text.partition("=")
        if metric.strip() not in METRICS:
            raise unknown("metric of certify", metric.strip(), SPELLINGS)
        if metric.strip() == LINEUP:
            if equals:
                raise GradveilError(f"certify {text!r}: a line-up has no threshold; write lineup")
            return cls(LINEUP, 1.0, delta, gamma)
        try:
            return cls(metric.strip(), read_number(value, float), delta, gamma)
        except GradveilError:
            raise
        except ValueError:
            raise GradveilError(
                f"certify {text!r}: {value!r} is no number; write psnr=15, ssim=0.5 or lineup"
            ) from None

    def __str__(self) -> str:
        return self.metric if self.metric == LINEUP else f"{self.metric}={self.epsilon:g}"

    def reached_by(self, scores: Mapping[str, float]) -> bool:
        """Whether these scores of an image reach epsilon."""
        if self.metric == LINEUP:
            return scores.get("rank") == 1
        return scores[self.metric] >= self.epsilon


@dataclass(frozen=True)
class Bound:
    """Bounds on delta, where `hits` of n images reached epsilon.

    Images of one update are not independent, so the bounds are over updates. Failed images count
    as not reached; in `upper_failed` they count as reached.
    """

    n: int
    hits: int
    failed: int
    lower: float
    upper: float
    upper_failed: float | None  # None where none failed
    updates: int  # that the n images were shared in


@dataclass(frozen=True)
class Claim:
    """The bounds of an attack or control by truth: both truths where the defense changes images."""

    attack: str
    bounds: dict[str, Bound]


@dataclass(frozen=True)
class Strongest:
    """The attack that reached epsilon most often against one truth.

    It is chosen after looking, so its lower bound is corrected for the number of attacks; its upper
    bound, the highest of all, needs no correction.
    """

    attack: str
    bound: Bound


@dataclass(frozen=True)
class PositiveControl:
    """How an attack did where it is known to work, or in a case where it clearly does.

    Of n images it brought `reached` to epsilon. `doubt` is that of its row, such as `NO_BETTER`; n
    is 0 where the audit has neither.
    """

    n: int = 0
    reached: int = 0
    doubt: str | None = None

    @property
    def works(self) -> bool:
        """Whether the attack was shown to work, and to come to epsilon at all."""
        return bool(self.reached) and self.doubt is None


@dataclass(frozen=True)
class DecidedRow:
    """A row of a certificate: one attack, the strongest, or any attacker, against one truth or any.

    `bounded` tells whether delta holds and `verdict` whether both delta and gamma do, each None as
    in the certificate.
    """

    kind: str  # attack, strongest or any attacker
    attack: str | None  # None for any attacker
    against: str
    bound: Bound
    works: bool  # whether the attack, or any of them, was shown to work
    bounded: bool | None
    verdict: str | None


@dataclass(frozen=True)
class Certificate:
    """The bounds of every attack, of the best control, and of all attacks together.

    `overall` counts an image that any attack brought to epsilon against either truth, so that no
    attack is chosen after looking; it decides. The upper bounds of delta, by any attack, and of
    gamma hold at once for as many `cases`.
    """

    threshold: Threshold
    claims: tuple[Claim, ...]
    blind: Claim  # the control that reaches epsilon most often, of equal ones that with the most dB
    strongest: dict[str, Strongest]  # by truth
    overall: Bound
    loss: Difference | None  # of accuracy; None where it was not measured
    cases: int = 1
    controls: Mapping[str, PositiveControl] = field(default_factory=dict)  # of every attack
    same_weights: bool = False  # those of the defense are the baseline's, so no loss was measured
    not_run: tuple[str, ...] = ()  # attacks known to break the defense
    holds_without: str = ""  # the case it is compared with, where delta holds there too
    recognized: str = ""  # the attack with most images of rank 1, clearly more than by chance

    @property
    def each(self) -> float:
        """The one-sided level of each bound."""
        return level_of_each(self.cases)

    @property
    def joint(self) -> str | None:
        """That the bounds of all cases hold at once, in a sentence; None for one case."""
        if self.cases == 1:
            return None
        return (
            f"The upper bounds of all {self.cases} cases, on delta by any attack and on gamma, "
            f"hold at once at {LEVEL:.0%}: each is at {percent(self.each)} (Bonferroni)."
        )

    @property
    def working(self) -> tuple[str, ...]:
        """The attacks that were shown to work, by a positive control or in a case."""
        return tuple(attack for attack, control in self.controls.items() if control.works)

    @cached_property
    def rows(self) -> tuple[DecidedRow, ...]:
        """A row for each attack and truth, for the strongest by truth, and for any attacker."""
        made = [
            self._row("attack", claim.attack, truth, found)
            for claim in self.claims
            for truth, found in claim.bounds.items()
        ]
        made += [
            self._row(STRONGEST, each.attack, truth, each.bound)
            for truth, each in self.strongest.items()
        ]
        truths = [*self.strongest]
        against = EITHER if len(truths) > 1 else truths[0]
        return (*made, self._row(ANY, None, against, self.overall))

    def _row(self, kind: str, attack: str | None, against: str, found: Bound) -> DecidedRow:
        works = bool(self.working) if attack is None else attack in self.working
        bounded = self._bounded(found, works)
        return DecidedRow(
            kind, attack, against, found, works, bounded, self._verdict(bounded, works)
        )

    @property
    def verdict(self) -> str | None:
        """Whether both delta and gamma hold: private, not private, undecided or cannot be told.

        It cannot be told where no attack was shown to work. None where not both were asked for.
        """
        return self.rows[-1].verdict

    @property
    def private(self) -> bool | None:
        """Whether both delta and gamma hold.

        None where that is undecided or cannot be told, or not both were asked for.
        """
        return {PRIVATE: True, NOT_PRIVATE: False}.get(self.verdict or "")

    @property
    def bounded(self) -> bool | None:
        """Whether delta holds.

        None where it is undecided at this n or cannot be told, or was not asked for.
        """
        return self.rows[-1].bounded

    def _bounded(self, found: Bound, works: bool) -> bool | None:
        """Tell whether delta holds; that it does not hold is shown by any attack."""
        delta = self.threshold.delta
        if delta is None:
            return None
        if found.lower > delta:
            return False
        high = found.upper if found.upper_failed is None else found.upper_failed
        # An attacker can always guess: delta cannot hold where a guess reaches more than that.
        guessed = max(each.hits / each.n for each in self.blind.bounds.values())
        return True if works and max(high, guessed) <= delta else None

    def _verdict(self, bounded: bool | None, works: bool) -> str | None:
        if self.threshold.delta is None or self.threshold.gamma is None:
            return None
        decided = {bounded, self.accurate}
        if False in decided:
            return NOT_PRIVATE
        if not works:
            return CANNOT
        return UNDECIDED if None in decided else PRIVATE

    @property
    def accurate(self) -> bool | None:
        """Whether the accuracy loss is below gamma.

        None where that is undecided or unknown, or was not asked for.
        """
        gamma, loss = self.threshold.gamma, self.loss
        if gamma is None or loss is None:
            return None
        if loss.high < gamma:
            return True
        return False if loss.low >= gamma else None

    def plain(self) -> dict[str, Any]:
        """Return the certificate as JSON has it."""
        return asdict(self) | {
            "rows": [asdict(row) for row in self.rows],
            "verdict": self.verdict,
            "private": self.private,
            "bounded": self.bounded,
            "accurate": self.accurate,
            "level": LEVEL,
            "level_of_each": self.each,
            "joint": self.joint,
        }


def level_of_each(cases: int) -> float:
    """Return the one-sided level at which the two bounds of every case hold at once."""
    return 1 - (1 - LEVEL) / (2 * cases)


def percent(level: float) -> str:
    """Write a level with three digits of what is missing to 100% at most, such as `99.167%`."""
    missing = 100 * (1 - level)
    digits = 2 - math.floor(math.log10(missing))
    return f"{100 * level:.{digits}f}".rstrip("0").rstrip(".") + "%"


def certify(
    result: CaseResult,
    threshold: Threshold,
    *,
    trained: ModelFacts | None = None,
    baseline: ModelFacts | None = None,
    cases: int | None = None,
    beside: Iterable[CaseResult] = (),
) -> Certificate:
    """Bound the share of images that reach the threshold, and the loss of accuracy.

    The loss is that of the model `trained`, which was audited, against the `baseline`, a model
    trained without a defense; it is unknown without both, and where both have the same weights. The
    bounds hold together with those of all `cases`, by default the cases of the audit. Positive
    controls are looked for in the case, and in those of the same audit `beside` it.
    """
    attacks = result.of("attack")
    if not attacks:
        raise GradveilError(
            f"certify {threshold}: n = 0, {result.out} holds no attacked image; nothing can be "
            "said without one"
        )
    if threshold.metric == LINEUP and not attacks[0].candidates:
        reason = result.settings.get("no_lineup") or "its records are of an older format"
        raise GradveilError(f"certify {threshold}: {result.out} has no line-up: {reason}")
    count = result.cases if cases is None else cases
    each = level_of_each(count)
    truths = _truths(result)
    named = _by_name(attacks)
    claims = tuple(
        _claim(name, records, threshold, truths, each) for name, records in named.items()
    )
    loss, same_weights = _loss(trained, baseline, each)
    return Certificate(
        threshold,
        claims,
        _best_blind(result, threshold, each),
        {truth: _strongest(result, claims, threshold, truth, each) for truth in truths},
        bound(_by_update(attacks, _reaches(threshold, truths)), each),
        loss,
        count,
        _controls(named, [result, *beside], threshold),
        same_weights,
        result.breakers_not_run,
        recognized=_recognized(result),
    )


def _recognized(result: CaseResult) -> str:
    """Name the attack that clearly wins the line-up by most images, and how many these are."""
    row = result.strongest
    clear = row.candidates and row.verdict.better and row.verdict.p_identified < EACH
    return f"{row.attack} in {row.lineup} line-ups" if clear else ""


def bound(updates: Sequence[Sequence[bool | None]], each: float) -> Bound:
    """Bound the share of images that are reached, given by update; None for those that failed.

    Both bounds are one-sided at the level `each`.
    """
    images = [image for update in updates for image in update]
    if not images:
        raise GradveilError("certify: n = 0 images; nothing can be said without one")
    lower, upper = bounds_over_updates([[*map(bool, update)] for update in updates], each)
    failed = images.count(None)
    high = None
    if failed:
        at_worst = [[image is not False for image in update] for update in updates]
        high = bounds_over_updates(at_worst, each)[1]
    return Bound(len(images), images.count(True), failed, lower, upper, high, len(updates))


def _truths(result: CaseResult) -> tuple[str, ...]:
    """Return both truths where the defense changes images, else the original, which was used."""
    return result.truths if len(result.truths) > 1 else (ORIGINAL,)


def _strongest(
    result: CaseResult, claims: Sequence[Claim], threshold: Threshold, truth: str, each: float
) -> Strongest:
    """Return the attack that reached epsilon most often, of equal ones the audit's strongest."""

    def rank(claim: Claim) -> tuple[float, bool]:
        found = claim.bounds[truth]
        return found.hits / found.n, claim.attack == result.strongest.attack

    name = max(claims, key=rank).attack
    updates = _by_update(result.of("attack", name), _reaches(threshold, (truth,)))
    corrected = 1 - (1 - each) / len(claims)
    return Strongest(name, replace(bound(updates, each), lower=bound(updates, corrected).lower))


def _controls(
    attacks: Iterable[str], cases: Iterable[CaseResult], threshold: Threshold
) -> dict[str, PositiveControl]:
    """Return how each attack did on its positive control, which stands in one of the cases.

    An attack that clearly beats blind in a case of the audit, and reaches epsilon there, needs no
    other: that case stands for it.
    """
    found: dict[str, PositiveControl] = {}
    reaches = _reaches(threshold, (USED,))
    for case in cases:
        for row in case.rows:
            before = found.get(row.attack)
            if row.kind not in ("positive", "attack") or row.truth != USED:
                continue
            if before is not None and before.works:
                continue
            reached = sum(map(reaches, case.of(row.kind, row.attack)))
            made = PositiveControl(row.n, reached, row.doubt)
            if made.works or (row.kind == "positive" and before is None):
                found[row.attack] = made
    return {attack: found.get(attack, PositiveControl()) for attack in attacks}


def _loss(
    trained: ModelFacts | None, baseline: ModelFacts | None, each: float
) -> tuple[Difference | None, bool]:
    """Return baseline less trained, and whether it is unknown because the weights are the same.

    It is exactly 0 for the baseline itself. Weights that are the baseline's, with a file that names
    a defense, do not show what training under it costs.
    """
    if trained is None or baseline is None:
        return None, False
    known = trained.weights_sha256 is not None
    if known and trained.weights_sha256 == baseline.weights_sha256:
        itself = trained.under == baseline.under
        return (Difference(0.0, 0.0, 0.0), False) if itself else (None, True)
    if not known and trained == baseline:
        return Difference(0.0, 0.0, 0.0), False
    return difference(baseline.hits, baseline.tested, trained.hits, trained.tested, each), False


def _best_blind(result: CaseResult, threshold: Threshold, each: float) -> Claim:
    """Return the control that reaches the threshold most often, of equal ones the highest in dB."""
    levels: dict[str, float] = {}
    truths = _truths(result)
    for row in result.rows:
        if row.kind == "blind" and row.truth in truths:
            level = -math.inf if row.psnr.mean is None else row.psnr.mean
            levels[row.attack] = levels.get(row.attack, 0.0) + level
    claims = [
        _claim(name, records, threshold, truths, each)
        for name, records in _by_name(result.of("blind")).items()
    ]

    def rank(claim: Claim) -> tuple[int, float]:
        return sum(found.hits for found in claim.bounds.values()), levels[claim.attack]

    return max(claims, key=rank)


def _claim(
    name: str,
    records: Sequence[Record],
    threshold: Threshold,
    truths: Sequence[str],
    each: float,
) -> Claim:
    return Claim(
        name,
        {
            truth: bound(_by_update(records, _reaches(threshold, (truth,))), each)
            for truth in truths
        },
    )


def _by_update(
    records: Sequence[Record], reaches: Callable[[Record], bool]
) -> list[list[bool | None]]:
    """Return for each update whether its images are reached by any of their records.

    An image that is not, and of which a record failed, has None.
    """
    found: dict[int, dict[int, bool | None]] = {}
    for record in records:
        images = found.setdefault(record.shared_in, {})
        before = images.get(record.image, False)
        images[record.image] = before or reaches(record) or (before if record.ok else None)
    return [[*images.values()] for images in found.values()]


def _reaches(threshold: Threshold, truths: Sequence[str]) -> Callable[[Record], bool]:
    return lambda record: (
        record.ok and any(threshold.reached_by(record.scores[truth]) for truth in truths)
    )


def _by_name(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.attack, []).append(record)
    return found
