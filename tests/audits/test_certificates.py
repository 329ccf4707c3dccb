"""Exact statements: counts, scipy's bounds, decisions seldom wrong, failures both ways."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from gradveil.audits import AuditResult, CaseResult, Certificate, Record, Threshold, certify
from gradveil.audits.certificates import bound, level_of_each, percent
from gradveil.audits.model import ModelFacts
from gradveil.core.errors import GradveilError
from gradveil.stats import clopper_pearson, share_of_updates, upper_bound
from report.folders import make_audit

PSNR15 = Threshold("psnr", 15.0)
EACH = level_of_each(1)


def record(
    attack: str, image: int, used: float | None, original: float = 0.0, kind: str = "attack"
) -> Record:
    base = {"mse": 0.1, "psnr_affine": 13.0, "over_blind": 0.0, "rank": 7}
    scores = {
        "used": base | {"psnr": used, "ssim": (used or 0) / 100},
        "original": base | {"psnr": original, "ssim": original / 100},
    }
    status, kept = ("failed: x", {}) if used is None else ("ok", scores)
    return Record(
        "e",
        kind,
        attack,
        0,
        image,
        status,
        1,
        1,
        0.2,
        500,
        kept,  # type: ignore[arg-type]
        0.1,
    )


def made(
    records: Sequence[Record], *, changes_images: bool = True, controls: Sequence[str] = "ab"
) -> CaseResult:
    """Return a case; `controls` are the attacks that worked on their positive controls."""
    blind = [record("blind: gray", image, 10.0, kind="blind") for image in range(4)]
    works = [each for attack in controls for each in positive(attack, psnr=30.0, rank=1)]
    settings = {
        "defense": "3-1-7",
        "changes_images": changes_images,
        "clean": False,
        "left_out": {},
    }
    return CaseResult(Path("run"), settings, (*records, *blind, *works), None)


def positive(attack: str, *, psnr: float, rank: int, count: int = 4) -> list[Record]:
    found = [record(attack, image, psnr, psnr, kind="positive") for image in range(count)]
    return [
        replace(each, scores={truth: {**some, "rank": rank} for truth, some in each.scores.items()})
        for each in found
    ]


def test_each_attack_is_counted_against_both_truths_and_all_together_once() -> None:
    first = [
        record("a", i, used, original)
        for i, (used, original) in enumerate([(15.0, 3), (14.99, 15), (3, 3), (3, 3)])
    ]
    second = [record("b", i, used, 3.0) for i, used in enumerate([20.0, 3, 16, 3])]
    found = certify(made([*first, *second]), PSNR15)
    a, b = (claim.bounds for claim in found.claims)
    assert (a["used"].hits, a["original"].hits, b["used"].hits, b["original"].hits) == (1, 1, 2, 0)
    assert (found.overall.hits, found.overall.n) == (3, 4) and found.blind.bounds["used"].hits == 0
    assert found.overall.upper == pytest.approx(
        binomtest(3, 4, alternative="less").proportion_ci(0.975, method="exact").high
    )


def test_images_that_are_used_as_they_are_have_one_truth() -> None:
    found = certify(
        made([record("a", i, 20.0, 20.0) for i in range(4)], changes_images=False), PSNR15
    )
    assert (
        list(found.claims[0].bounds) == ["original"]
        and found.overall.hits == 4
        and found.overall.upper == 1
    )


def test_ssim_has_its_own_threshold() -> None:
    assert (
        certify(
            made([record("a", i, 10.0 * i) for i in range(4)]), Threshold.parse("ssim=0.2")
        ).overall.hits
        == 2
    )


def test_failed_images_are_tested_and_reported_both_ways() -> None:
    attacks = [
        record("a", 0, 20.0),
        record("a", 1, None),
        record("a", 2, 3.0),
        record("a", 3, None),
        record("b", 3, 20.0),
    ]
    found = certify(made([*attacks, *(record("b", i, 3.0) for i in range(3))]), PSNR15)
    a = found.claims[0].bounds["used"]
    assert (a.n, a.hits, a.failed) == (4, 1, 2)
    assert a.upper_failed == upper_bound(3, 4, 0.975) > a.upper == upper_bound(1, 4, 0.975)
    assert (found.overall.hits, found.overall.failed) == (
        2,
        1,
    )  # image 3 failed once and was reached once
    assert bound([[True], [False]], EACH).upper_failed is None


def test_nothing_can_be_said_of_no_image() -> None:
    with pytest.raises(GradveilError, match="n = 0"):
        certify(made([]), PSNR15)
    with pytest.raises(GradveilError, match="n = 0"):
        bound([], EACH)


@pytest.mark.parametrize(
    ("hits", "n", "bounded"),
    [(0, 71, None), (0, 72, True), (0, 10, None), (3, 10, False), (59, 59, False)],
)
def test_delta_is_decided_only_where_n_allows(hits: int, n: int, bounded: bool | None) -> None:
    records = [record("a", i, 20.0 if i < hits else 3.0) for i in range(n)]
    found = certify(made(records), Threshold("psnr", 15, delta=0.05))
    assert found.bounded is bounded and found.private is None  # gamma was not asked for
    assert certify(made(records), PSNR15).bounded is None


def test_a_failed_image_speaks_against_privacy_and_not_for_a_leak() -> None:
    records = [record("a", i, None if i < 4 else 3.0) for i in range(60)]
    assert certify(made(records), Threshold("psnr", 15, delta=0.05)).bounded is None


@pytest.mark.parametrize(
    ("hits", "accuracy", "private"),
    [
        (0, 0.9, True),
        (60, 0.9, False),
        (0, 0.5, False),
        (60, 0.5, False),
        (2, 0.9, None),
        (2, 0.5, False),
    ],
)
def test_private_is_what_keeps_both_delta_and_gamma(
    hits: int, accuracy: float, private: bool | None
) -> None:
    result = made([record("a", i, 20.0 if i < hits else 3.0) for i in range(80)])
    trained = ModelFacts(accuracy, 10_000, "3-1-7", None)
    baseline = ModelFacts(0.9, 10_000, "none", None)
    both = Threshold("psnr", 15, delta=0.05, gamma=0.1)
    found = certify(result, both, trained=trained, baseline=baseline)
    assert found.private is private and found.plain()["private"] is private
    for alone in (Threshold("psnr", 15, delta=0.05), Threshold("psnr", 15, gamma=0.1)):
        assert certify(result, alone, trained=trained, baseline=baseline).private is None


def test_of_blind_guesses_that_reach_epsilon_equally_often_the_best_is_named() -> None:
    guesses = [
        record(name, i, psnr, psnr, kind="blind")
        for name, psnr in (("blind: noise", 6.0), ("blind: mean", 13.0))
        for i in range(4)
    ]
    attacks = [record("a", i, 3.0) for i in range(4)]
    assert certify(made([*guesses, *attacks]), PSNR15).blind.attack == "blind: mean"
    assert certify(made([*guesses, *attacks]), Threshold("psnr", 5)).blind.attack == "blind: mean"
    lucky = [record("blind: luck", i, 16.0 if i == 0 else 1.0, 1.0, kind="blind") for i in range(4)]
    assert certify(made([*guesses, *lucky, *attacks]), PSNR15).blind.attack == "blind: luck"


def test_the_loss_of_accuracy_needs_both_models_and_is_decided_by_its_bounds() -> None:
    result, asked = made([record("a", i, 3.0) for i in range(4)]), Threshold("psnr", 15, gamma=0.02)
    plain = ModelFacts(0.9, 10_000, "none", None)
    for accuracy, decided in ((0.899, True), (0.80, False), (0.88, None)):
        found = certify(
            result, asked, trained=ModelFacts(accuracy, 10_000, "3-1-7", None), baseline=plain
        )
        assert (
            found.loss is not None
            and found.loss.value == pytest.approx(0.9 - accuracy)
            and found.accurate is decided
        )
    assert (
        certify(result, asked, trained=plain).loss is None
        and certify(result, asked, trained=plain).accurate is None
    )
    itself = certify(result, asked, trained=plain, baseline=plain)
    assert itself.loss is not None and itself.loss.high == 0 and itself.accurate


BOTH = Threshold("psnr", 15, delta=0.05, gamma=0.1)
TRAINED = ModelFacts(0.9, 10_000, "3-1-7", None, "test", "1" * 64)
PLAIN = ModelFacts(0.9, 10_000, "none", None, "test", "2" * 64)


def decided(result: CaseResult, asked: Threshold = BOTH, **facts: Any) -> Certificate:
    return certify(result, asked, **({"trained": TRAINED, "baseline": PLAIN} | facts))


def unreached(attack: str = "a") -> list[Record]:
    return [record(attack, i, 3.0) for i in range(100)]


@pytest.mark.parametrize(
    "control",
    [
        pytest.param([], id="without a control"),
        pytest.param(positive("a", psnr=8.0, rank=7), id="fails"),
        pytest.param(positive("a", psnr=14.0, rank=1), id="never comes to epsilon"),
        pytest.param(positive("a", psnr=30.0, rank=1, count=1), id="too few to tell"),
        pytest.param(positive("b", psnr=30.0, rank=1), id="that of another attack"),
    ],
)
def test_an_attack_that_was_not_shown_to_work_shows_no_privacy(control: list[Record]) -> None:
    rows = [replace(each, candidates=2) if len(control) == 1 else each for each in control]
    found = decided(made([*unreached(), *rows], controls=""))
    assert found.overall.upper < 0.05 and found.accurate and found.working == ()
    assert (found.verdict, found.private, found.bounded) == ("cannot be told", None, None)
    assert {row.verdict for row in found.rows} == {"cannot be told"}
    assert decided(made(unreached())).verdict == "private"


def test_an_attack_that_was_not_shown_to_work_still_shows_a_leak() -> None:
    records = [record("a", i, 20.0) for i in range(100)]
    found = decided(made(records, controls=""))
    assert (found.verdict, found.private, found.bounded) == ("not private", False, False)
    lossy = decided(made(unreached(), controls=""), trained=replace(TRAINED, accuracy=0.5))
    assert lossy.verdict == "not private" and lossy.bounded is None


def test_one_attack_that_works_is_enough_and_the_others_are_told() -> None:
    failing = positive("b", psnr=8.0, rank=7)
    found = decided(made([*unreached("a"), *unreached("b"), *failing], controls="a"))
    assert found.verdict == "private" and found.working == ("a",)
    words = {row.attack: row.verdict for row in found.rows if row.kind == "attack"}
    assert words == {"a": "private", "b": "cannot be told"}
    told = found.plain()["controls"]
    assert told["b"] == {"n": 4, "reached": 0, "doubt": "no better than blind"}
    assert found.plain()["verdict"] == "private"


def test_the_control_may_stand_in_another_case_of_the_audit() -> None:
    alone = made(unreached(), controls="")
    assert decided(alone).verdict == "cannot be told"
    assert decided(alone, beside=[made(unreached())]).verdict == "private"


def test_an_attack_that_beats_blind_in_a_case_of_the_audit_is_shown_to_work() -> None:
    reached = [replace(each, kind="attack") for each in positive("a", psnr=30.0, rank=1, count=9)]
    other = made(reached, controls="")
    found = decided(made(unreached(), controls=""), beside=[other])
    assert found.working == ("a",) and found.verdict == "private"
    below = [replace(each, kind="attack") for each in positive("a", psnr=14.0, rank=1, count=9)]
    weak = decided(made(unreached(), controls=""), beside=[made(below, controls="")])
    assert weak.working == () and weak.verdict == "cannot be told"


def test_delta_does_not_hold_where_a_guess_reaches_more_than_that() -> None:
    guess = [
        record("blind: mean", image, 20.0 if image < 6 else 3.0, kind="blind")
        for image in range(100)
    ]
    found = decided(made([*unreached(), *guess]))
    assert found.overall.upper < 0.05 and found.working
    assert (found.bounded, found.verdict) == (None, "undecided")
    assert decided(made([*unreached(), *guess[6:]])).verdict == "private"


def test_the_baselines_own_weights_do_not_show_what_a_defense_costs() -> None:
    relabeled = replace(PLAIN, under="3-1-7")
    found = decided(made(unreached()), trained=relabeled)
    assert found.same_weights and found.plain()["same_weights"]
    assert (found.loss, found.accurate, found.verdict) == (None, None, "undecided")
    itself = decided(made(unreached()), trained=PLAIN)
    assert not itself.same_weights and itself.accurate and itself.verdict == "private"
    assert not decided(made(unreached())).same_weights


def test_each_method_and_truth_the_strongest_and_any_attacker_have_a_row() -> None:
    first = [record("a", i, 20.0 if i < 3 else 1.0, 1.0) for i in range(100)]
    second = [record("b", i, 1.0, 20.0 if i >= 60 else 1.0) for i in range(100)]
    found = decided(made([*first, *second]), Threshold("psnr", 15, delta=0.2, gamma=0.1))
    shown = [(r.kind, r.attack, r.against, r.bound.hits, r.verdict) for r in found.rows]
    assert shown == [
        ("attack", "a", "used", 3, "private"),
        ("attack", "a", "original", 0, "private"),
        ("attack", "b", "used", 0, "private"),
        ("attack", "b", "original", 40, "not private"),
        ("strongest", "a", "used", 3, "private"),
        ("strongest", "b", "original", 40, "not private"),
        ("any attacker", None, "any truth", 43, "not private"),
    ]
    assert found.verdict == "not private"
    rows = found.plain()["rows"]
    assert [row["kind"] for row in rows[-3:]] == ["strongest", "strongest", "any attacker"]
    assert rows[-1]["bound"]["hits"] == 43 and json.dumps(rows)


def test_the_strongest_is_chosen_after_looking_so_its_lower_bound_is_corrected() -> None:
    attacks = [
        record(name, i, 20.0 if i < hits else 1.0)
        for name, hits in (("a", 5), ("b", 7))
        for i in range(20)
    ]
    found = certify(made(attacks), PSNR15).strongest["used"]
    assert found.attack == "b" and found.bound.upper == upper_bound(7, 20, 0.975)
    corrected, plain = clopper_pearson(7, 20, 0.975)[0], clopper_pearson(7, 20, 0.95)[0]
    assert found.bound.lower == pytest.approx(corrected, abs=1e-12) and corrected < plain


def test_the_bound_on_delta_is_too_low_in_at_most_one_case_of_twenty() -> None:
    rng = np.random.default_rng(3)
    for share, n in ((0.05, 20), (0.3, 16), (0.5, 64)):
        bounds = {
            hits: bound([[image < hits] for image in range(n)], EACH) for hits in range(n + 1)
        }
        drawn = rng.binomial(n, share, 4_000)
        assert np.mean([bounds[int(hits)].upper < share for hits in drawn]) < 0.06
        assert np.mean([bounds[int(hits)].lower > share for hits in drawn]) < 0.06


def in_batches(records: Sequence[Record], size: int) -> list[Record]:
    return [replace(each, update=each.image // size * size) for each in records]


def test_images_that_are_shared_one_by_one_have_clopper_and_pearsons_bounds() -> None:
    for hits, n in ((0, 5), (2, 9), (31, 32), (7, 7)):
        found = bound([[image < hits] for image in range(n)], EACH)
        assert (found.n, found.hits, found.updates) == (n, hits, n)
        assert (found.lower, found.upper) == clopper_pearson(hits, n, 0.95)


def test_bounds_of_batches_are_those_of_the_table_beside_them() -> None:
    """The table's are of 95% in two sides, which is 97.5% in each."""
    psnr = [20.0, 3, 3, 3, 3, 3, 20, 20, 3, 3, 3, 3]
    records = in_batches([record("a", i, value) for i, value in enumerate(psnr)], 4)
    flags = [[value >= 15 for value in psnr[start : start + 4]] for start in (0, 4, 8)]
    low, high = share_of_updates(flags, 0.01).bounds
    found = certify(made(records), PSNR15)
    for each in (found.claims[0].bounds["used"], found.overall):
        assert (each.hits, each.n, each.updates) == (3, 12, 3)
        assert (each.lower, each.upper) == pytest.approx((low, high))
    alone = certify(made([replace(each, update=None) for each in records]), PSNR15).overall
    assert alone.updates == 12 and alone.upper < found.overall.upper


def test_failed_images_of_a_batch_count_in_their_update() -> None:
    psnr = [20.0, None, 3, 3, 3, 3, 3, 3]
    records = in_batches([record("a", i, value) for i, value in enumerate(psnr)], 4)
    found = certify(made(records), PSNR15).overall
    worst = share_of_updates([[True, True, False, False], [False] * 4], 0.01)
    assert (found.hits, found.failed) == (1, 1)
    assert found.upper_failed == pytest.approx(worst.bounds[1])
    assert found.upper < worst.bounds[1]


@pytest.mark.parametrize("spread", [0.1, 1.0, 20.0])
def test_the_bound_over_updates_holds_where_images_of_an_update_are_alike(spread: float) -> None:
    """A small spread means that an update is reached as a whole or not at all."""
    rng = np.random.default_rng(5)
    updates, size, share = 6, 4, 0.3
    wrong = np.zeros(2)
    for _ in range(1_500):
        likely = rng.beta(share * spread, (1 - share) * spread, updates)
        reached = rng.random((updates, size)) < likely[:, None]
        found = bound(reached.tolist(), EACH)
        wrong += found.upper < share, found.lower > share
    assert (wrong / 1_500 <= 0.025 + 3 * (0.025 * 0.975 / 1_500) ** 0.5).all()


def test_images_counted_one_by_one_would_be_bounded_too_low() -> None:
    """The worst case: all images of an update are reached together."""
    rng = np.random.default_rng(6)
    drawn = rng.random((500, 6)) < 0.3
    apart = [upper_bound(4 * int(hit.sum()), 24, 0.975) < 0.3 for hit in drawn]
    assert np.mean(apart) > 0.1


def test_no_shares_of_updates_are_found_for_which_the_upper_bound_errs_more_often() -> None:
    """Exact error rates of many distributions of an update's hits, random and of few values."""
    rng = np.random.default_rng(7)
    for size, updates in ((2, 4), (4, 3), (4, 6)):
        uppers = np.array(
            [bound(_filled(hits, size, updates), EACH).upper for hits in range(size * updates + 1)]
        )
        for trial in range(400):
            chosen = rng.choice(size + 1, 2 + trial % size, replace=False)
            weights = np.zeros(size + 1)
            weights[chosen] = rng.dirichlet(np.full(len(chosen), 0.5))
            sums = np.ones(1)
            for _ in range(updates):
                sums = np.convolve(sums, weights)
            mean = weights @ np.arange(size + 1) / size
            assert sums[uppers < mean - 1e-12].sum() <= 0.025 + 1e-9


def _filled(hits: int, size: int, updates: int) -> list[list[bool]]:
    """Give so many hits to the updates, the first filled first."""
    return [[update * size + image < hits for image in range(size)] for update in range(updates)]


def test_bounds_of_several_cases_hold_at_once() -> None:
    """Half of 5% goes to delta and half to gamma, an equal part of that to each case."""
    case = made([record("a", i, 3.0) for i in range(16)])
    trained, plain = (ModelFacts(0.9, 1_000, under, None) for under in ("3-1-7", "none"))
    one, three = (
        certify(case, PSNR15, trained=trained, baseline=plain, cases=cases) for cases in (1, 3)
    )
    assert one.plain()["level_of_each"] == 0.975 and one.joint is None
    assert three.each == pytest.approx(1 - 0.05 / 6)
    assert three.overall.upper == upper_bound(0, 16, three.each) > one.overall.upper
    assert three.loss is not None and one.loss is not None and three.loss.high > one.loss.high
    assert three.plain()["joint"] == three.joint and three.plain()["cases"] == 3
    assert "all 3 cases" in str(three.joint) and "at once at 95%: each is at 99.167%" in str(
        three.joint
    )


def test_all_bounds_of_a_command_are_right_together_in_nineteen_of_twenty() -> None:
    rng = np.random.default_rng(8)
    n, cases, share = 12, 5, 0.25
    uppers = [
        bound([[image < hits] for image in range(n)], level_of_each(cases)).upper
        for hits in range(n + 1)
    ]
    drawn = rng.binomial(n, share, (4_000, cases))
    assert np.mean([any(uppers[hits] < share for hits in each) for each in drawn]) <= 0.05


def test_a_case_read_from_a_folder_counts_all_cases_of_its_audit(tmp_path: Path) -> None:
    names = {"none": {"dlg": 5}, "prune:0.9": {"dlg": 1}, "gaussian:0.1": {"dlg": 1}}
    run = make_audit(tmp_path / "run", names)
    cases = AuditResult.read(run).cases
    for case in (*cases, CaseResult.read(cases[1].out)):
        assert certify(case, Threshold("lineup")).cases == 3
    (cases[2].out / "records.jsonl").unlink()  # not begun yet: the bounds stay what they are
    assert AuditResult.read(run).count == 3 and AuditResult.read(run).cases[0].cases == 3
    alone = make_audit(tmp_path / "alone", {"none": {"dlg": 5}})
    (case,) = AuditResult.read(alone).cases
    assert certify(case, Threshold("lineup")).cases == 1
    (alone / "settings.json").write_text(json.dumps({"data": "x"}))
    assert CaseResult.read(case.out).cases == 1  # what it lies in is no audit


@pytest.mark.parametrize(
    ("cases", "shown"),
    [(1, "97.5%"), (2, "98.75%"), (3, "99.167%"), (5, "99.5%"), (20, "99.875%"), (80, "99.9688%")],
)
def test_levels_are_written_with_the_digits_that_tell_them_apart(cases: int, shown: str) -> None:
    assert percent(level_of_each(cases)) == shown


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mse=3", "unknown metric of certify 'mse': choose from psnr=NUMBER, ssim=NUMBER"),
        ("psnr", "'' is no number"),
        ("psnr=high", "'high' is no number"),
        ("psnr=nan", "expected a finite number"),
        ("ssim=15", "one from -1 to 1 for ssim"),
    ],
)
def test_thresholds_that_are_none_are_refused(text: str, says: str) -> None:
    with pytest.raises(GradveilError) as caught:
        Threshold.parse(text)
    assert says in str(caught.value)


def test_shares_beyond_one_are_refused() -> None:
    with pytest.raises(GradveilError, match=r"delta 1\.5"):
        Threshold.parse("psnr=15", delta=1.5)
    with pytest.raises(GradveilError, match="gamma 0"):
        Threshold.parse("psnr=15", gamma=0)
