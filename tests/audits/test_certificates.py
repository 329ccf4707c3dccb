"""Exact statements: counts, scipy's bounds, decisions seldom wrong, failures both ways."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from gradveil.audits import CaseResult, Record, Threshold, certify
from gradveil.audits.certificates import bound
from gradveil.audits.model import ModelFacts
from gradveil.core import GradveilError

PSNR15 = Threshold("psnr", 15.0)


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


def made(records: Sequence[Record], *, changes_images: bool = True) -> CaseResult:
    blind = [record("blind: gray", image, 10.0, kind="blind") for image in range(4)]
    settings = {"defense": "3-1-7", "changes_images": changes_images}
    return CaseResult(Path("run"), settings, (*records, *blind), None)


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
        list(found.claims[0].bounds) == ["used"]
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
    assert (a.n, a.hits, a.failed) == (4, 1, 2) and a.upper_failed == bound(3, 0, 4).upper > a.upper
    assert (found.overall.hits, found.overall.failed) == (
        2,
        1,
    )  # image 3 failed once and was reached once
    assert bound(1, 0, 4).upper_failed is None


def test_nothing_can_be_said_of_no_image() -> None:
    with pytest.raises(GradveilError, match="n = 0"):
        certify(made([]), PSNR15)
    with pytest.raises(GradveilError, match="n = 0"):
        bound(0, 0, 0)


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
    models = {
        "trained": ModelFacts(accuracy, 10_000, "3-1-7", None),
        "baseline": ModelFacts(0.9, 10_000, "none", None),
    }
    found = certify(result, Threshold("psnr", 15, delta=0.05, gamma=0.1), **models)
    assert found.private is private and found.plain()["private"] is private
    for alone in (Threshold("psnr", 15, delta=0.05), Threshold("psnr", 15, gamma=0.1)):
        assert certify(result, alone, **models).private is None


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


def test_the_bound_on_delta_is_too_low_in_at_most_one_case_of_twenty() -> None:
    rng = np.random.default_rng(3)
    for share, n in ((0.05, 20), (0.3, 16), (0.5, 64)):
        bounds = {hits: bound(hits, 0, n) for hits in range(n + 1)}
        drawn = rng.binomial(n, share, 4_000)
        assert np.mean([bounds[int(hits)].upper < share for hits in drawn]) < 0.06
        assert np.mean([bounds[int(hits)].lower > share for hits in drawn]) < 0.06


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
