"""Exact statements on all images, from those that were reconstructed beyond a threshold.

By Definition 2 of the paper a defense is (epsilon, delta, gamma)-private if
Pr[PSNR >= epsilon] <= delta and training under it loses less than gamma of accuracy.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradveil.audits.model import ModelFacts
from gradveil.audits.records import Record
from gradveil.audits.results import CaseResult
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.text import read_number
from gradveil.stats import Difference, difference, lower_bound, upper_bound

LEVEL = 0.95  # of the bounds on delta and gamma together
EACH = 1 - (1 - LEVEL) / 2  # one-sided, of each of the two
LINEUP = "lineup"
METRICS = ("psnr", "ssim", LINEUP)
SPELLINGS = ("psnr=NUMBER", "ssim=NUMBER", LINEUP)
ANY = "any of them"


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

    Failed images count as not reached; in `upper_failed` they count as reached.
    """

    n: int
    hits: int
    failed: int
    lower: float
    upper: float
    upper_failed: float | None  # None where none failed


@dataclass(frozen=True)
class Claim:
    """The bounds of an attack or control by truth: both truths where the defense changes images."""

    attack: str
    bounds: dict[str, Bound]


@dataclass(frozen=True)
class Certificate:
    """The bounds of every attack, of the best control, and of all attacks together.

    `overall` counts an image that any attack brought to epsilon against either truth, so that no
    attack is chosen after looking.
    """

    threshold: Threshold
    claims: tuple[Claim, ...]
    blind: Claim  # the control that reaches epsilon most often, of equal ones that with the most dB
    strongest: str
    overall: Bound
    loss: Difference | None  # of accuracy; None where one of the two is unknown

    @property
    def private(self) -> bool | None:
        """Whether both delta and gamma hold, as in Definition 2.

        None where that is undecided, or not both were asked for.
        """
        if self.threshold.delta is None or self.threshold.gamma is None:
            return None
        decided = {self.bounded, self.accurate}
        if False in decided:
            return False
        return None if None in decided else True

    @property
    def bounded(self) -> bool | None:
        """Whether delta holds: None where it is undecided at this n, or was not asked for."""
        bound, delta = self.overall, self.threshold.delta
        if delta is None:
            return None
        high = bound.upper if bound.upper_failed is None else bound.upper_failed
        if high <= delta:
            return True
        return False if bound.lower > delta else None

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
            "private": self.private,
            "bounded": self.bounded,
            "accurate": self.accurate,
            "level": LEVEL,
            "level_of_each": EACH,
        }


def certify(
    result: CaseResult,
    threshold: Threshold,
    *,
    trained: ModelFacts | None = None,
    baseline: ModelFacts | None = None,
) -> Certificate:
    """Bound the share of images that reach the threshold, and the loss of accuracy.

    The loss is that of the model `trained`, which was audited, against the `baseline`, a model
    trained without a defense; it is unknown without both.
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
    strongest = result.strongest
    claims = tuple(
        _claim(name, records, threshold, result.truths) for name, records in _by_name(attacks)
    )
    blind = _best_blind(result, threshold)
    return Certificate(
        threshold,
        claims,
        blind,
        strongest.attack,
        _overall(attacks, threshold, result.truths),
        _loss(trained, baseline),
    )


def bound(hits: int, failed: int, n: int) -> Bound:
    """Bound the share of hits among n images, which include the failed."""
    if not n:
        raise GradveilError("certify: n = 0 images; nothing can be said without one")
    high = upper_bound(hits + failed, n, EACH) if failed else None
    return Bound(n, hits, failed, lower_bound(hits, n, EACH), upper_bound(hits, n, EACH), high)


def _loss(trained: ModelFacts | None, baseline: ModelFacts | None) -> Difference | None:
    """Return baseline less trained; exactly 0 for a model against itself."""
    if trained is None or baseline is None:
        return None
    same = trained.weights_sha256 is None or trained.weights_sha256 == baseline.weights_sha256
    if same and trained == baseline:
        return Difference(0.0, 0.0, 0.0)
    return difference(baseline.hits, baseline.tested, trained.hits, trained.tested, EACH)


def _best_blind(result: CaseResult, threshold: Threshold) -> Claim:
    """Return the control that reaches the threshold most often, of equal ones the highest in dB."""
    levels: dict[str, float] = {}
    for row in result.rows:
        if row.kind == "blind" and row.truth in result.truths:
            level = -math.inf if row.psnr.mean is None else row.psnr.mean
            levels[row.attack] = levels.get(row.attack, 0.0) + level
    claims = [
        _claim(name, records, threshold, result.truths)
        for name, records in _by_name(result.of("blind"))
    ]

    def rank(claim: Claim) -> tuple[int, float]:
        return sum(found.hits for found in claim.bounds.values()), levels[claim.attack]

    return max(claims, key=rank)


def _claim(
    name: str, records: Sequence[Record], threshold: Threshold, truths: Sequence[str]
) -> Claim:
    failed = sum(not record.ok for record in records)
    return Claim(
        name,
        {
            truth: bound(sum(map(_reaches(threshold, (truth,)), records)), failed, len(records))
            for truth in truths
        },
    )


def _overall(records: Sequence[Record], threshold: Threshold, truths: Sequence[str]) -> Bound:
    reaches = _reaches(threshold, truths)
    hit = {record.image for record in records if reaches(record)}
    failed = {record.image for record in records if not record.ok} - hit
    return bound(len(hit), len(failed), len({record.image for record in records}))


def _reaches(threshold: Threshold, truths: Sequence[str]) -> Callable[[Record], bool]:
    return lambda record: (
        record.ok and any(threshold.reached_by(record.scores[truth]) for truth in truths)
    )


def _by_name(records: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.attack, []).append(record)
    return list(found.items())
