"""Statistics of many scores: their spread, exact bounds on shares, and tests.

The tests tell whether an attack beats a blind guess, and which of two defenses leaks less.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gradveil.core.errors import GradveilError

REMEMBERED = 1024  # results of slow functions: a table asks for the same statistics several times
STAKES = 200  # parts of what one has, over which a bet is averaged
EACH = 0.025  # level of each of two tests: together they err in at most 5% of cases (Bonferroni)


@dataclass(frozen=True)
class Summary:
    """The spread of n values; None where there are too few.

    `worst5` is the value that the 5% of images that leak most reach or pass.
    """

    n: int
    mean: float | None
    std: float | None  # of the sample, so it needs two values
    median: float | None
    worst5: float | None
    low: float | None
    high: float | None


def summary(values: Sequence[float], *, high_leaks: bool = True) -> Summary:
    """Summarize values; `high_leaks` tells whether high ones leak more (PSNR) or low ones (MSE)."""
    return _summary(tuple(values), high_leaks)


@lru_cache(REMEMBERED)
def _summary(values: tuple[float, ...], high_leaks: bool) -> Summary:
    data = np.asarray(values, dtype=float)
    if not np.isfinite(data).all():
        raise GradveilError(
            f"{np.count_nonzero(~np.isfinite(data))} of {len(data)} values are not finite: "
            "count them as failures instead"
        )
    if not len(data):
        return Summary(0, None, None, None, None, None, None)
    return Summary(
        n=len(data),
        mean=float(data.mean()),
        std=float(data.std(ddof=1)) if len(data) > 1 else None,
        median=float(np.median(data)),
        worst5=float(np.quantile(data, 0.95 if high_leaks else 0.05)),
        low=float(data.min()),
        high=float(data.max()),
    )


def mean_interval(of: Summary, level: float = 0.95) -> tuple[float, float] | None:
    """A confidence interval of the mean, by Student's t; None without a spread."""
    from scipy.stats import t

    if of.mean is None or of.std is None:
        return None
    half = float(t.ppf((1 + level) / 2, of.n - 1)) * of.std / math.sqrt(of.n)
    return of.mean - half, of.mean + half


@dataclass(frozen=True)
class Verdict:
    """Whether reconstructions hold more than a blind guess, and the two p-values that say so.

    `better` is decided after Holm's correction for all `tests` that were made beside each other; of
    a positive control, also by its line-up alone.
    """

    better: bool
    p_over_blind: float
    p_identified: float
    chance: float  # of identifying one image without having seen its gradient
    tests: int = 2


def above_chance(hits: int, n: int, chance: float) -> float:
    """The exact p-value that `hits` of n are more than chance has."""
    from scipy.stats import binomtest

    if not n:
        return 1.0
    return float(binomtest(hits, n, min(chance, 1.0), alternative="greater").pvalue)


def can_tell(updates: int, chance: float, images: int = 1, tests: int = 2) -> bool:
    """Whether as many updates, all images identified and above blind, would show a better attack.

    Each has as many images, of which a share of `chance` has rank 1 by luck; `tests` are made
    beside each other.
    """
    all_found = share_of_updates([[True] * images] * updates, chance).p
    return min(all_found, 0.5**updates) < 2 * EACH / tests


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values so that those below 5% err together in at most 5% of cases (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    found, highest = [1.0] * len(p_values), 0.0
    for position, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - position) * p_values[i]))
        found[i] = highest
    return found


def holm_cutoff(p_values: Sequence[float]) -> float:
    """Return the largest p-value that Holm's correction rejects at 5%; -1 where it rejects none."""
    adjusted = zip(p_values, holm(p_values), strict=True)
    return max((p for p, together in adjusted if together < 2 * EACH), default=-1.0)


@dataclass(frozen=True)
class Share:
    """A share of images, of several updates: `hits` of `n`, bounds at 95%, p against chance."""

    hits: int
    n: int
    bounds: tuple[float, float]
    p: float


def share_of_updates(hits: Sequence[Sequence[bool]], chance: float) -> Share:
    """Summarize hits by image and update, where images of one update are not independent.

    With one image an update, bounds and p-value are exact. With several, an update counts as one
    observation: the bounds are Clopper and Pearson's for the mean of the updates' shares, and the
    p-value is twice the smaller of two. One is that of as many updates with at least one hit, which
    by chance are at most `chance` times the images of an update: it sees few hits that are spread.
    The other is that of `bet_on_mean`, which sees many.
    """
    counted = tuple(_shares(hits))
    if not counted:
        return Share(0, 0, (0.0, 1.0), 1.0)
    largest = max(map(len, hits))
    p = above_chance(sum(map(bool, counted)), len(counted), chance * largest)
    if largest > 1:
        p = min(1.0, 2 * min(p, bet_on_mean(counted, chance)))
    total = sum(len(update) for update in hits)
    bounds = _beta_bounds(sum(counted), len(counted), 0.95)
    return Share(sum(sum(update) for update in hits), total, bounds, p)


@lru_cache(REMEMBERED)
def bet_on_mean(shares: tuple[float, ...], chance: float) -> float:
    """Return a p-value that independent shares, of whatever distribution, have a mean above chance.

    Somebody who stakes a part u of what they have on each share, at fair odds, is left with the
    product of 1 + u (share / chance - 1), whose mean is at most 1 where chance is all there is. So
    the mean of that over u exceeds 1 / p with a probability of at most p (Waudby-Smith and Ramdas,
    "Estimating means of bounded random variables by betting", 2024).
    """
    if chance >= 1:
        return 1.0
    parts = (np.arange(STAKES) + 0.5) / STAKES
    won = np.log1p(parts[:, None] * (np.asarray(shares) / chance - 1)).sum(1)
    return float(min(1.0, np.exp(np.log(STAKES) - np.logaddexp.reduce(won))))


def bounds_over_updates(hits: Sequence[Sequence[bool]], level: float = 0.95) -> tuple[float, float]:
    """Bound the share of hits as `share_of_updates` does; each side is one-sided at the level.

    For updates whose images are all hit or none the bounds are exact. No shares of updates are
    known for which they are wrong more often (the tests search for some).
    """
    counted = _shares(hits)
    return _beta_bounds(sum(counted), len(counted), _two_sided(level)) if counted else (0.0, 1.0)


def _shares(hits: Sequence[Sequence[bool]]) -> list[float]:
    """Return the share of hits in each update that has images."""
    return [sum(update) / len(update) for update in hits if update]


@lru_cache(REMEMBERED)
def _beta_bounds(hits: float, n: int, level: float) -> tuple[float, float]:
    from scipy.stats import beta

    tail = (1 - level) / 2
    low = float(beta.ppf(tail, hits, n - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, n - hits)) if hits < n else 1.0
    return low, high


def clopper_pearson(hits: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Exact two-sided bounds on a share, from `hits` of n.

    Each side is wrong in at most (1 - level) / 2 of cases.
    """
    _check_share(hits, n)
    if not 0 < level < 1:
        raise GradveilError(f"confidence level {level}: choose above 0 and below 1, such as 0.95")
    return _beta_bounds(hits, n, level)


def upper_bound(hits: int, n: int, level: float = 0.95) -> float:
    """An exact bound that the share is above in at most 1 - level of cases."""
    return clopper_pearson(hits, n, _two_sided(level))[1]


@dataclass(frozen=True)
class Difference:
    """A difference of two shares; each bound is one-sided."""

    value: float
    low: float
    high: float


def difference(hits: int, n: int, other_hits: int, other_n: int, level: float = 0.95) -> Difference:
    """The first share minus the second, of independent samples.

    The bounds are Newcombe's hybrid of two Wilson intervals (1998, method 10).
    """
    if min(n, other_n) < 1:
        raise GradveilError(f"a difference of shares of {n} and {other_n}: both need at least 1")
    bounds, other_bounds = wilson(hits, n, level), wilson(other_hits, other_n, level)
    return hybrid(hits / n, bounds, other_hits / other_n, other_bounds)


def hybrid(
    share: float,
    bounds: tuple[float, float],
    other: float,
    other_bounds: tuple[float, float],
) -> Difference:
    """The first share minus the second, with Newcombe's hybrid of the bounds of both."""
    (low, high), (other_low, other_high) = bounds, other_bounds
    below = np.hypot(share - low, other_high - other)
    above = np.hypot(high - share, other - other_low)
    value = share - other
    return Difference(value, float(value - below), float(value + above))


def wilson(hits: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """The score interval of a share; each side is one-sided at the level."""
    from scipy.stats import binomtest

    _check_share(hits, n)
    found = binomtest(hits, n).proportion_ci(_two_sided(level), method="wilson")
    return float(found.low), float(found.high)


def _two_sided(level: float) -> float:
    """The two-sided level whose bounds are each wrong in 1 - level of cases."""
    if not 0.5 < level < 1:
        raise GradveilError(f"confidence level {level}: choose above 0.5 and below 1, such as 0.95")
    return 2 * level - 1


def signed_rank(differences: Sequence[float]) -> float:
    """The p-value of Wilcoxon's signed-rank test that differences of pairs lie above 0.

    Zeros are left out, as Wilcoxon did.
    """
    return _signed_rank(tuple(value for value in differences if value))


@lru_cache(REMEMBERED)
def _signed_rank(moved: tuple[float, ...]) -> float:
    from scipy.stats import wilcoxon

    return float(wilcoxon(moved, alternative="greater").pvalue) if moved else 1.0


def sign_test(differences: Sequence[float]) -> float:
    """The exact p-value that more differences of pairs are above 0 than below; zeros are left out.

    For differences of two yes-or-no outcomes this is McNemar's exact test.
    """
    from scipy.stats import binomtest

    above = [value > 0 for value in differences if value]
    if not above:
        return 1.0
    return float(binomtest(sum(above), len(above), 0.5, alternative="greater").pvalue)


def _check_share(hits: int, n: int) -> None:
    if not 0 <= hits <= n:
        raise GradveilError(f"{hits} of {n}: expected a count from 0 to the number of images")
