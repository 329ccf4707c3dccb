"""Verdicts: what decides them, and that nothing is decided without records."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_ind

from gradveil.audits.records import Record
from gradveil.audits.results import MEASURES, Row, make_row
from gradveil.papers.beyond import SINGLE
from gradveil.papers.catalog import EXPERIMENTS
from gradveil.papers.cells import Cell, Workspace
from gradveil.papers.claims import (
    Evidence,
    clients_hide,
    costs_nothing,
    decide_all,
    larger_resist,
    training_lowers,
)
from gradveil.papers.experiments import Entry, Size
from gradveil.papers.plan import make_parts
from gradveil.papers.records import Records
from gradveil.papers.summaries import correlation_table, correlations, lowest, overlap
from gradveil.papers.switches import VARIANTS
from gradveil.papers.tables import rank_one, rows_of, told_by_gradients
from gradveil.papers.verdicts import (
    FAILS,
    HOLDS,
    IN_PART,
    MISSING,
    UNTOLD,
    accuracy_loss,
    decide_better,
    decide_fewer,
    decide_infeasible,
    decide_less,
    decide_loss,
    decide_overlap,
    decide_search,
    together,
    welch,
)
from gradveil.search.comparisons import Comparison
from gradveil.stats import clopper_pearson

RECORDS = Path(__file__).parents[2] / "benchmarks/results/reproduce"


@pytest.mark.parametrize(
    ("hits", "n", "bare", "verdict"),
    [
        (0, 64, (30, 64), HOLDS),
        (1, 100, (60, 100), HOLDS),
        (0, 64, (1, 64), UNTOLD),  # the attack finds nothing without a defense either
        (0, 64, None, UNTOLD),
        (0, 6, (3, 6), UNTOLD),  # as many as the replication attacked
        (5, 64, (50, 64), IN_PART),  # above chance, and perhaps at most 10%
        (5, 64, (6, 64), UNTOLD),
        (20, 64, (50, 64), FAILS),  # less than without it, but surely more than 10%
        (88, 100, (100, 100), FAILS),
        (20, 64, None, FAILS),
    ],
)
def test_an_attack_is_infeasible_only_where_the_interval_says_so(
    hits: int, n: int, bare: tuple[int, int] | None, verdict: str
) -> None:
    assert decide_infeasible(hits, n, 0.02, bare) == verdict


def test_verdicts_of_parts_are_joined() -> None:
    assert together([HOLDS, HOLDS]) == HOLDS
    assert together([HOLDS, UNTOLD, UNTOLD]) == UNTOLD  # one part does not speak for the others
    assert together([HOLDS, FAILS]) == IN_PART and together([FAILS, UNTOLD]) == FAILS
    assert together([HOLDS, IN_PART]) == IN_PART
    assert together([UNTOLD, MISSING]) == f"{UNTOLD}, so far"
    assert together([HOLDS, MISSING]) == f"{HOLDS}, so far"
    assert together([MISSING]) == MISSING and together([]) == MISSING


def test_a_share_is_smaller_only_where_the_bounds_of_the_gap_say_so() -> None:
    assert decide_less((20, 64), (60, 64)) == HOLDS
    assert decide_less((60, 64), (20, 64)) == FAILS
    assert decide_less((30, 64), (34, 64)) == UNTOLD


def test_the_papers_five_are_decided_by_the_bounds_of_their_number() -> None:
    assert decide_overlap(5, 5, 5) == HOLDS and decide_overlap(4, 5, 5) == UNTOLD
    assert decide_overlap(3, 4, 5) == IN_PART and decide_overlap(2, 4, 5) == FAILS


def test_a_defense_is_better_only_where_it_leaks_less_and_costs_less() -> None:
    assert decide_better((-0.3, -0.1), (-0.05, -0.01)) == HOLDS
    assert decide_better((-0.3, 0.1), (-0.05, -0.01)) == UNTOLD
    assert decide_better((0.1, 0.3), (-0.05, -0.01)) == FAILS
    assert decide_better((-0.3, -0.1), (0.01, 0.05)) == FAILS


@pytest.mark.parametrize(
    ("less", "more", "verdict"),
    [
        ((0.001, 0.002), (1.0, 1.0), HOLDS),
        ((0.001, 0.02), (1.0, 0.9), IN_PART),  # 0.02 is too much of two tests in two directions
        ((0.3, 0.2), (0.7, 0.8), UNTOLD),
        ((0.001, 1.0), (1.0, 0.001), FAILS),
    ],
)
def test_a_search_is_judged_against_none_and_against_random_policies(
    less: tuple[float, float], more: tuple[float, float], verdict: str
) -> None:
    tests = [Comparison("lineup", 64, 0.1, 0.2, *p) for p in zip(less, more, strict=True)]
    assert decide_search(tests) == verdict


def test_a_loss_of_accuracy_is_decided_over_trainings_or_test_images() -> None:
    lost, low, high = accuracy_loss([0.760, 0.757, 0.756], [0.748, 0.747, 0.745], 10_000)
    assert low < lost < high and lost == pytest.approx(0.011, abs=1e-3)
    assert decide_loss(low, high) == UNTOLD
    _, low, high = accuracy_loss([0.75], [0.66], 10_000)
    assert decide_loss(low, high) == FAILS
    _, low, high = accuracy_loss([0.75], [0.77], 10_000)
    assert decide_loss(low, high) == HOLDS
    _, low, high = accuracy_loss([0.75], [0.77], 100)
    assert decide_loss(low, high) == UNTOLD


def test_the_papers_five_are_counted_among_the_lowest() -> None:
    rng = np.random.default_rng(0)
    values = {str(k): list(0.5 + 0.01 * rng.random(20)) for k in range(50)}
    values["none"] = [0.0] * 20
    for k in (3, 15, 18, 26):
        values[str(k)] = [0.1 + k / 1_000] * 20
    assert {*lowest(values)} >= {"3", "15", "18", "26"} and "none" not in lowest(values)
    found, low, high = overlap(values)
    assert low <= found <= high and 4 <= found <= 5


def test_correlations_have_an_interval_around_them() -> None:
    rng = np.random.default_rng(0)
    left = rng.random((100, 1))
    right = left + 0.5 * rng.random((100, 1))
    r, low, high = correlations(left, right)
    assert r == pytest.approx(np.corrcoef(left.T, right.T)[0, 1]) and low < r < high
    assert correlations(left, np.exp(9 * left), ranks=True)[0] == pytest.approx(1)
    noisy = right + 3 * rng.standard_normal((100, 4))  # four images that disagree
    wide = correlations(left, noisy)
    alone = correlations(left, noisy.mean(1, keepdims=True))
    assert wide[0] == pytest.approx(alone[0]) and wide[2] - wide[1] > alone[2] - alone[1]
    result = {
        "privacy": {"code": {"a": [0.1], "b": [0.2], "c": [0.3]}},
        "attack": {
            name: {"psnr": [level], "ssim": [0.1], "lineup": [0.0], "over_blind": [-level]}
            for name, level in (("a", 1.0), ("b", 2.0), ("c", 3.0))
        },
    }
    found = {(quantity, kind): r for _, quantity, kind, r, *_ in correlation_table(result)}
    assert found["psnr", "Pearson"] == pytest.approx(1)
    assert found["over_blind", "Spearman"] == pytest.approx(-1)


def test_without_records_every_claim_is_not_measured_yet(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, device="cpu")
    parts = make_parts([*EXPERIMENTS.values()], VARIANTS, Size(), workspace)
    decisions = decide_all(parts, Records((tmp_path / "records",)))
    assert {each.verdict for each in decisions} == {MISSING}
    assert [each.name for each in decisions[:7]] == [f"claim {n}" for n in range(1, 8)]


def attacked(attack: str, hits: Sequence[int], images: int) -> Row:
    """Return the row of an attack that found so many of the images of each update."""
    records = [
        Record(
            *("of a test", "attack", attack, 0, update * images + number, "ok", 0, None, None, 50),
            {"used": dict.fromkeys(MEASURES, 0.5) | {"rank": 1.0 if number < found else 9.0}},
            0.0,
            update * images,
        )
        for update, found in enumerate(hits)
        for number in range(images)
    ]
    return make_row(records, "used")


@pytest.mark.parametrize(
    ("hits", "verdict"),
    [
        ({"adam-cosine": 15}, FAILS),  # further attacks find no fewer
        ({"adam-cosine": 2}, MISSING),
        ({"adam-cosine": 2, "raced": 2}, UNTOLD),
        ({"adam-cosine": 2, "raced": 15}, FAILS),
        ({}, MISSING),
    ],
)
def test_larger_images_do_not_resist_where_one_attack_must_find_more_than_a_tenth(
    hits: dict[str, int], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(_: object, _records: Records, attack: str) -> Row | None:
        if attack not in hits:
            return None
        return attacked(attack, [number < hits[attack] for number in range(16)], 1)

    monkeypatch.setattr("gradveil.papers.claims.attack_row", found)
    workspace = Workspace(tmp_path, device="cpu")
    parts = make_parts([EXPERIMENTS["larger"]], VARIANTS, Size(), workspace)
    made = larger_resist(Evidence.of(parts, Records((tmp_path,))))
    assert made.verdict == verdict
    assert len(made.figures) == 2 * len(hits)  # untrained and trained


@pytest.mark.parametrize(
    ("hits", "verdict"),
    [
        ({"adam-cosine": (1, 1, *[0] * 62), "raced": (0,) * 64}, HOLDS),
        (
            {"adam-cosine": (1, 1, *[0] * 6), "raced": (0,) * 8},
            IN_PART,
        ),  # too few to be at most 10%
        ({"adam-cosine": (1, 1, 2, 1, 1, 1, 3, 0), "raced": (0,) * 8}, IN_PART),
        ({"adam-cosine": (1,) * 8, "raced": (8,) * 8}, UNTOLD),  # the best of both attacks counts
        ({"adam-cosine": (8, 8, 8, 0, 0, 0, 0, 0)}, UNTOLD),  # three updates of eight, not 24 of 64
        ({}, MISSING),
    ],
)
def test_clients_hide_images_where_attacks_can_find_at_most_a_tenth_and_fewer_than_of_single_ones(
    hits: dict[str, Sequence[int]],
    verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    single = {"adam-cosine": (1,) * 24 + (0,) * 8, "raced": (1,) * 8 + (0,) * 24}

    def row(entries: Sequence[Entry], _: Records, attack: str) -> Row | None:
        if entries[0].row.endswith(SINGLE):
            return attacked(attack, single[attack], 1)
        return attacked(attack, hits.get(attack, (0,) * 8), 8) if hits else None

    monkeypatch.setattr("gradveil.papers.claims.attack_row", row)
    every = attacked("gradient line-up", (8,) * 4, 8)
    monkeypatch.setattr("gradveil.papers.claims.told_by_gradients", lambda *_: every)
    parts = make_parts(
        [EXPERIMENTS["clients"]], VARIANTS, Size(), Workspace(tmp_path, device="cpu")
    )
    found = clients_hide(Evidence.of(parts, Records((tmp_path,))))
    assert found.verdict == verdict
    rows = {entry.row for part in parts for entry in part.entries}
    singles = sum(row.endswith(SINGLE) for row in rows)
    assert singles == 2 and len(found.figures) == 1 + (len(rows) if hits else singles)


def test_an_attack_that_failed_on_all_images_does_not_decide_on_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(entries: Sequence[Entry], _: Records, attack: str) -> Row:
        if entries[0].row.endswith(SINGLE):
            return attacked(attack, (1,) * 24 + (0,) * 8, 1)
        return replace(attacked(attack, (0,) * 8, 8), failed=64)

    monkeypatch.setattr("gradveil.papers.claims.attack_row", row)
    every = attacked("gradient line-up", (8,) * 4, 8)
    monkeypatch.setattr("gradveil.papers.claims.told_by_gradients", lambda *_: every)
    firsts = {"raced": (None, None)}
    monkeypatch.setattr("gradveil.papers.claims._firsts", lambda *_: firsts)
    parts = make_parts(
        [EXPERIMENTS["clients"]], VARIANTS, Size(), Workspace(tmp_path, device="cpu")
    )
    found = clients_hide(Evidence.of(parts, Records((tmp_path,))))
    assert found.verdict == UNTOLD
    assert all("`raced` failed on all images" in figure for figure in found.figures[:-1])


def test_images_of_one_update_do_not_count_as_independent() -> None:
    spread, one = ((12 / 64, bounds) for bounds in ((0.10, 0.30), (0.01, 0.60)))
    single = (0.6, (0.41, 0.77))
    assert decide_fewer(spread, single) == HOLDS and decide_fewer(one, single) == UNTOLD
    assert decide_fewer(single, spread) == FAILS
    row = attacked("adam-cosine", (8, 0, 0, 0), 8)
    low, high = clopper_pearson(1, 4)
    assert rank_one(row) == f"8/32 ({100 * low:.0f} to {100 * high:.0f}%)"


def test_welch_is_as_scipy_has_it_and_takes_a_side_without_spread() -> None:
    left, right = (0.757, 0.7556, 0.7603), (0.7481, 0.7476, 0.7452, 0.75)
    theirs = ttest_ind(left, right, equal_var=False).confidence_interval(0.95)
    assert welch(left, right)[1:] == pytest.approx((theirs.low, theirs.high))
    gap, low, high = welch((0.9932, 0.9953), (0.1668, 0.1668))  # a network that answers the same
    assert gap == pytest.approx(0.82745) and high - low == pytest.approx(12.7062 * 0.0021, rel=1e-4)
    assert np.isnan(welch((0.5, 0.5), (0.4, 0.4))[1:]).all()


def test_two_trainings_bound_a_loss_by_what_an_accuracy_can_be() -> None:
    lost, low, high = accuracy_loss([0.1715, 0.1643], [0.0585, 0.2386], 10_000)
    assert lost == pytest.approx(0.01935) and (low, high) == (-1, 1)


def test_the_lineup_by_gradients_is_read_from_the_ceilings(tmp_path: Path) -> None:
    parts = make_parts(
        [EXPERIMENTS["clients"]], VARIANTS, Size(), Workspace(tmp_path, device="cpu")
    )
    (entries,) = (rows_of(part, f"untrained, {SINGLE}") for part in parts)
    found = told_by_gradients(entries, Records((RECORDS,)))
    assert (found.identified, found.n, found.attack) == (32, 32, "gradient line-up")


@dataclass(frozen=True)
class Accuracies(Records):
    """Trainings of these seeds are done, with 90% right without a defense and 80% with one."""

    seeds: tuple[int, ...] = ()

    def result(self, cell: Cell) -> Any:
        right = 0.9 if cell.training.defense.name == "none" else 0.8
        done = cell.training.seed in self.seeds
        return (
            {"accuracy": right + 0.001 * cell.training.seed, "test_images": 9_000} if done else None
        )


@pytest.mark.parametrize(
    ("seeds", "verdict"), [((0,), f"{UNTOLD}, so far"), ((0, 1), FAILS), ((), MISSING)]
)
def test_one_training_of_each_cannot_tell_what_a_defense_costs(
    seeds: tuple[int, ...], verdict: str, tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path, device="cpu")
    parts = make_parts([EXPERIMENTS["precode-acc"]], VARIANTS, Size(), workspace)
    pair = ("precode-acc", "cifar100, mlp, none", "cifar100, mlp, precode")
    found = costs_nothing(Evidence.of(parts, Accuracies(seeds=seeds)), "name", "text", [pair])
    assert found.verdict == verdict
    assert any("one training each" in each for each in found.figures) == (seeds == (0,))


@pytest.mark.parametrize(("wide", "verdict"), [(True, HOLDS), (False, f"{HOLDS}, so far")])
def test_training_lowers_leakage_only_by_both_lineups(
    wide: bool, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def firsts(_: Evidence, _experiment: str, row: str) -> dict[str, Any]:
        hits = (60, 64) if "step 0" in row else (20, 64)
        return {"usual": (hits, hits if wide else None), "strong": ((9, 64), (9, 64))}

    monkeypatch.setattr("gradveil.papers.claims._firsts", firsts)
    found = training_lowers(Evidence({}, Records((tmp_path,))))
    assert found.verdict == verdict
    told = "`strong`: 9/64 (9/64), then 9/64 (9/64), then 9/64 (9/64)"
    assert sum(each.endswith(told) for each in found.figures) == 2  # none and the hybrid
