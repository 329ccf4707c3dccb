"""The audit's table fits a terminal and flags what it should; its pictures show what was saved."""

import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from gradveil.attacks import find
from gradveil.audits import AuditJob, Case, CaseResult, Record, Threshold, certify, run_audit
from gradveil.audits.stage import CLIENTS, GRADIENTS
from gradveil.defenses import parse
from gradveil.report.audit import case_in_words, case_tables
from gradveil.report.certificates import certificates_in_words
from gradveil.report.pictures import draw_case


def record(
    kind: str, attack: str, image: int, over: float, identified: bool, status: str = "ok"
) -> Record:
    scores = {
        "mse": 0.1,
        "psnr": 12.0 + over,
        "ssim": 0.4,
        "psnr_affine": 13.0,
        "over_blind": over,
        "rank": 1 if identified else 7,
    }
    both = (
        {"used": scores, "original": scores | {"psnr": 5.0, "over_blind": -7.0, "rank": 7}}
        if status == "ok"
        else {}
    )
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
        both,
        0.1,
    )


def made(
    out: Path, *, works: bool, defense: str = "3-1-7", extra: Sequence[Record] = ()
) -> CaseResult:
    settings = {
        "model": "lenet",
        "data": "fashion-mnist-mini",
        "defense": defense,
        "changes_images": defense != "none",
        "clean": False,
        "left_out": {},
        "labels": "known",
        "seed": 0,
    }
    attack = [
        record("attack", "adam-cosine", i, 3 + i / 10 if works else -2 - i / 10, works)
        for i in range(8)
    ]
    blind = [record("blind", "blind: class mean", i, 0.0, False) for i in range(8)]
    positive = [
        record("positive", "adam-cosine", i, 5.0 if works else -5.0, works) for i in range(4)
    ]
    return CaseResult(out, settings, (*positive, *blind, *attack, *extra), None)


def shown(result: CaseResult, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in case_tables(result):
        console.print(table)
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def test_names_numbers_and_flags_are_whole_in_eighty_columns(tmp_path: Path) -> None:
    text = shown(made(tmp_path, works=False))
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "adam-cosine",
        "blind: class mean",
        "positive:",
        "9.65 ± 0.24",
        "no better",
        "than blind",
    ):
        assert part in text


def test_a_policy_brings_a_second_table_against_the_originals(tmp_path: Path) -> None:
    assert "Against the original images" in shown(
        made(tmp_path, works=True)
    ) and "5.00 ± 0.00" in shown(made(tmp_path, works=True))
    assert "original" not in shown(made(tmp_path, works=True, defense="none"))


def test_an_attack_that_works_is_not_flagged_against_the_images_it_saw(tmp_path: Path) -> None:
    used, original = shown(made(tmp_path, works=True), 120).split("Against the original")
    assert "no better" not in used and "no better" in original


def test_the_reasons_of_failed_images_are_counted_and_shortened(tmp_path: Path) -> None:
    said = ["no unit", "no unit", "word " * 60, "a third"]
    extra = [
        record("attack", "adam-cosine", 8 + number, 0, False, f"failed: {reason}")
        for number, reason in enumerate(said)
    ]
    result = made(tmp_path, works=True, extra=extra)
    (line,) = (line for line in case_in_words(result) if line.startswith("adam-cosine: 2 failed"))
    assert line.startswith("adam-cosine: 2 failed: no unit; 1 failed: word word")
    assert line.endswith("word …; 1 failed for other reasons.") and len(line) < 300
    assert result.strongest.plain()["reasons"][0] == ("no unit", 2)


def test_failed_images_are_flagged_and_counted(tmp_path: Path) -> None:
    extra = [record("attack", "adam-cosine", 8, 0, False, "failed: every restart diverged")]
    assert "1 failed" in shown(made(tmp_path, works=True, extra=extra), 120)
    assert any(
        "rank 1 in 8/9 line-ups" in line and "1 failed" in line
        for line in case_in_words(made(tmp_path, works=True, extra=extra))
    )


@pytest.mark.parametrize(
    ("told", "undoes"),
    [
        ("labels", False),
        ("labels, class means", False),
        ("labels it inferred", False),
        ("labels, policy and its draws", True),
        ("labels, class means, gaussian noise 0.001", True),
    ],
)
def test_only_an_attack_that_is_told_of_a_defense_is_said_to_need_one(
    tmp_path: Path, told: str, undoes: bool
) -> None:
    extra = [record("attack", "early-step", i, -1.0, False) for i in range(8)]
    result = made(tmp_path, works=False, extra=extra)
    result = replace(result, settings={**result.settings, "knows": {"early-step": told}})
    lines = [line for line in case_in_words(result) if line.startswith("early-step against")]
    assert lines and all("it has no positive control" in line for line in lines)
    assert all(
        ("undoes a defense that declares no mild setting" in line) == undoes for line in lines
    )


def test_an_attack_of_failures_alone_has_no_numbers(tmp_path: Path) -> None:
    result = made(tmp_path, works=True, defense="none")
    failed = tuple(
        replace(one, status="failed: x", scores={}) if one.kind == "attack" else one
        for one in result.records
    )
    text = shown(replace(result, records=failed), 120)
    (line,) = (line for line in text.splitlines() if line.startswith("adam-cosine"))
    assert (
        line.split()[:8] == ["adam-cosine", "8", "0/8", "0-37%", "-", "-", "1", "-"]
        and "no better" in line
        and "8 failed" in text
    )


@pytest.mark.parametrize(
    ("works", "says"),
    [
        (
            True,
            (
                "gains against the images that were used are over class mean",
                "the attack works",
                "adam-cosine against the images that were used: better than blind: rank 1 in 8/8",
                "gains against the original images are over class mean, the best on public images, "
                "which scores 5.00 dB",
                "adam-cosine against the original images: no better than blind: rank 1 in 0/8",
            ),
        ),
        (
            False,
            (
                "rank 1 in 0/4 line-ups: no better than blind even there",
                "its positive control is no better than blind (rank 1 in 0/4 line-ups): try more",
            ),
        ),
    ],
)
def test_words_say_what_the_controls_mean(
    tmp_path: Path, works: bool, says: tuple[str, ...]
) -> None:
    lines = case_in_words(made(tmp_path, works=works))
    assert len(lines) == 8 and all("\n" not in line for line in lines) and "class mean" in lines[2]
    assert "1 class only, 8 images" in lines[0] and "more than 499 others" in lines[1]
    assert lines[-1] == (
        "Better than blind: at 5% over all 8 tests together (Holm); a positive control also at "
        "2.5% by its line-up alone."
    )
    assert all(any(part in line for line in lines) for part in says)


def test_without_a_change_of_the_images_words_do_not_tell_truths_apart(tmp_path: Path) -> None:
    lines = case_in_words(made(tmp_path, works=True, defense="none"))
    assert len(lines) == 6 and not any("against" in line for line in lines)
    assert lines[4].startswith("adam-cosine: better than blind: rank 1 in 8/8 line-ups")


def test_controls_that_failed_show_nothing(tmp_path: Path) -> None:
    shams = [record("sham", "sham", i, 0.0, False, "failed: no unit") for i in range(8)]
    noisy = [
        record("ceiling", "true picture with noise", i, 0.0, False, "failed: x") for i in range(8)
    ]
    nearest = [record("ceiling", "gradient line-up", i, 0.0, True) for i in range(8)]
    extra = [*shams, *noisy, *nearest]
    said = case_in_words(made(tmp_path, works=True, defense="none", extra=extra))
    assert (
        "Sham: adam-cosine on updates of other images of the same labels fails on all 8, and shows "
        "nothing." in said
    )
    (ceilings,) = (line for line in said if line.startswith("Ceilings"))
    assert ": true picture with noise not made, gradient line-up 8/8. " in ceilings


def test_images_that_no_gradient_points_at_are_doubted_where_they_were_given_for_updates(
    tmp_path: Path,
) -> None:
    def said(data: str, hits: int) -> list[str]:
        nearest = [record("ceiling", GRADIENTS, i, 0.0, i < hits) for i in range(8)]
        case = made(tmp_path, works=False, defense="none", extra=nearest)
        words = case_in_words(replace(case, settings={**case.settings, "data": data}))
        return [line for line in words if line.startswith("Warning: by their gradients")]

    (doubt,) = said(CLIENTS, 0)
    assert "gradients 0/8 of the images given" in doubt and "did not use these images" in doubt
    assert said(CLIENTS, 1) == said("fashion-mnist-mini", 0) == []


def test_without_a_line_up_none_is_tested_or_told(tmp_path: Path) -> None:
    """Two tests of dB over blind are left, of the attack and of its positive control."""
    whole = made(tmp_path, works=True, defense="none")
    without = [
        replace(
            each,
            candidates=0,
            scores={
                truth: {name: value for name, value in scores.items() if name != "rank"}
                for truth, scores in each.scores.items()
            },
        )
        for each in whole.records
    ]
    said = case_in_words(replace(whole, records=tuple(without)))
    positive, attack = said[3:5]
    assert positive.endswith(
        "no line-up: 4 without a line-up are too few to tell whether the attack works."
    )
    assert attack == "adam-cosine: better than blind: no line-up; p = 0.0039 for dB over blind."
    assert said[-1] == "Better than blind: at 5% over all 2 tests together (Holm)."


def test_images_too_few_for_any_test_are_told_and_no_failure(tmp_path: Path) -> None:
    """Four right among two candidates happen by chance in one of 16 cases."""
    result = made(tmp_path, works=False, defense="none")
    few = [one for one in result.records if one.image < 4]
    records = tuple(replace(one, candidates=2) for one in few)
    result = replace(result, records=records)
    text = shown(result, 120)
    assert text.count("too few to tell") == 2 and "no better" not in text
    positive, attack = case_in_words(result)[3:5]
    assert positive.endswith("4 among 2 candidates are too few to tell whether the attack works.")
    assert attack.startswith("adam-cosine: too few to tell: rank 1 in 0/4 line-ups")
    assert "positive control" not in attack


@pytest.mark.parametrize(
    ("over", "hits", "says"),
    [
        (
            -4.1,
            3,
            "-4.10 dB over blind, rank 1 in 3/4 line-ups: clearly better than chance by the "
            "line-up (p = 3.2e-08): the attack works.",
        ),
        (
            -4.1,
            0,
            "rank 1 in 0/4 line-ups: no better than blind even there, so low scores of it say "
            "nothing about the model.",
        ),
        (
            4.1,
            0,
            "rank 1 in 0/4 line-ups: no better than blind even there, so low scores of it say "
            "nothing about the model.",
        ),  # of four, not enough
    ],
)
def test_a_positive_control_works_by_what_was_seen_of_it(
    tmp_path: Path, over: float, hits: int, says: str
) -> None:
    positive = [record("positive", "dlg", i, over, i < hits) for i in range(4)]
    lines = case_in_words(made(tmp_path, works=True, extra=positive))
    assert any(line.startswith("Positive control: dlg") and line.endswith(says) for line in lines)


@pytest.mark.parametrize(
    ("hits", "works", "says"),
    [
        (3, True, "better than chance by the line-up (p = 0.00048): the attack works."),
        (2, True, "better than chance by the line-up (p = 0.014): the attack works."),
        (1, False, "1/4 line-ups: no better than blind even there, so low scores of it say "),
    ],
)
def test_a_positive_control_works_by_its_line_up_alone_however_many_other_tests_there_are(
    tmp_path: Path, hits: int, works: bool, says: str
) -> None:
    """Three right of four among 20 are no 5% over 200 tests, and yet no luck by themselves."""
    whole = made(tmp_path, works=False, defense="none")
    others = [one for one in whole.records if one.kind != "positive"]
    control = [record("positive", "adam-cosine", i, -4.1, i < hits) for i in range(4)]
    records = tuple(replace(one, candidates=20) for one in (*others, *control))
    result = replace(whole, records=records).beside([1.0] * 200)
    (row,) = (row for row in result.rows if (row.kind, row.truth) == ("positive", "used"))
    assert (row.doubt is None) == works and row.verdict.tests > 200
    said = case_in_words(result)
    assert any(line.startswith("Positive control") and says in line for line in said)
    (attack,) = (line for line in said if line.startswith("adam-cosine: no better"))
    assert ("its positive control is no better than blind (rank 1 in 1/4" in attack) != works
    certificate = certify(result, Threshold("lineup"))
    (shown,) = certificate.controls.values()
    assert (shown.works, shown.reached) == (works, hits)


def test_a_positive_control_of_many_images_may_work_by_decibels_alone(tmp_path: Path) -> None:
    positive = [record("positive", "dlg", i, 1.0 + i, False) for i in range(8)]
    lines = case_in_words(made(tmp_path, works=True, extra=positive))
    assert any(
        line.endswith("clearly better than chance by dB over blind (p = 0.0039): the attack works.")
        for line in lines
    )


def test_flags_stand_on_one_line_where_there_is_room(tmp_path: Path) -> None:
    assert "no better than blind" in shown(made(tmp_path, works=False), 120)


def test_the_table_has_all_that_a_line_up_tells_and_the_interval_where_it_is_narrow(
    tmp_path: Path,
) -> None:
    result = made(tmp_path, works=False, defense="none")
    ranks = {0: 1, 1: 1, 2: 4, 3: 5, 4: 6, 5: 100, 6: 250, 7: 433}
    records = []
    for one in result.records:
        used = {**one.scores["used"], "rank": ranks[one.image]}
        records.append(replace(one, scores={"used": used, "original": used}))
    result = replace(result, records=tuple(records))
    text = shown(result, 100)
    head, attack, blind, positive = (
        next(line.split() for line in text.splitlines() if line.startswith(start))
        for start in ("         ", "adam-cosine", "blind: class mean", "positive")
    )
    assert head[:2] == ["line-up", "mean"] and "of 500   95% top 5 rank       p" in text
    assert attack[1:7] == ["8", "2/8", "3-65%", "4/8", "20%", "0.00011"]
    assert blind[3:8] == ["8", "2/8", "3-65%", "4/8", "20%"] and blind[9] == "±"  # no p
    assert "4/4" in positive
    narrow = shown(result, 80)
    assert "3-65%" in narrow and "20%" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    assert any(
        "rank 1 in 2/8 line-ups (95%: 3.2% to 65.1%, p = 0.00011), top 5 in 4/8, mean percentile "
        "of the rank 20%;" in line
        for line in case_in_words(result)
    )


def test_classes_that_no_image_was_drawn_of_stand_beside_the_mix_of_classes(
    tmp_path: Path,
) -> None:
    result = made(tmp_path, works=True, defense="none")
    some = replace(result, settings={**result.settings, "passed_over": {"coat": 14}})
    mix, passed_over = case_in_words(some)[:2]
    assert "1 class only" in mix and passed_over == (
        "Warning: no image was drawn of class 'coat' with 14 distinct images: a line-up needs 20."
    )
    older = replace(result, settings={**result.settings, "passed_over": None})
    assert "drawn of" not in " ".join(case_in_words(older))
    found = {"none": certify(some, Threshold("lineup"))}
    assert "; no image was drawn of class 'coat'" in certificates_in_words(found, some)[-1]


def test_pictures_show_truth_and_reconstructions_over_several_chunks(tmp_path: Path) -> None:
    job = AuditJob(
        "lenet",
        "fashion-mnist-mini",
        {"adam-cosine": find("adam-cosine")},
        cases=(Case(parse("3")),),
        images=3,
        victims_at_once=2,
        steps=3,
    )
    (result,) = run_audit(job, tmp_path / "run", progress=False).cases
    paths = draw_case(result)
    assert {path.parent for path in paths} == {result.out / "pictures"}
    assert [path.name for path in paths] == ["grid-adam-cosine.png", "frames-adam-cosine.png"]
    for path in paths:
        with Image.open(path) as picture:
            assert (
                picture.format == "PNG"
                and min(picture.size) > 200
                and len(np.unique(np.asarray(picture.convert("L")))) > 50
            )
    whole = paths[0].read_bytes()
    paths[0].write_bytes(b"drawn")
    assert draw_case(result) == paths and paths[0].read_bytes() == b"drawn"  # it is newer
    later = paths[0].stat().st_mtime + 1
    os.utime(result.out / "records.jsonl", (later, later))
    assert draw_case(result) == paths and paths[0].read_bytes() == whole
