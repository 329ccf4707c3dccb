"""Summaries, exact bounds against scipy's, and a verdict that is seldom wrong."""

from math import comb

import numpy as np
import pytest
from scipy.stats import binomtest, sem, t, wilcoxon

from gradveil.core.errors import GradveilError
from gradveil.stats import (
    EACH,
    above_chance,
    bet_on_mean,
    can_tell,
    clopper_pearson,
    difference,
    holm,
    holm_cutoff,
    mean_interval,
    share_of_updates,
    sign_test,
    signed_rank,
    summary,
    upper_bound,
)


def test_a_summary_is_what_numpy_says() -> None:
    values = np.random.default_rng(0).normal(12, 3, 101).tolist()
    found = summary(values)
    assert found.n == 101 and found.low == min(values) and found.high == max(values)
    assert found.mean == pytest.approx(np.mean(values)) and found.median == pytest.approx(
        np.median(values)
    )
    assert found.std == pytest.approx(np.std(values, ddof=1))


def test_the_worst_five_percent_lie_where_more_is_seen() -> None:
    values = [float(i) for i in range(101)]
    assert summary(values).worst5 == 95 and summary(values, high_leaks=False).worst5 == 5


def test_too_few_values_have_no_spread() -> None:
    assert summary([]).mean is None and summary([]).n == 0
    assert summary([3.0]).mean == 3 and summary([3.0]).std is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(wrong: float) -> None:
    with pytest.raises(GradveilError, match="1 of 2 values are not finite"):
        summary([1.0, wrong])


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_clopper_pearson_bounds_are_scipys_exact_ones(n: int, level: float) -> None:
    for hits in {0, 1, n // 2, n - 1, n}:
        expected = binomtest(hits, n).proportion_ci(level, method="exact")
        assert clopper_pearson(hits, n, level) == pytest.approx(
            (expected.low, expected.high), abs=1e-12
        )


@pytest.mark.parametrize(
    ("hits", "n", "level"), [(-1, 3, 0.9), (4, 3, 0.9), (1, 3, 0.0), (1, 3, 1.0)]
)
def test_bounds_of_what_cannot_be_are_refused(hits: int, n: int, level: float) -> None:
    with pytest.raises(GradveilError):
        clopper_pearson(hits, n, level)


def test_decibels_that_are_all_above_blind_have_the_smallest_p_value() -> None:
    assert signed_rank([1.0 + i / 10 for i in range(8)]) == pytest.approx(0.5**8)


def test_one_image_of_four_found_among_a_thousand_is_above_chance() -> None:
    assert above_chance(1, 4, 0.001) == pytest.approx(1 - 0.999**4)
    assert above_chance(1, 4, 0.001) < EACH


def test_a_hit_says_less_where_a_guess_that_knows_the_label_has_a_higher_chance() -> None:
    assert above_chance(1, 10, 0.001) < EACH <= above_chance(1, 10, 0.05)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [-1.0] * 50, [3.0]])
def test_nothing_above_blind_is_no_better(values: list[float]) -> None:
    assert signed_rank(values) >= EACH and above_chance(0, max(len(values), 1), 0.001) == 1


@pytest.mark.parametrize(
    ("n", "chance", "enough"),
    [(4, 0.5, False), (4, 0.3, True), (6, 1.0, True), (5, 1.0, False), (1, 0.03, False)],
)
def test_images_tell_where_even_all_of_them_could_pass_a_test(
    n: int, chance: float, enough: bool
) -> None:
    """The smallest p-values are 2^-n of the signed ranks and chance^n of identification."""
    assert can_tell(n, chance) == enough == (min(0.5**n, chance**n) < 0.025)


def test_a_blind_attack_is_called_better_in_at_most_one_case_of_twenty() -> None:
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(600):
        by_rank = signed_rank(rng.normal(0, 2, 20).tolist())
        wrong += min(by_rank, above_chance(int(rng.binomial(20, 0.02)), 20, 0.02)) < EACH
    assert wrong / 600 < 0.075  # 5% and three standard errors


@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [1, 7, 64])
def test_one_sided_upper_bounds_are_scipys_exact_ones(n: int, level: float) -> None:
    for hits in {0, 1, n // 2, n}:
        high = binomtest(hits, n, alternative="less").proportion_ci(level, method="exact").high
        assert upper_bound(hits, n, level) == pytest.approx(high, abs=1e-12)


@pytest.mark.parametrize(
    ("counts", "bounds"),  # Newcombe 1998, Statistics in Medicine 17, table II, method 10
    [
        ((56, 70, 48, 80), (0.0524, 0.3339)),
        ((9, 10, 3, 10), (0.1705, 0.8090)),
        ((10, 10, 0, 20), (0.6791, 1.0)),
    ],
)
def test_a_difference_of_shares_has_the_published_bounds(
    counts: tuple[int, int, int, int], bounds: tuple[float, float]
) -> None:
    found = difference(*counts, level=0.975)
    assert (found.low, found.high) == pytest.approx(bounds, abs=6e-5)
    assert found.value == pytest.approx(counts[0] / counts[1] - counts[2] / counts[3])


def test_the_bounds_of_a_difference_hold_in_about_nineteen_of_twenty_cases_each() -> None:
    rng = np.random.default_rng(2)
    one, other, n = 0.9, 0.86, 500
    found = [
        difference(int(rng.binomial(n, one)), n, int(rng.binomial(n, other)), n)
        for _ in range(1_000)
    ]
    assert (
        np.mean([each.high < one - other for each in found]) < 0.075
        and np.mean([each.low > one - other for each in found]) < 0.075
    )


def test_differences_and_bounds_of_what_cannot_be_are_refused() -> None:
    with pytest.raises(GradveilError, match="shares of 0 and 5"):
        difference(0, 0, 1, 5)
    with pytest.raises(GradveilError, match=r"confidence level 0\.5"):
        upper_bound(1, 2, 0.5)


def test_the_interval_of_a_mean_is_student_s() -> None:
    values = [1.0, 2.5, -3.0, 4.0, 0.5]
    expected = t.interval(0.9, 4, np.mean(values), sem(values))
    assert mean_interval(summary(values), 0.9) == pytest.approx(expected)
    assert mean_interval(summary([1.0])) is None and mean_interval(summary([])) is None


def test_the_signed_rank_test_is_scipys_without_zeros() -> None:
    values = np.random.default_rng(3).normal(0.3, 1, 20).tolist()
    expected = float(wilcoxon(values, alternative="greater").pvalue)
    assert signed_rank([0.0, *values, 0.0]) == expected
    assert signed_rank([1.0] * 6) == pytest.approx(0.5**6, abs=0.01)
    assert signed_rank([]) == signed_rank([0.0, 0.0]) == 1.0


@pytest.mark.parametrize(("up", "down"), [(5, 0), (7, 2), (0, 4), (3, 3)])
def test_the_sign_test_is_exact_and_leaves_out_ties(up: int, down: int) -> None:
    """Summed by hand: the chance of at least `up` heads in as many throws of a coin as differ."""
    n = up + down
    expected = sum(comb(n, k) for k in range(up, n + 1)) / 2**n
    assert sign_test([0.7] * up + [-0.1] * down + [0.0] * 4) == pytest.approx(expected, rel=1e-12)
    assert sign_test([0.0]) == 1.0


def test_holm_rejects_what_the_step_down_procedure_does() -> None:
    """Holm's own procedure: compare the k-th smallest with 5% / (m - k + 1), stop at the first."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        p_values = (rng.random(rng.integers(1, 9)) ** 3).tolist()
        order, rejected = np.argsort(p_values), set()
        for position, i in enumerate(order):
            if p_values[i] >= 0.05 / (len(p_values) - position):
                break
            rejected.add(int(i))
        adjusted = holm(p_values)
        assert {i for i, p in enumerate(adjusted) if p < 0.05} == rejected
        assert all(a >= p for a, p in zip(adjusted, p_values, strict=True))
        cutoff = holm_cutoff(p_values)
        assert {i for i, p in enumerate(p_values) if p <= cutoff} == rejected


def test_single_images_have_exact_bounds_and_batches_count_as_one_observation_each() -> None:
    single = share_of_updates([[True], [False], [True], [False]], 0.05)
    assert (single.hits, single.n) == (2, 4) and single.bounds == clopper_pearson(2, 4)
    assert single.p == pytest.approx(above_chance(2, 4, 0.05))
    batches = share_of_updates([[True, True], [False, False]], 0.05)
    assert (batches.hits, batches.n) == (2, 4) and batches.bounds == clopper_pearson(1, 2)
    few = [[True, False], *[[False, False]] * 20]
    assert share_of_updates(few, 0.001).p == pytest.approx(2 * above_chance(1, 21, 0.002))
    assert share_of_updates([], 0.05).p == 1.0


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("spread", [0.01, 1.0, 1e6])
def test_dependent_images_of_a_batch_raise_the_alarm_in_no_more_than_five_percent(
    size: int, spread: float
) -> None:
    """A small spread means that an update is hit as a whole or not at all, the worst case."""
    rng = np.random.default_rng(1)
    alarms = dict.fromkeys((0.01, 0.05), 0)
    for chance in alarms:
        for _ in range(500):
            likely = rng.beta(chance * spread, (1 - chance) * spread, 12)
            hits = rng.random((12, size)) < likely[:, None]
            alarms[chance] += share_of_updates(hits.tolist(), chance).p < 0.05
    assert max(alarms.values()) / 500 <= 0.05 + 3 * (0.05 * 0.95 / 500) ** 0.5


def test_many_hits_in_each_of_few_large_updates_are_no_luck() -> None:
    """By luck nearly every update of 64 images has a hit: counting such updates tells nothing."""
    many, lucky = [[image < 38 for image in range(64)]] * 8, [[k < 3 for k in range(64)]] * 8
    assert share_of_updates(many, 0.05).p < 1e-4 and share_of_updates(lucky, 0.05).p > 0.3


def test_a_bet_on_a_mean_is_right_where_its_error_can_be_counted() -> None:
    """Shares of 0 or 1 alone: the exact rate of each p-value below a level."""
    for n, chance in ((5, 0.05), (12, 0.01), (30, 0.3)):
        p = [bet_on_mean((1.0,) * k + (0.0,) * (n - k), chance) for k in range(n + 1)]
        rate = [above_chance(k, n, chance) for k in range(n + 1)]
        assert all(r <= q + 1e-12 for r, q in zip(rate, p, strict=True))
        assert p == sorted(p, reverse=True) and p[-1] < (n + 1) * rate[-1]
