"""Tables of several cases from fabricated records: whole in eighty columns, and in words."""

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.table import Table

from gradveil.audits import AuditResult, CaseResult, Record, Threshold, certify
from gradveil.audits.job import slug
from gradveil.audits.model import ModelFacts
from gradveil.report.answer import make_answer
from gradveil.report.audit import several_in_words, several_tables
from gradveil.report.certificates import (
    certificate_table,
    certificates_in_words,
    certify_cases,
)
from gradveil.report.pictures import draw_timeline
from report.folders import make_audit

N = 16
SETTINGS = {
    "model": "lenet",
    "data": "fashion-mnist-mini",
    "labels": "known",
    "seed": 0,
    "images": N,
}


def records(
    kind: str, attack: str, hits: int, over: float, count: int = N, original: int = 0
) -> list[Record]:
    made = []
    for image in range(count):
        scores = {
            "mse": 0.1,
            "psnr": 12.0 + over,
            "ssim": 0.4,
            "psnr_affine": 13.0,
            "over_blind": over,
            "rank": 1 if image < hits else 7,
        }
        both = {
            "used": scores,
            "original": scores | {"psnr": 17.0, "rank": 1 if image < original else 7},
        }
        made.append(
            Record(
                "e",
                kind,
                attack,
                0,
                image,
                "ok",
                1,
                1,
                0.2,
                500,
                both,
                0.1,
            )
        )
    return made


def part(
    defense: str,
    attacks: list[list[Record]],
    *,
    clean: bool = False,
    step: str | None = None,
    trained: ModelFacts | None = None,
) -> CaseResult:
    knows = {
        "masked": "labels, what is pruned",
        "transform-known": "labels, policy and its draws",
        "averaged": "labels, gaussian noise 0.001",
    }
    more = {
        "defense": defense,
        "clean": clean,
        "step": step,
        "checkpoint": None if trained is None else "model.safetensors",
        "changes_images": defense.startswith("3-1-7"),
        "knows": knows,
        "left_out": {"closed-form": "the first layer is of type Conv2d"},
    }
    rows = [
        *records("blind", "blind: class mean", 0, 0.0),
        *(record for attack in attacks for record in attack),
    ]
    if not more["changes_images"]:
        rows = [replace(r, scores=dict.fromkeys(r.scores, r.scores["used"])) for r in rows]
    return CaseResult(Path("run") / slug(defense), SETTINGS | more, tuple(rows), trained)


@pytest.fixture
def result() -> AuditResult:
    positive = records("positive", "adam-cosine", 4, 3.0, 4)
    return AuditResult(
        Path("run"),
        dict(SETTINGS),
        (
            part(
                "none",
                [positive, records("attack", "adam-cosine", 12, 130.0)],
                trained=ModelFacts(0.912, 10_000, "none", 400),
            ),
            part(
                "prune:0.95",
                [records("attack", "adam-cosine", 12, 2.0)],
                clean=True,
                trained=ModelFacts(0.9, 10_000, "prune:0.95", 400),
            ),
            part(
                "prune:0.95",
                [records("attack", "adam-cosine", 0, -5.0), records("attack", "masked", 9, -3.0)],
                trained=ModelFacts(0.9, 10_000, "prune:0.95", 400),
            ),
            part(
                "3-1-7+43-18-18",
                [records("attack", "transform-known", 0, -5.0, original=7)],
                trained=ModelFacts(0.88, 10_000, "none", 400),
            ),
            part(
                "gaussian:0.001,then,prune:0.9",
                [
                    records("attack", "averaged", 1, 0.1),
                    records("attack", "without-defended-layers", 1, 0.4),
                ],
            ),
        ),
    )


def shown(tables: list[Table], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables:
        console.print(table)
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def line(text: str, *parts: str) -> str:
    (found,) = (line for line in text.splitlines() if all(part in line for part in parts))
    return found


@pytest.mark.parametrize("width", [80, 100])
def test_no_name_or_number_is_cut(result: AuditResult, width: int) -> None:
    text = shown(several_tables(result), width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    for whole in (
        "without-defended-layers",
        "+ gaussian noise 0.001",
        "142.0 ± 0.0",
        "+130.0",
        "12/16",
        "clean gradient",
        "+ what is pruned",
    ):
        assert whole in text


LONG = (
    "prune-feedback:0.99",
    "gaussian:0.001",
    "dp:norm=1,multiplier=1.1,sample_rate=0.0128",
    "3-1-7+43-18-18,then,laplacian:0.0001",
)


def column(text: str) -> str:
    """The first one, its lines joined."""
    return "".join(line.split(" ")[0] for line in text.splitlines())


@pytest.mark.parametrize("width", [80, 100, 160, 200])
def test_defenses_take_the_room_there_is_and_are_broken_at_commas(width: int) -> None:
    attacks = [
        records("attack", "without-defended-layers", 9, 130.0),
        records("attack", "averaged", 1, 10.0),
    ]
    found_all = AuditResult(
        Path("run"), dict(SETTINGS), tuple(part(defense, attacks) for defense in LONG)
    )
    found = {one.defense: certify(one, Threshold("psnr", 15)) for one in found_all.cases}
    for table in [*several_tables(found_all)[:2], certificate_table(found)]:
        text = shown([table], width)
        assert max(map(len, text.splitlines())) <= width
        for defense in LONG:
            assert defense in column(text) and (width <= 100 or defense in text)
            assert all(piece in text for piece in defense.split(","))


@pytest.mark.parametrize("width", [78, 80, 100])
def test_a_title_is_broken_at_a_comma_and_only_where_the_terminal_ends(
    result: AuditResult, width: int
) -> None:
    (first, *_) = shown(several_tables(result), width).splitlines()
    assert first == "What is left of each defense: lenet on fashion-mnist-mini, labels known," + (
        " seed 0" if width >= 80 else ""
    )


def test_the_result_of_a_defense_is_its_strongest_attacker(result: AuditResult) -> None:
    text = shown(several_tables(result)[:1])
    assert line(text, "none").split() == [
        "none",
        "91.2%",
        "adam-cosine",
        "12/16",
        "48-93%",
        "142.0",
        "+130.0",
        "0.400",
    ]
    assert line(text, "masked").split() == [
        "prune:0.95",
        "90.0%",
        "masked",
        "9/16",
        "30-80%",
        "9.0",
        "-3.0",
        "0.400",
    ]
    assert (
        "7/16" in line(text, "3-1-7+43-18-18", "88.0%*", "transform-known")
        and "(original image)" in text
    )
    assert (
        "without-defended-layers" in text and "averaged" not in text
    )  # as many identified, more decibels


def test_every_attacker_has_a_row_and_those_no_better_than_blind_a_mark(
    result: AuditResult,
) -> None:
    used, original = (shown([table]) for table in several_tables(result)[1:])
    assert len([row for row in used.splitlines() if "blind: class mean" in row]) == 5
    assert "positive: adam-cosine" in used and "0/16 ≤" in line(used, "adam-cosine", "0/16")
    assert "9/16 ≤" not in used and "transform-known" in original and "masked" not in original


def test_every_share_has_its_interval_and_more_where_there_is_room(result: AuditResult) -> None:
    for table in several_tables(result):
        for width in (80, 120):
            rows = [row for row in shown([table], width).splitlines() if re.search(r"\d/\d", row)]
            assert rows and all(re.search(r"\d/\d+( [≤?])? +\d+-\d+% ", row) for row in rows)
        assert all(head in shown([table], 120) for head in ("top 5", "mean", "rank", " p "))
    wide = shown(several_tables(result)[1:2], 120)
    assert line(wide, "masked", "9/16").split()[-10:-5] == [
        "9/16",
        "30-80%",
        "9/16",
        "1%",
        "5.8e-21",
    ]


def test_words_name_what_a_reader_would_not_expect(result: AuditResult) -> None:
    lines = several_in_words(result)
    assert all("\n" not in one for one in lines)
    assert line("\n".join(lines), "left out: closed-form").startswith("All: ")
    assert line("\n".join(lines), "as published").startswith("prune:0.95, clean gradient: ")
    assert "3-1-7+43-18-18: * the accuracy is that of a model trained under none." in lines
    assert "gaussian:0.001,then,prune:0.9: the model is untrained." in lines
    assert any(
        one.startswith("Positive control: adam-cosine") and "rank 1 in 4/4 line-ups" in one
        for one in lines
    )


def test_a_certificate_shows_counts_bounds_and_what_is_open(result: AuditResult) -> None:
    asked = Threshold("psnr", 15, delta=0.05, gamma=0.05)
    found = {
        one.defense: certify(
            one,
            asked,
            trained=one.trained_so,
            baseline=result.baselines[None],
            beside=result.cases,
        )
        for one in result.cases
    }
    text = shown([certificate_table(found)])
    assert max(map(len, text.splitlines())) <= 80
    assert "16/16" in line(text, "transform-known", "original", "not private")
    wide = shown([certificate_table(found)], 120)
    assert "16/16" in line(wide, "strongest: transform-known", "original", "not private")
    assert "0/16" in line(wide, "strongest: transform-known", "used", "cannot be told")
    assert "0.206" in line(text, "strongest: masked", "cannot be told")
    assert "16/16" in line(text, "any attacker", "any truth", "not private")
    lines = certificates_in_words(found, result.cases[0])
    pruned = line("\n".join(lines), "prune:0.95: ")
    assert (
        "0 of n = 16 images reached psnr=15" in pruned
        and "undecided: delta 0.05 undecided at n = 16, gamma 0.05 holds" in pruned
    )
    assert pruned.endswith(
        "Shown to work: adam-cosine. Not shown to work: masked: no positive control. "
        "Mind that pictures are recognized all the same: rank 1 by masked in 9/16 line-ups."
    )
    policy = line("\n".join(lines), "3-1-7+43-18-18: ")
    assert "not private: delta 0.05 does not hold, gamma 0.05 not tested" in policy
    assert "by any attack here, against the image used or the original, so the share" in policy
    chain = line("\n".join(lines), "gaussian:0.001,then,prune:0.9: ")
    assert "cannot be told: delta 0.05 cannot be told" in chain
    assert "No attack here was shown to work, so images that were not reached say nothing." in chain
    assert (
        lines[-1].startswith("Not tested: other attacks")
        and "the 16 of fashion-mnist-mini test" in lines[-1]
    )


@pytest.mark.parametrize(
    ("delta", "gamma", "says"),
    [
        (None, 0.1, ". gamma 0.1 holds; delta was not asked for."),
        (0.05, None, ". delta 0.05 does not hold; gamma was not asked for."),
        (
            0.05,
            0.1,
            ". (psnr=15, 0.05, 0.1): not private: delta 0.05 does not hold, gamma 0.1 holds.",
        ),
        (None, None, "each side 97.5%)."),
    ],
)
def test_only_delta_and_gamma_together_decide_on_privacy(
    result: AuditResult, delta: float | None, gamma: float | None, says: str
) -> None:
    one = result.cases[0]  # without a defense, and reconstructed
    found = certify(
        one, Threshold("psnr", 15, delta, gamma), trained=one.trained_so, baseline=one.trained_so
    )
    (said, *_) = certificates_in_words({"none": found}, one)
    assert says in said and ("private" in said) == (delta is not None and gamma is not None)
    assert certificates_in_words({"none": found}, one)[0].endswith(says)


@pytest.mark.parametrize(
    ("hits", "over", "psnr", "says"),
    [
        (
            0,
            -5.0,
            5,
            "its positive control does not show it (psnr=5 in 4 of 4 images, no better than blind)",
        ),
        (4, 3.0, 20, "its positive control does not show it (psnr=20 in 0 of 4 images)"),
    ],
)
def test_a_certificate_says_why_an_attack_shows_nothing(
    hits: int, over: float, psnr: float, says: str
) -> None:
    control = records("positive", "dlg", hits, over, 4)
    case = part("none", [control, records("attack", "dlg", 0, -12.0, 100)])
    found = certify(case, Threshold("psnr", psnr, delta=0.2))
    assert found.bounded is None and found.overall.upper < 0.2
    (said, *_) = certificates_in_words({"none": found}, case)
    assert "delta 0.2 cannot be told; gamma was not asked for. No attack here was shown" in said
    assert f"say nothing. dlg: {says}." in said
    assert "cannot be told" in line(shown([certificate_table({"none": found})]), "any attacker")


def test_a_certificate_names_the_breakers_that_nobody_ran(tmp_path: Path) -> None:
    attacked = {"prune:0.9": {"dlg": 0}, "translate_x(9)": {"dlg": 0}, "none": {"dlg": 9}}
    found = AuditResult.read(make_audit(tmp_path / "run", attacked, 16))
    named = {
        case.defense: made for case, made in certify_cases(found, Threshold("lineup", delta=0.3))
    }
    said = dict(zip(named, certificates_in_words(named, found.cases[0]), strict=False))
    assert "Known to break this defense, and not run: masked." in said["prune:0.9"]
    assert "not run: early-step, transform-known, transform-drawn" in said["translate_x(9)"]
    assert named["none"].not_run == () and named["prune:0.9"].plain()["not_run"] == ("masked",)
    # Where it leaks by the attacks that were run, none of the others is missed.
    leaking = AuditResult.read(make_audit(tmp_path / "leaks", {"prune:0.9": {"dlg": 16}}, 16))
    ((_, certificate),) = certify_cases(leaking, Threshold("lineup", delta=0.3))
    (words, *_) = certificates_in_words({"prune:0.9": certificate}, leaking.cases[0])
    assert certificate.bounded is False and "Known to break" not in words


def test_delta_that_holds_without_the_defense_too_is_no_praise_of_it(tmp_path: Path) -> None:
    """None of 16 is reached under pruning, and none without it, or 12."""

    def said(hits: int, out: Path) -> dict[str, str]:
        attacked = {"none": {"dlg": hits}, "prune:0.9": {"dlg": 0}}
        found = AuditResult.read(make_audit(out, attacked, 16))
        made = {c.name: made for c, made in certify_cases(found, Threshold("lineup", delta=0.4))}
        return dict(zip(made, certificates_in_words(made, found.cases[0]), strict=False))

    praise = "Delta holds under none too: that it holds is not shown to be this defense's doing."
    weak, strong = said(0, tmp_path / "weak"), said(12, tmp_path / "strong")
    assert "delta 0.4 holds" in weak["prune:0.9"] and praise in weak["prune:0.9"]
    assert "delta 0.4 holds" in strong["prune:0.9"] and praise not in strong["prune:0.9"]
    assert praise not in weak["none"] + strong["none"]


def test_a_threshold_that_a_guess_reaches_is_flagged(result: AuditResult) -> None:
    case = result.cases[0]
    (said, *_) = certificates_in_words({"none": certify(case, Threshold("psnr", 12))}, case)
    assert "Mind that blind: class mean reaches it on 16 of 16 without a gradient" in said


def test_a_bound_on_psnr_beside_line_ups_that_leak_is_no_peace_of_mind(tmp_path: Path) -> None:
    """All 16 images have rank 1, or two of 16, and none has 40 dB."""

    def said(hits: int, threshold: Threshold, out: Path) -> str:
        found = AuditResult.read(make_audit(out, {"none": {"dlg": hits}}, 16))
        ((_, made),) = certify_cases(found, threshold)
        (words, *_) = certificates_in_words({"none": made}, found.cases[0])
        return words

    warning = "Mind that pictures are recognized all the same: rank 1 by dlg in 16/16 line-ups."
    assert warning in said(16, Threshold("psnr", 40, delta=0.3), tmp_path / "leaks")
    assert "all the same" not in said(2, Threshold("psnr", 40, delta=0.3), tmp_path / "luck")
    assert "all the same" not in said(16, Threshold("lineup", delta=0.3), tmp_path / "lineup")
    # A bound that does not hold needs no such words.
    assert "all the same" not in said(16, Threshold("psnr", 5, delta=0.3), tmp_path / "near")


def test_the_interval_of_the_strongest_attack_is_said_to_be_of_one_chosen(
    result: AuditResult, tmp_path: Path
) -> None:
    assert "Its 95% interval is not corrected for that choice." in " ".join(
        several_in_words(result)
    )
    for attacked, chosen in (({"dlg": 9, "idlg": 3}, True), ({"dlg": 9}, False)):
        found = AuditResult.read(make_audit(tmp_path / str(chosen), {"none": attacked}, 16))
        (first, _) = make_answer(found).sentences
        assert ("95% interval, not corrected for the choice: " in first) is chosen


@pytest.mark.parametrize(
    ("steps", "scale", "first"),
    [
        (("0", "10", "400"), "symlog", -0.25),
        (("50", "400"), "log", 50 / 1.4),
        (("400",), "log", 400 / 1.4),
    ],
)
def test_the_axis_of_training_starts_at_the_first_step_asked_for_and_shows_every_point(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    steps: tuple[str, ...],
    scale: str,
    first: float,
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(
        "gradveil.report.pictures.save_figure", lambda figure, _: figures.append(figure)
    )
    many = [f"prune:0.{digit}" for digit in range(1, 9)]
    parts = [
        part(defense, [records("attack", "masked", 4, 1.0)], step=step)
        for defense in many
        for step in steps
    ]
    draw_timeline(AuditResult(tmp_path, dict(SETTINGS), tuple(parts)))
    for axis in figures[0].axes:
        low, high = axis.get_xlim()
        assert axis.get_xscale() == scale and low == pytest.approx(first)
        assert low < axis.dataLim.x0 and axis.dataLim.x1 < high


def test_leakage_over_training_is_a_picture_with_a_line_for_each_defense_and_attack(
    tmp_path: Path,
) -> None:
    parts = [
        part(
            defense,
            [records("attack", attack, 16 - 5 * place, 3.0 - place)],
            step=step,
            trained=ModelFacts(0.1, 500, "none", at),
        )
        for defense, attack in (("none", "adam-cosine"), ("prune:0.95", "masked"))
        for place, (step, at) in enumerate((("0", 0), ("10", 10), ("end", 400)))
    ]
    result = AuditResult(tmp_path, dict(SETTINGS), tuple(parts))
    assert [one.step for one in result.cases] == [0, 10, 400] * 2
    assert "last step (400)" in shown(several_tables(result))
    with Image.open(draw_timeline(result)) as picture:
        colors = {
            tuple(color) for color in np.asarray(picture.convert("RGB")).reshape(-1, 3).tolist()
        }
        assert (
            picture.format == "PNG"
            and min(picture.size) > 500
            and {(31, 119, 180), (255, 127, 14)} <= colors
        )
