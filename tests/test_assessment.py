"""An assessment: what is shared now, a line for each defense, and advice that follows from both."""

import html
import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import toys
from gradveil.assessment import AssessJob, conclude, run_assessment
from gradveil.assessment.job import NOW, THEN
from gradveil.assessment.run import RESULT
from gradveil.audits.model import ModelFacts
from gradveil.audits.timing import TooFewMinutesError
from gradveil.checks import Diagnosis, Finding
from gradveil.core.errors import GradveilError
from gradveil.defenses import Defense, Pruning, assessed_defenses
from gradveil.report.write import write_report
from gradveil.stats import Verdict

IMAGES = 16
NOTHING = Diagnosis((), (), ())


def case(
    defense: str, step: str, hits: int, accuracy: float, candidates: int = 20, failed: int = 0
) -> Any:
    """A case whose strongest attack identifies the first `hits` images and fails on the last."""
    records = [
        SimpleNamespace(
            image=number,
            shared_in=number,
            ok=True,
            scores={"used": {"rank": 1 if number < hits else 9}},
        )
        for number in range(IMAGES - failed)
    ]
    records += [
        SimpleNamespace(image=number, shared_in=number, ok=False, scores={})
        for number in range(IMAGES - failed, IMAGES)
    ]
    row = SimpleNamespace(
        attack="raced",
        truth="used",
        identified=hits,
        n=IMAGES,
        identified_bounds=(0.1, 0.9),
        candidates=candidates,
        doubt=None if hits > 3 else "no better than blind",
        verdict=Verdict(hits > 3, 0.5, 0.5, 0.05),
    )
    return SimpleNamespace(
        defense=defense,
        asked_step=step,
        strongest=row,
        model=ModelFacts(accuracy, 1_000, defense, 5),
        settings={"no_lineup": "too few images"},
        of=lambda *_: records,
    )


def concluded(*cases: Any, share: float = 1.0, most_loss: float = 0.02) -> Any:
    job = AssessJob("lenet", "fashion-mnist-mini", most_loss=most_loss)
    result: Any = SimpleNamespace(cases=cases, settings={"share": share})
    report: Any = SimpleNamespace(page=Path("index.html"))
    return conclude(job, NOTHING, result, lambda _: report, Path("out"))


def bare(hits: int = 14) -> list[Any]:
    return [case("none", NOW, hits, 0.9), case("none", THEN, hits, 0.9)]


def test_the_defense_that_leaks_least_at_an_acceptable_cost_is_recommended() -> None:
    found = concluded(
        *bare(),
        case("prune:0.99", THEN, 5, 0.89),
        case("3-1-7", THEN, 2, 0.895),
        case("gaussian:0.1", THEN, 0, 0.5),
    )
    assert found.recommended == "3-1-7" and "Recommended: 3-1-7" in found.advice[1]
    helps = {each.defense: each.helps for each in found.defenses}
    assert helps == {"prune:0.99": True, "3-1-7": True, "gaussian:0.1": False}
    assert "costs 40.0 points of accuracy" in found.defenses[2].reason


def test_a_defense_that_was_not_shown_to_leak_less_is_not_recommended() -> None:
    found = concluded(*bare(), case("prune:0.5", THEN, 12, 0.9))
    assert found.recommended is None and found.advice[1] == "None of these was shown to help:"
    assert "was not shown to leak less: 12 of 16 images are identified, 14" in found.advice[2]


def test_what_luck_would_give_is_written_as_on_the_page() -> None:
    found = concluded(*bare(), case("prune:0.5", THEN, 12, 0.9))
    assert "by luck it would be 0.8)" in found.advice[0]
    rare = case("none", NOW, 14, 0.9)
    rare.strongest.verdict = Verdict(True, 0.5, 0.5, 0.004)
    assert "by luck it would be 0.064)" in concluded(rare, bare()[1]).advice[0]


def test_the_table_has_the_accuracy_that_a_defense_is_compared_with() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # typer's own
        from gradveil.cli.assess import assessment_table
    found: Any = SimpleNamespace(
        result=SimpleNamespace(cases=bare()),
        defenses=concluded(*bare(), case("prune:0.5", THEN, 12, 0.88)).defenses,
    )
    *_, accuracy, _ = assessment_table(found).columns
    assert [str(cell) for cell in accuracy.cells] == ["90.0%", "90.0%", "88.0% (-2.0)"]


def test_a_defense_under_which_the_attack_failed_is_not_said_to_help() -> None:
    for failed in (IMAGES, IMAGES - 3):
        found = concluded(*bare(), case("prune:0.9", THEN, 0, 0.9, failed=failed))
        assert found.recommended is None and not found.defenses[0].helps
    assert found.defenses[0].p_less == pytest.approx(2**-3)  # of the three that were attacked


def test_p_values_are_corrected_for_the_number_of_defenses() -> None:
    one = concluded(*bare(), case("prune:0.9", THEN, 8, 0.9))
    several = [case(f"prune:0.{number}", THEN, 14, 0.9) for number in range(1, 6)]
    assert one.defenses[0].helps and one.defenses[0].p_less == pytest.approx(2**-6)
    many = concluded(*bare(), case("prune:0.9", THEN, 8, 0.9), *several)
    assert many.defenses[0].p_less == pytest.approx(6 * 2**-6) and not many.defenses[0].helps


def test_where_nothing_leaks_no_defense_is_said_to_help() -> None:
    found = concluded(*bare(1), case("prune:0.9", THEN, 0, 0.9))
    assert "Nothing was shown to leak, which is no proof that nothing does" in found.advice[0]
    assert found.recommended is None and "no attack was shown to work either" in found.advice[1]


def test_short_attacks_and_a_missing_line_up_are_said() -> None:
    weak = concluded(*bare(), case("prune:0.9", THEN, 2, 0.9), share=0.1)
    assert any("10% of their iterations" in line for line in weak.advice)
    none = [case("none", step, 0, 0.9, candidates=0) for step in (NOW, THEN)]
    assert any("no line-up (too few images)" in line for line in concluded(*none).advice)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"budget": 0.0}, "budget 0: minutes must be above 0 and finite"),
        ({"most_loss": 1.0}, "most loss 1: a share of accuracy"),
        ({"epochs": 0}, "epochs 0: there must be at least 1"),
        ({"images": 0}, "images 0: it must be at least 1"),
        ({"defenses": (Defense(),)}, "defense none: the others are compared with it in any case"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: dict[str, Any], says: str) -> None:
    job = AssessJob("lenet", "fashion-mnist-mini")
    with pytest.raises(GradveilError, match=says):
        replace(job, **settings)


def test_what_the_doctor_warns_of_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise GradveilError("trained")

    wrong = Finding("warning", "normalization", "this looks wrong", "give normalize")
    found = Diagnosis((wrong,), (), ())
    monkeypatch.setattr("gradveil.assessment.run._diagnose", lambda *_: found)
    monkeypatch.setattr("gradveil.assessment.run._fitting_fraction", stop)
    with pytest.raises(GradveilError, match=r"^trained$"):
        run_assessment(AssessJob("lenet", "fashion-mnist-mini"), tmp_path / "a")
    assert "warning: normalization: this looks wrong; give normalize\n" in capsys.readouterr().err


def test_defenses_are_tried_that_declare_a_setting_for_it() -> None:
    texts = [str(defense) for defense in assessed_defenses()]
    assert len({*texts}) == len(texts)
    assert "prune:0.99" in texts and "none" not in texts
    assert AssessJob("lenet", "fashion-mnist-mini").tried == assessed_defenses()


def test_a_budget_that_is_too_small_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if an iteration of an image took a second.
    monkeypatch.setattr("gradveil.audits.timing.time_iteration", lambda *_: 1.0)
    monkeypatch.setattr("gradveil.audits.timing._tried", lambda *_: False)
    monkeypatch.setattr("gradveil.assessment.run._diagnose", lambda *_: NOTHING)
    trained: list[Any] = []

    def train(*given: Any, **_: Any) -> None:
        trained.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr("gradveil.assessment.run.train", train)
    data = toys.split(60, 1, 8, 2, part="train"), toys.split(80, 1, 8, 2, seed=1)
    job = AssessJob(toys.lenet(1, 8, 2).float(), data, None, (Pruning(0.99),), 4, epochs=1)
    with pytest.raises(TooFewMinutesError, match=r"^budget 0\.5: .* give at least ") as caught:
        run_assessment(replace(job, budget=0.5), tmp_path / "a", progress=False)
    assert not trained and not (tmp_path / "a").exists()
    (line,) = str(caught.value).splitlines()
    least = float(line.partition("at least ")[2].partition(",")[0])
    with pytest.raises(KeyboardInterrupt):
        run_assessment(replace(job, budget=least), tmp_path / "a", progress=False)
    assert trained
    with pytest.raises(TooFewMinutesError):
        run_assessment(replace(job, budget=0.95 * least), tmp_path / "b", progress=False)


@pytest.mark.slow
def test_an_assessment_goes_from_the_doctor_to_the_page_and_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As if an iteration of an image took a second: attacks then make a few, on any machine.
    monkeypatch.setattr("gradveil.audits.timing.time_iteration", lambda *_: 1.0)
    monkeypatch.setattr("gradveil.audits.timing._tried", lambda *_: False)
    train, test = toys.split(60, 1, 8, 2, part="train"), toys.split(80, 1, 8, 2, seed=1)
    model = toys.lenet(1, 8, 2).float()
    job = AssessJob(model, (train, test), None, (Pruning(0.99),), 4, epochs=1, budget=60.0)
    found = run_assessment(job, tmp_path / "a", progress=True)
    assert ", in about 42 min, after each attack was tried and timed" in capsys.readouterr().err
    assert [each.defense for each in found.defenses] == ["prune:0.99"]
    assert found.report.page == tmp_path / "a" / "index.html" and found.report.page.is_file()
    written = json.loads((tmp_path / "a" / RESULT).read_text())
    assert written["recommended"] == found.recommended
    page = found.report.page.read_text()
    assert "What to do" in page and all(html.escape(line.strip()) in page for line in found.advice)
    assert write_report(tmp_path / "a").page.read_text() == page  # as `gradveil report` makes it
    capsys.readouterr()
    again = run_assessment(job, tmp_path / "a", progress=True)
    assert ", in about " not in (said := capsys.readouterr().err)
    assert "going on with the attacks on 4 images" in said
    assert again.advice == found.advice
    with pytest.raises(GradveilError, match="an assessment with other settings"):
        run_assessment(replace(job, images=5), tmp_path / "a", progress=False)
