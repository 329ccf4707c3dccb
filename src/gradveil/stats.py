"""What many scores say together: their spread, exact bounds on a share, and whether an attack beats a blind guess."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradveil.core.errors import GradveilError

EACH = 0.025  # two tests, so together they err in at most 5% of cases (Bonferroni)


@dataclass(frozen=True)
class Summary:
    """Of n values; None where there are too few. `worst5` is the value that the 5% of images that leak most reach or pass."""

    n: int
    mean: float | None
    std: float | None  # of the sample, so it needs two values
    median: float | None
    worst5: float | None
    low: float | None
    high: float | None


def summary(values: Sequence[float], *, high_leaks: bool = True) -> Summary:
    """`high_leaks`: whether a high value means that more is seen, as for PSNR and SSIM, or a low one, as for MSE."""
    data = np.asarray(values, dtype=float)
    if not np.isfinite(data).all():
        raise GradveilError(
            f"{np.count_nonzero(~np.isfinite(data))} of {len(data)} values are not finite: count them as failures instead"
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
    """Of the mean, by Student's t; None where there is no spread to go by."""
    from scipy.stats import t

    if of.mean is None or of.std is None:
        return None
    half = float(t.ppf((1 + level) / 2, of.n - 1)) * of.std / math.sqrt(of.n)
    return of.mean - half, of.mean + half


@dataclass(frozen=True)
class Verdict:
    """Whether reconstructions hold more than a blind guess does, and the two p-values that say so."""

    better: bool
    p_over_blind: float
    p_identified: float
    chance: float  # of identifying one image without having seen its gradient


def better_than_blind(
    over_blind: Sequence[float], hits: int, n: int, candidates: int, *, chance: float | None = None
) -> Verdict:
    """Better when either test rejects at 2.5%: the one-sided signed-rank test of dB over blind above 0, or the exact binomial test
    of `hits` identified among n.

    An identification by chance happens once in `candidates`; a higher `chance` says what a guess that knows the label reaches.
    """
    from scipy.stats import binomtest

    _check_share(hits, n)
    if candidates < 1:
        raise GradveilError(f"{candidates} candidates: there must be at least 1")
    likely = 1 / candidates if chance is None else chance
    by_rank = _signed_rank(over_blind)
    by_hits = (
        float(binomtest(hits, n, min(likely, 1.0), alternative="greater").pvalue) if n else 1.0
    )
    return Verdict(min(by_rank, by_hits) < EACH, by_rank, by_hits, likely)


def clopper_pearson(hits: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Exact two-sided bounds on a share, from `hits` of n: each side is wrong in at most (1 - level) / 2 of cases."""
    from scipy.stats import beta

    _check_share(hits, n)
    if not 0 < level < 1:
        raise GradveilError(f"confidence level {level}: choose above 0 and below 1, such as 0.95")
    tail = (1 - level) / 2
    low = float(beta.ppf(tail, hits, n - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, n - hits)) if hits < n else 1.0
    return low, high


def upper_bound(hits: int, n: int, level: float = 0.95) -> float:
    """Exact and one-sided: a share is above it in at most 1 - level of cases."""
    return clopper_pearson(hits, n, _two_sided(level))[1]


def lower_bound(hits: int, n: int, level: float = 0.95) -> float:
    """Exact and one-sided: a share is below it in at most 1 - level of cases."""
    return clopper_pearson(hits, n, _two_sided(level))[0]


@dataclass(frozen=True)
class Difference:
    """Of two shares, with bounds of which each is one-sided."""

    value: float
    low: float
    high: float


def difference(hits: int, n: int, other_hits: int, other_n: int, level: float = 0.95) -> Difference:
    """The first share minus the second, of independent samples: Newcombe's hybrid of two Wilson intervals (1998, method 10)."""
    if min(n, other_n) < 1:
        raise GradveilError(f"a difference of shares of {n} and {other_n}: both need at least 1")
    (low, high), (other_low, other_high) = (
        wilson(hits, n, level),
        wilson(other_hits, other_n, level),
    )
    one, other = hits / n, other_hits / other_n
    below, above = np.hypot(one - low, other_high - other), np.hypot(high - one, other - other_low)
    return Difference(one - other, float(one - other - below), float(one - other + above))


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


def _signed_rank(values: Sequence[float]) -> float:
    """Zeros are left out, as Wilcoxon's test does."""
    from scipy.stats import wilcoxon

    moved = [value for value in values if value != 0]
    return float(wilcoxon(moved, alternative="greater").pvalue) if moved else 1.0


def _check_share(hits: int, n: int) -> None:
    if not 0 <= hits <= n:
        raise GradveilError(f"{hits} of {n}: expected a count from 0 to the number of images")
