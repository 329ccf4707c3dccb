"""Rules of the verdicts on claims: what figures with which bounds decide."""

from collections.abc import Sequence

import numpy as np

from gradveil.search.comparisons import Comparison
from gradveil.stats import Difference, clopper_pearson, difference, hybrid

HOLDS, IN_PART, FAILS = "holds", "holds in part", "does not hold"
UNTOLD, MISSING = "cannot be told at this n", "not measured yet"
SO_FAR = ", so far"
INFEASIBLE = 0.10  # the largest share of images with rank 1 that "infeasible" allows
POINT = 0.01  # of accuracy: what "almost nothing" allows
TEST = 0.05 / 4  # level of each of a search's two tests in two directions
Rank = tuple[float, tuple[float, float]]
"""A share of images with rank 1, and its 95% bounds."""
SOME = 3  # of the paper's five best transformations: "in part"


def together(verdicts: Sequence[str]) -> str:
    """Join the verdicts of a claim's parts.

    It holds where all do, and does not where one does not and none holds, even in part. It cannot
    be told where nothing fails and a part cannot be told. While parts are missing, it is a verdict
    so far.
    """
    known = {*verdicts} - {MISSING}
    if not known:
        return MISSING
    if len(known) == 1:
        (joined,) = known
    elif FAILS in known:
        joined = IN_PART if known & {HOLDS, IN_PART} else FAILS
    else:
        joined = UNTOLD if UNTOLD in known else IN_PART
    return f"{joined}{SO_FAR}" if MISSING in verdicts else joined


def decide_infeasible(hits: int, n: int, chance: float, bare: tuple[int, int] | None) -> str:
    """Decide whether an attack is infeasible that has rank 1 for `hits` of n images.

    It holds where the share can be at most `INFEASIBLE`, and the attack works without the defense,
    `bare` (hits, n). It does not where the share must be more than that. Between the two it holds
    in part where it is above chance, but below that without the defense.
    """
    low, high = clopper_pearson(hits, n)
    if low > INFEASIBLE:
        return FAILS
    if low <= chance:
        works = bare is not None and clopper_pearson(*bare)[0] > chance
        return HOLDS if works and high <= INFEASIBLE else UNTOLD
    below = bare is not None and difference(hits, n, *bare, level=0.975).high < 0
    return IN_PART if below else UNTOLD


def accuracy_loss(
    bare: Sequence[float], defended: Sequence[float], tested: int
) -> tuple[float, float, float]:
    """Return the loss of accuracy and its 95% bounds.

    Over trainings by Welch's t, where there are two or more of each; else over the `tested` images.
    """
    if min(len(bare), len(defended)) >= 2:
        lost, low, high = welch(bare, defended)
        if np.isfinite(low):
            return lost, max(low, -1.0), min(high, 1.0)  # two trainings may bound nothing
    before, after = (round(tested * values[0]) for values in (bare, defended))
    test = difference(before, tested, after, tested, level=0.975)
    return test.value, test.low, test.high


def decide_loss(low: float, high: float) -> str:
    """Decide whether a loss of accuracy is at most a point."""
    return HOLDS if high <= POINT else FAILS if low > POINT else UNTOLD


def welch(left: Sequence[float], right: Sequence[float]) -> tuple[float, float, float]:
    """Return the difference of two means, with its 95% bounds by Welch's t.

    The bounds are NaN where no side has a spread.
    """
    from scipy.stats import t

    gap = float(np.mean(left) - np.mean(right))
    # scipy's own test warns where the values of a side are all the same.
    parts = [0.0 if len({*s}) == 1 else float(np.var(s, ddof=1)) / len(s) for s in (left, right)]
    if not (square := sum(parts)):
        return gap, float("nan"), float("nan")
    freedom = square**2 / sum(
        p**2 / (len(s) - 1) for p, s in zip(parts, (left, right), strict=True)
    )
    half = float(t.ppf(0.975, freedom)) * square**0.5
    return gap, gap - half, gap + half


def decide_overlap(low: int, high: int, least: int) -> str:
    """Decide whether at least `least` of the paper's five are ours, by 95% bounds of their number.

    Where there can be no more than `least` - 1, it holds in part with at least `SOME` of them.
    """
    if low >= least:
        return HOLDS
    return UNTOLD if high >= least else IN_PART if low >= SOME else FAILS


def decide_better(leaks: tuple[float, float], costs: tuple[float, float]) -> str:
    """Decide whether a defense leaks less and costs less than another, by bounds of both gaps.

    Either refutes it where it is surely the other way.
    """
    if leaks[0] > 0 or costs[0] > 0:
        return FAILS
    return HOLDS if leaks[1] < 0 and costs[1] < 0 else UNTOLD


def decide_search(tests: Sequence[Comparison]) -> str:
    """Decide on a search's policy by two tests, against none and random, in both directions.

    It holds where both show that it leaks less. It does not where one shows that it leaks more.
    """
    if any(test.more < TEST for test in tests):
        return FAILS
    less = [test.less < TEST for test in tests]
    return HOLDS if all(less) else IN_PART if any(less) else UNTOLD


def decide_fewer(of_updates: Rank, of_single: Rank) -> str:
    """Decide whether a share of rank 1 is below another, by bounds of their gap.

    These are Newcombe's hybrid (1998) of the intervals of both, so images of one update need not be
    independent where an interval is over updates.
    """
    return _fewer(hybrid(*of_updates, *of_single))


def decide_less(later: tuple[int, int], earlier: tuple[int, int]) -> str:
    """Decide whether the later of two shares (hits, n) is smaller, by the bounds of their gap."""
    return _fewer(difference(*later, *earlier, level=0.975))


def _fewer(gap: Difference) -> str:
    return HOLDS if gap.high < 0 else FAILS if gap.low > 0 else UNTOLD
