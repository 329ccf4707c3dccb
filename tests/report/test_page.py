"""The page of a run: well-formed, of one file, honest in words, and as small as it should be."""

import base64
import csv
import hashlib
import html.parser
import io
import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from gradveil.audits import AuditResult, Threshold
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.report.answer import given_words, make_answer, untested_words
from gradveil.report.audit import audit_in_words
from gradveil.report.certificates import certificates_in_words, certify_cases
from gradveil.report.markup import Html, data_block, element, prose
from gradveil.report.provenance import command
from gradveil.report.write import write_files, write_report
from gradveil.stats import upper_bound
from report.folders import make_audit, make_cell, make_search, pictures

VOID = ("meta", "img", "input", "br", "wbr", "link")
FIVE = {
    "none": {"adam-cosine": 12, "dlg": 7},
    "prune:0.99": {"adam-cosine": 3, "masked": 6},
    "3-1-7": {"adam-cosine": 2, "transform-known": 4},
    "gaussian:0.01": {"adam-cosine": 1},
    "dp:norm=1,multiplier=1.1": {"adam-cosine": 0},
}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028\x1b[31m"


class Parsed(html.parser.HTMLParser):
    """Elements, their attributes and texts; an end tag that fits no start tag is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len({*names}) == len(names), (tag, names)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def words(self) -> str:
        return " ".join(self.texts)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@cache  # many tests look at the same page
def page(folder: Path, **options: Any) -> tuple[str, Parsed]:
    text = write_report(folder, **options).page.read_text(encoding="utf-8")
    return text, Parsed(text)


def block(text: str, name: str) -> Any:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    accuracies = {name: 0.9 - place / 50 for place, name in enumerate(FIVE)}
    return make_audit(tmp_path_factory.mktemp("five") / "run", FIVE, 16, accuracies=accuracies)


def test_texts_are_escaped_and_what_is_html_already_is_not() -> None:
    made = element("p", EVIL, element("b", "x"), title=EVIL, data_kind=None, hidden=True)
    assert made.count("<") == 4 and "<b>x</b>" in made and " hidden>" in made
    parsed = Parsed(made)
    assert parsed.words.startswith("</script><script>") and "\x1b" not in made
    assert isinstance(made, Html) and "data-kind" not in made


def test_no_text_ends_a_block_of_data() -> None:
    made = data_block("x", {"name": EVIL, "half": "\ud800"})
    assert made.count("<") == 2 and block(made, "x")["name"] == EVIL
    made.encode()


def test_a_page_is_well_formed_and_loads_nothing_from_anywhere(five: Path) -> None:
    text, parsed = page(five)
    for tag, attributes in parsed.elements:
        for name in ("src", "href"):
            address = attributes.get(name)
            assert address is None or address.startswith(("data:image/", "#")), (tag, address)
        assert not [name for name in attributes if name.startswith("on")], tag
    addresses = re.findall(r"url\((.*?)\)", text)
    assert addresses and all(address.startswith("data:image/") for address in addresses)
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert not parsed.named("link") and not parsed.named("iframe")


def test_a_page_lets_no_script_run_but_its_own(five: Path) -> None:
    _, parsed = page(five)
    (policy,) = (
        str(meta["content"])
        for meta in parsed.named("meta")
        if "Policy" in str(meta.get("http-equiv"))
    )
    run = [a for a in parsed.named("script") if a.get("type") != "application/json"]
    assert len(run) == 1 and not run[0]
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[-1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_every_input_has_a_label_every_picture_words_and_every_id_is_there_once(
    five: Path,
) -> None:
    text, parsed = page(five)
    ids = [str(a["id"]) for _, a in parsed.elements if "id" in a]
    assert len({*ids}) == len(ids)
    links = [str(a["href"]) for a in parsed.named("a")]
    assert links and all(link[1:] in ids for link in links)
    assert all(a.get("alt") for a in parsed.named("img"))
    assert all(a.get("aria-label") for _, a in parsed.elements if a.get("role") == "img")
    assert text.count("<label>") == len(parsed.named("input")) + len(parsed.named("select"))
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(b <= a + 1 for a, b in pairwise(levels))
    assert parsed.named("html") == [{"lang": "en"}]


def test_the_answer_has_the_figures_of_the_records(five: Path) -> None:
    first, second = make_answer(AuditResult.read(five)).sentences
    assert first == (
        "Without a defense, the strongest of 2 attacks, adam-cosine, attacked 16 private pictures: "
        "12 reconstructions resembled the true picture more than 49 others of its class (95% "
        "interval, not corrected for the choice: 48% to 93%); by luck it would be 0.32."
    )
    assert second == (
        "Of 4 defenses dp:norm=1,multiplier=1.1 leaked least: 0 of 16 (0% to 21%) by adam-cosine, "
        "not clearly more than luck; the model trained under it has 82.0% accuracy."
    )
    _, parsed = page(five)
    assert first in parsed.texts and second in parsed.texts


def test_defenses_that_leak_no_less_are_not_said_to_leak_least(tmp_path: Path) -> None:
    leaking = {"none": {"dlg": 8}, "prune:0.9": {"dlg": 8}, "3-1-7": {"dlg": 9}}
    run = make_audit(tmp_path / "run", leaking, 16)
    second = make_answer(AuditResult.read(run)).sentences[1]
    assert second.startswith("None of 2 defenses leaked less; under prune:0.9 it was 8 of 16 (")


@pytest.mark.parametrize(("left", "luck"), [(6, True), (1, False)])
def test_a_defense_is_not_praised_for_what_may_be_luck(
    tmp_path: Path, left: int, luck: bool
) -> None:
    leaking = {"none": {"dlg": 8}, "prune:0.9": {"dlg": left}, "3-1-7": {"dlg": 9}}
    run = make_audit(tmp_path / "run", leaking, 16)
    second = make_answer(AuditResult.read(run)).sentences[1]
    said = ", which may be luck" if luck else ""
    assert second.startswith(f"Of 2 defenses prune:0.9 leaked least{said}: {left} of 16 (")


def test_the_answer_is_about_the_defense_and_not_about_its_control(tmp_path: Path) -> None:
    named, control = "3-1-7,then,clip:1", "policy:none,then,clip:1"
    run = make_audit(tmp_path / "run", {named: {"dlg": 3}, control: {"dlg": 9}}, 16)
    result = AuditResult.read(run)
    cases = [
        replace(case, settings={**case.settings, "control": named})
        if case.defense == control
        else case
        for case in result.cases
    ]
    answer = make_answer(replace(result, cases=tuple(cases)))
    assert answer.worst.defense == named
    assert answer.sentences[0].startswith(f"Under {named}, dlg attacked 16 private pictures: 3 ")


def with_settings(result: AuditResult, **more: dict[str, str]) -> AuditResult:
    """Return the audit with more settings of its cases, by defense."""
    cases = [
        replace(
            c,
            settings={**c.settings, **{k: v[c.defense] for k, v in more.items() if c.defense in v}},
        )
        for c in result.cases
    ]
    return replace(result, cases=tuple(cases))


def test_each_policy_is_compared_with_its_own_control(tmp_path: Path) -> None:
    """Crop and flip leave 4 of 16 and the policies no less, though it is less than without both."""
    leaking = {"none": {"dlg": 12}, "3-1-7": {"dlg": 4}, "prune:0.9": {"dlg": 6}}
    run = make_audit(tmp_path / "run", leaking | {"policy:none": {"dlg": 4}}, 16)
    result = AuditResult.read(run)
    comes_with = {"3-1-7": "policy:none"}
    answer = make_answer(with_settings(result, comes_with=comes_with))
    assert answer.worst.defense == "none" and answer.sentences[1] == (
        "Of 2 defenses 3-1-7 leaked least: 4 of 16 (7% to 52%) by dlg, still more than luck. With "
        "random crops and mirror images alone, its baseline, it was no more: 4 of 16 (7% to 52%)."
    )
    # A defense beside it that leaks less is then the best, and only none is its baseline.
    fewer = make_audit(
        tmp_path / "fewer", leaking | {"policy:none": {"dlg": 6}, "prune:0.9": {"dlg": 3}}, 16
    )
    second = make_answer(with_settings(AuditResult.read(fewer), comes_with=comes_with)).sentences[1]
    assert (
        second.startswith("Of 2 defenses prune:0.9 leaked least: 3 of 16")
        and "baseline" not in second
    )


def test_a_control_on_the_same_weights_is_the_baseline_and_one_on_others_is_not(
    tmp_path: Path,
) -> None:
    """Two policies, each with crop and flip alone on its weights: one leaks less than its own."""
    hits = {"3-1-7": 5, "9-9": 9, "policy:none": 5, "policy:none ": 12}
    run = make_audit(tmp_path / "run", {name: {"dlg": right} for name, right in hits.items()}, 16)
    result = AuditResult.read(run)
    cases = with_settings(
        result,
        comes_with={"3-1-7": "policy:none", "9-9": "policy:none"},
        defense={"policy:none ": "policy:none"},
        control={"policy:none": "3-1-7", "policy:none ": "9-9"},
        checkpoint={"3-1-7": "a", "policy:none": "a", "9-9": "b", "policy:none ": "b"},
    ).cases
    answer = make_answer(replace(result, cases=cases))
    assert answer.worst is cases[2] and answer.best is cases[0]
    assert answer.sentences[0].startswith("With random crops and mirror images alone, dlg attacked")
    assert answer.sentences[1].startswith("Of 2 defenses 3-1-7 leaked least: 5 of 16 (11% to 59%)")
    alone = make_answer(replace(result, cases=(cases[0], cases[2], cases[3])))
    assert alone.sentences[1].startswith("Under 3-1-7 it was 5 of 16 (")
    # Without the second policy's gain over its own control none leaks less.
    weaker = (*cases[:3], replace(cases[1], settings={**cases[3].settings}, out=cases[3].out))
    assert (
        make_answer(replace(result, cases=weaker))
        .sentences[1]
        .startswith("None of 2 defenses leaked less; under 3-1-7 it was 5 of 16 (")
    )


def test_a_leak_under_a_defense_alone_is_the_headline(tmp_path: Path) -> None:
    leaking = {"none": {"dlg": 0}, "prune:0.9": {"dlg": 0}, "3-1-7": {"dlg": 12}}
    run = make_audit(tmp_path / "run", leaking, 16)
    answer = make_answer(AuditResult.read(run))
    assert answer.tone == "leak" and answer.worst.defense == "3-1-7"
    assert answer.sentences[0].startswith("Under 3-1-7, dlg attacked 16 private pictures: 12 ")
    assert answer.sentences[1].startswith(
        "None of 2 defenses leaked less; under prune:0.9 it was 0 of 16"
    )


def test_where_all_reconstructions_failed_nothing_was_measured(tmp_path: Path) -> None:
    leaking = {"none": {"dlg": 12}, "prune:0.9": {"dlg": 0}}
    run = AuditResult.read(make_audit(tmp_path / "run", leaking, 16))
    alone = make_answer(replace(run, cases=run.cases[1:]))
    assert alone.tone == "none" and "failed" not in alone.sentences[0]
    failed = [
        replace(each, status="failed: no unit", scores={}) if each.kind == "attack" else each
        for each in run.cases[1].records
    ]
    cases = run.cases[0], replace(run.cases[1], records=tuple(failed))
    alone = make_answer(replace(run, cases=cases[1:]))
    assert alone.tone == "unclear" and ", 16 failed; " in alone.sentences[0]
    second = make_answer(replace(run, cases=cases)).sentences[1]
    assert second.startswith("Under prune:0.9 it was 0 of 16 (0% to 21%, 16 failed) by dlg")


def test_tests_of_all_runs_of_a_page_are_corrected_together(tmp_path: Path) -> None:
    """Eight gains above 0 (p = 1 / 256) are clear among 6 tests, and not among those of 6 runs."""
    runs = [make_audit(tmp_path / "a", {"none": {"dlg": 2}})]
    (case,) = AuditResult.read(runs[0]).cases
    alone = case.strongest.verdict
    assert alone.better and alone.tests == 6
    runs += [make_audit(tmp_path / f"b{number}", {"none": {"dlg": 0}}) for number in range(5)]
    write_report(runs, out=tmp_path / "all")
    parsed = Parsed((tmp_path / "all" / "index.html").read_text(encoding="utf-8"))
    assert "all 36 tests together" in parsed.words
    verdicts = json.loads((tmp_path / "all" / "verdict.json").read_text())["runs"]
    assert [run["cases"][0]["strongest"]["better_than_blind"] for run in verdicts] == [False] * 6


def test_the_chain_of_a_policy_has_its_control_in_the_second_sentence(tmp_path: Path) -> None:
    named, control = "3-1-7,then,clip:1", "policy:none,then,clip:1"
    run = make_audit(tmp_path / "run", {named: {"dlg": 3}, control: {"dlg": 9}}, 16)
    result = with_settings(
        AuditResult.read(run), comes_with={named: control}, control={control: named}
    )
    answer = make_answer(result)
    assert answer.sentences[0].startswith(f"Under {named}, dlg attacked 16 private pictures: 3 ")
    assert answer.sentences[1] == f"Under {control}, its baseline, it was 9 of 16 (30% to 80%)."


def test_a_defense_is_judged_by_its_worst_step(tmp_path: Path) -> None:
    run = make_audit(
        tmp_path / "run", {"none": {"dlg": 8}, "prune:0.9": {"dlg": 6}}, steps=("0", "400")
    )
    answer = make_answer(AuditResult.read(run))
    assert "(training step 0)" in answer.sentences[0]
    assert answer.best is not None and answer.best.asked_step == "0"
    text, parsed = page(run)
    assert "Leakage over training" in parsed.words and text.count("<polyline") == 2


def test_words_of_a_page_promise_nothing(five: Path) -> None:
    _, parsed = page(five)
    words = parsed.words.lower()
    assert "data reconstruction" in words
    for word in ("anonymous", "anonymi", " safe", "unsafe"):
        assert word not in words


def test_sections_say_what_was_given_not_tested_and_how_to_run_it_again(five: Path) -> None:
    _, parsed = page(five)
    for part in (
        "What the attacker was given",
        "The true labels of the pictures.",
        "What was not tested",
        "closed-form was left out: the first layer is of type Conv2d.",
        "Glossary",
        "0" * 64,
        "gradveil 0.1.0, torch 2.6",
    ):
        assert part in parsed.words
    (again,) = (text for text in parsed.texts if text.startswith("gradveil audit"))
    assert again == command(AuditResult.read(five)) and "--out NEW-FOLDER" in again
    assert "--defense none --defense prune:0.99 --defense 3-1-7" in again
    assert "--no-control" in again  # it has none, and the command would add one


@pytest.mark.parametrize(
    ("defense", "settings", "update", "again"),
    [
        ("none", {}, "the gradient of the loss, as the client shares it, of 1 picture", ""),
        (
            "prune:0.99",
            {"local_steps": 3, "budget": 2.0},
            "the change of the weights after 3 local steps at rate 0.01, as the client shares it, "
            "of 1 picture, under the defense",
            " --local-steps 3 --budget 2.0",
        ),
        (
            "none",
            {"batch_size": 4, "local_epochs": 2, "local_batch_size": 2, "client_momentum": 0.9},
            "the change of the weights after 4 local steps with momentum 0.9 at rate 0.01, as the "
            "client shares it, of 4 pictures together",
            " --local-epochs 2 --local-batch-size 2 --client-momentum 0.9",
        ),
    ],
)
def test_the_update_and_the_command_name_the_local_training(
    defense: str, settings: dict[str, Any], update: str, again: str, tmp_path: Path
) -> None:
    result = AuditResult.read(make_audit(tmp_path / "run", {defense: {"dlg": 5}}, **settings))
    assert dict(given_words(result))["The update"] == update
    assert again in (command(result) or "")


def test_a_page_of_what_a_spy_kept_says_how_it_is_made_again(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}})
    settings = json.loads((run / "settings.json").read_text())
    for each in settings["cases"]:
        each["checkpoint"] = "fed/spy/round-0001/global.safetensors"
    (run / "settings.json").write_text(json.dumps(settings))
    words = page(run)[1].words
    assert "It attacked updates that a spy kept" in words and "Python objects" not in words


def test_the_notes_of_a_search_name_the_model_of_each_case(tmp_path: Path) -> None:
    _, parsed = page(make_search(tmp_path / "search"))
    (untrained,) = (words for words in parsed.texts if words.endswith("the model is untrained."))
    assert "none on the untrained model" in untrained and "semi-trained" not in untrained


def test_notes_of_a_page_speak_of_the_page_and_those_of_a_terminal_of_its_table(
    five: Path,
) -> None:
    words, run = page(five)[1].words, AuditResult.read(five)
    assert 'what else it is told stands under "What the attacker was given".' in words
    assert "the guess among each defense's controls that was chosen on public images" in words
    assert "below its name" not in words and "≤" not in words
    said = " ".join(audit_in_words(run))
    assert "stands below its name. ≤: no better than blind, at 5%" in said
    assert "What the attacker was given" not in said


def test_code_in_a_sentence_of_a_page_is_shown_as_code(tmp_path: Path) -> None:
    assert prose("run `a <b>` or `c`; ` alone") == (
        "run <code>a &lt;b&gt;</code> or <code>c</code>; ` alone"
    )
    folder = make_audit(tmp_path / "run", {"none": {"dlg": 4}, "prune:0.5": {"dlg": 2}})
    for case in ("none", "prune-0.5"):
        path = folder / case / "settings.json"
        settings = json.loads(path.read_text())
        settings["left_out"] = {"peeling": "give `train_mode`", "masked": "attack masked needs it"}
        path.write_text(json.dumps(settings))
    text = write_report(folder).page.read_text(encoding="utf-8")
    assert text.count("give <code>train_mode</code>") == 2  # what was not tested, and the notes
    assert text.count("masked was left out: it needs it.") == 1
    assert text.count("left out: masked: it needs it.") == 1
    assert "`" not in Parsed(text).words


def test_breakers_that_were_not_run_are_named(five: Path) -> None:
    said = untested_words(AuditResult.read(five))
    names = [line.partition(":")[0] for line in said if "known to break" in line]
    assert names == [
        "early-step, transform-drawn, transform-guessed, class-mean",
        "likelihood, averaged",  # of two defenses
    ]
    assert any("gaussian:0.01; dp:norm=1,multiplier=1.1, and not run" in line for line in said)
    assert not any("prune" in line for line in said if "known to break" in line)


def test_controls_stand_beside_every_figure(five: Path) -> None:
    text, parsed = page(five)
    rows = [a for a in parsed.named("span") if str(a.get("class")).startswith("meter ")]
    meters = [str(a["data-tip"]) for a in rows if "data-tip" in a]
    names = ("adam-cosine", "masked", "blind: class mean", "sham", "positive: adam-cosine")
    for name in names:
        assert any(tip.startswith(f"{name}: ") for tip in meters)
    assert text.count('class="luck"') == len(meters) and 'class="level"' in text


def test_hostile_names_are_shown_and_never_run(tmp_path: Path) -> None:
    folder = make_audit(
        tmp_path / "run",
        {"none": {"dlg": 5}, EVIL: {"dlg": 3}},
        data=f"folder:/{EVIL}",
        model=f"x:{EVIL}",
    )
    text, parsed = page(folder, with_pictures=True)
    assert "<script>alert" not in text and "<img src=x" not in text
    assert "alert(1)" in parsed.words and "\x1b" not in text
    assert len([a for a in parsed.named("script") if a.get("type") != "application/json"]) == 1
    names = [entry["name"] for entry in block(text, "gallery-data")["cases"]]
    assert names == ["no defense", EVIL]


def test_own_pictures_are_left_out_unless_asked_for_and_then_under_a_banner(
    tmp_path: Path,
) -> None:
    folder = make_audit(tmp_path / "run", {"none": {"dlg": 5}}, data="folder:patients")
    text, parsed = page(folder)
    assert "data:image/" not in text and "--with-pictures" in parsed.words
    text, parsed = page(folder, with_pictures=True)
    assert "data:image/png" in text and "This page shows private pictures." in parsed.words
    public = make_audit(tmp_path / "public", {"none": {"dlg": 5}})
    text, parsed = page(public)
    assert "data:image/png" in text and "The data set is published" in parsed.words
    assert "private pictures. They" not in parsed.words


def test_pictures_are_those_of_the_records_worst_first(five: Path) -> None:
    text, _ = page(five)
    data = block(text, "gallery-data")
    none = data["cases"][0]
    assert none["name"] == "no defense" and none["total"] == len(none["images"]) == 16
    assert [entry["image"] for entry in none["images"]][:12] == [*range(12)]
    first = none["images"][0]
    assert first["found"][0]["text"] == "17.8 dB · ✓ rank 1 of 50" and first["found"][0]["hit"]
    file = io.BytesIO(base64.b64decode(data["originals"][first["key"]].partition(",")[2]))
    with Image.open(file) as picture:
        assert torch.equal(torch.tensor([*picture.tobytes()]).view(12, 12), pictures(16)[0, 0])
    changed = next(entry for entry in data["cases"] if entry["name"] == "3-1-7")
    assert changed["images"][0]["used"] and not first["used"]


def test_films_have_every_frame_and_the_result(five: Path) -> None:
    text, parsed = page(five)
    films = [a for a in parsed.named("div") if a.get("class") == "film pixels"]
    assert len(films) == 5 * 8 and all("--frames:10" in str(a["style"]) for a in films)
    rows = [a for a in parsed.named("tr") if "data-steps" in a]
    assert rows[0]["data-steps"] == "0 8 15 22 30 38 45 52 60"
    assert text.index(">image 0<small>") < text.index(">image 7<small>")


def test_the_table_has_a_row_for_each_line_of_the_csv(five: Path) -> None:
    text, parsed = page(five)
    lines = [*csv.DictReader(io.StringIO((five / "audit.csv").read_text()))]
    assert len([a for a in parsed.named("tr") if "data-kind" in a]) == len(lines) > 30
    saved = block(text, "files-data")
    assert saved["audit.csv"] == (five / "audit.csv").read_text()
    assert len(saved["rows.json"]) == len(lines)
    strongest = [line for line in lines if line["strongest"] == "True"]
    assert [line["attack"] for line in strongest[:2]] == ["adam-cosine", "masked"]
    assert strongest[0]["identified"] == "12" and strongest[0]["accuracy"] == "0.9"


def test_the_table_shows_all_that_a_line_up_tells(five: Path) -> None:
    text, _ = page(five)
    (table,) = re.findall(r'<table id="rows".*?</table>', text, re.S)
    heads = re.findall(r"<button[^>]*>([^<]*)</button>", table)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr")[2:]]
    shown = [dict(zip(heads, row, strict=True)) for row in rows]
    attack = next(row for row in shown if row["kind"] == "attack")
    told = {name: attack[name] for name in ("rank 1", "95%", "top 5", "mean percentile", "p")}
    ranks = [1] * 12 + [2 + image % 49 for image in range(12, 16)]
    assert told == {
        "rank 1": "12/16",
        "95%": "48% to 93%",
        "top 5": "12/16",
        "mean percentile": f"{sum(ranks) / 16 / 50:.1%}",
        "p": "6.9e-18",
    }
    assert {row["p"] for row in shown if row["kind"] == "blind"} == {""}  # these are no tests
    assert {row["p"] for row in shown if row["kind"] == "sham"} == {"1"}


def test_the_same_run_makes_the_same_page_wherever_it_lies(tmp_path: Path) -> None:
    made = [make_audit(tmp_path / name, {"none": {"dlg": 5}, "3-1-7": {"dlg": 2}}) for name in "ab"]
    texts = [page(folder)[0] for folder in made]
    assert texts[0] == texts[1] and str(tmp_path) not in texts[0]
    for name in ("audit.csv", "verdict.json"):
        assert (made[0] / name).read_bytes() == (made[1] / name).read_bytes()


@pytest.mark.parametrize("size", [32, 128])
def test_a_hundred_images_under_five_defenses_stay_below_fifteen_megabytes(
    tmp_path: Path, size: int
) -> None:
    images = (torch.rand(100, 3, size, size, generator=generator(0)) * 255).to(torch.uint8)
    run = make_audit(tmp_path / "run", FIVE, 100, images=images)
    text, _ = page(run)
    shown = [len(entry["images"]) for entry in block(text, "gallery-data")["cases"]]
    assert len(text) < 15_000_000 and min(shown) >= 8 and (size > 32 or shown == [100] * 5)


def test_fifty_defenses_make_a_page_that_shows_each(tmp_path: Path) -> None:
    many = {f"prune:0.{number:02d}": {"dlg": number % 9} for number in range(1, 51)}
    run = make_audit(tmp_path / "run", many, accuracies=dict.fromkeys(many, 0.5))
    text, parsed = page(run)
    assert len(parsed.named("summary")) == 100 and len(block(text, "gallery-data")["cases"]) == 50
    closed = [a for a in parsed.named("details") if "open" not in a]
    assert len(closed) == 100 and text.count("meter strongest") == 50
    assert len([a for a in parsed.named("tr") if "data-steps" in a]) == 6
    assert "Of 50 defenses" in parsed.words
    said = "Of 50 cases the 5 that leak most and the one that leaks least are in this table"
    assert said in parsed.words


def test_one_image_without_a_defense_is_too_little_and_says_so(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 1}}, 1)
    _, parsed = page(run)
    assert "Too little was measured to tell" in parsed.words
    assert "attacked 1 private picture: 1 reconstruction resembled" in parsed.words
    assert "No defense was audited beside it." in parsed.words
    assert "Leakage against accuracy" not in parsed.words


@pytest.mark.parametrize("failed", [3, 8])
def test_failed_images_are_counted_and_have_no_picture(tmp_path: Path, failed: int) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 2}}, failed=failed)
    text, parsed = page(run)
    assert f"{failed} failed: every restart diverged" in parsed.words
    assert f"{failed} reconstructions failed; they count as tested" in parsed.words
    (case,) = block(text, "gallery-data")["cases"]
    lost = [entry for entry in case["images"] if entry["found"][0]["src"] is None]
    assert len(lost) == failed and lost[-1] == case["images"][-1]


def test_without_line_ups_the_page_speaks_of_decibels(tmp_path: Path) -> None:
    hits = {"none": {"dlg": 5}, "prune:0.9": {"dlg": 1}}
    run = make_audit(tmp_path / "run", hits, accuracies=dict.fromkeys(hits, 0.5), ranks=False)
    _, parsed = page(run)
    assert "reached 16.6 dB PSNR, +4.6 dB over a blind guess, on 8 pictures" in parsed.words
    assert "no line-up could be made" in parsed.words and "rank 1 of" not in parsed.words
    assert "No line-up could be made, so there is no share of recognized pictures" in parsed.words
    assert "Leakage against accuracy" not in parsed.words


def test_cases_of_one_accuracy_are_not_plotted_against_it(tmp_path: Path) -> None:
    hits = {"none": {"dlg": 5}, "prune:0.9": {"dlg": 1}}
    same = make_audit(tmp_path / "same", hits, accuracies=dict.fromkeys(hits, 0.5))
    other = make_audit(tmp_path / "other", hits, accuracies={"none": 0.5, "prune:0.9": 0.4})
    assert "Leakage against accuracy" not in page(same)[1].words
    assert "Leakage against accuracy" in page(other)[1].words


def test_an_audit_that_has_come_to_a_part_of_its_cases_is_reported(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}, "3-1-7": {"dlg": 2}})
    (run / "3-1-7" / "records.jsonl").unlink()
    _, parsed = page(run)
    assert "1 of the cases asked for: the audit has not come to them yet." in parsed.words
    (run / "none" / "records.jsonl").write_text("")
    with pytest.raises(GradveilError, match="holds no attacked image yet"):
        write_report(run)


def test_pictures_that_were_removed_are_missed_and_nothing_else(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}})
    for path in (run / "none" / "images").iterdir():
        path.unlink()
    _, parsed = page(run)
    assert "The files of the pictures are not in the folder." in parsed.words
    assert "How much leaks" in parsed.words


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = [
        make_audit(tmp_path / name, {"none": {"dlg": hits}}, seed=hits)
        for name, hits in (("a", 5), ("b", 2))
    ]
    made = write_report(runs, out=tmp_path / "both")
    parsed = Parsed(made.page.read_text())
    assert "a · no defense" in parsed.words and "b · no defense" in parsed.words
    lines = [*csv.DictReader(io.StringIO((tmp_path / "both" / "audit.csv").read_text()))]
    assert {line["run"] for line in lines} == {"a", "b"}
    assert not (runs[0] / "index.html").exists()
    with pytest.raises(GradveilError, match="a run is named twice"):
        write_report([runs[0], runs[0]], out=tmp_path / "both")


def test_a_search_has_its_policies_and_the_pictures_of_those_audited(tmp_path: Path) -> None:
    folder = make_search(tmp_path / "search")
    text, parsed = page(folder)
    points = [a for a in parsed.named("button") if "policy" in str(a.get("class"))]
    assert len(points) == 30
    assert all(str(a["data-tip"]).startswith("policy ") for a in points)
    linked = [a for a in points if a.get("data-case")]
    ids = [entry["id"] for entry in block(text, "gallery-data")["cases"]]
    assert len(linked) == 1 and linked[0]["data-case"] in ids
    assert "single on the semi-trained model" in parsed.words
    assert "untrained-random" in parsed.texts
    assert "the single policy leaks less than none." in parsed.words
    (again,) = (words for words in parsed.texts if words.startswith("gradveil search"))
    assert "--trials 30" in again and "--out NEW-FOLDER" in again


def test_pictures_have_the_names_of_their_classes(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}}, kinds=f"shoe {EVIL}")
    text, parsed = page(run)
    first = block(text, "gallery-data")["cases"][0]["images"][0]
    assert first["class"] == f"shoe {EVIL} 0" and "<script>alert" not in text
    assert any(words.startswith("shoe </script>") for words in parsed.texts)
    older = make_audit(tmp_path / "older", {"none": {"dlg": 5}})
    assert block(page(older)[0], "gallery-data")["cases"][0]["images"][3]["class"] == "3"


EACH_OF_FIVE = 1 - 0.05 / 10


def cells_of(parsed: Parsed, name: str) -> list[str]:
    """Return the texts of the certificates from a name on."""
    texts = parsed.texts[parsed.texts.index("accuracy lost") :]
    return texts[texts.index(name) :]


def test_certificates_bound_the_share_of_all_such_pictures(five: Path) -> None:
    _, parsed = page(five)
    high = f"{upper_bound(12, 16, EACH_OF_FIVE):.1%}"
    assert cells_of(parsed, "no defense")[:2] == ["no defense", "0%"]
    rows = cells_of(parsed, "no defense")[2:22]
    assert [rows[start : start + 4] for start in (0, 8, 12)] == [
        [name, "original", "12 of 16", high]
        for name in ("adam-cosine", "strongest: adam-cosine", "any attacker")
    ]
    assert rows[4:7] == ["dlg", "original", "7 of 16"]
    assert rows[16:19] == ["blind: class mean", "original", "0 of 16"]
    assert cells_of(parsed, "gaussian:")[6] == f"{upper_bound(1, 16, EACH_OF_FIVE):.1%}"
    assert (
        "with 99.5% certainty. It says nothing of other attacks. The upper bounds of all 5 cases"
        in parsed.words
    )


def test_a_page_decides_each_row_and_says_what_it_cannot_rest_on(tmp_path: Path) -> None:
    hits = {"none": {"dlg": 5}, "prune:0.9": {"dlg": 0, "masked": 0}}
    run = make_audit(tmp_path / "run", hits, 64, accuracies={"none": 0.9, "prune:0.9": 0.9})
    second = run / "prune-0.9/records.jsonl"  # the controls of an audit stand in its first case
    lines = second.read_text().splitlines(keepends=True)
    second.write_text("".join(line for line in lines if '"positive"' not in line))
    asked = Threshold("lineup", delta=0.2, gamma=0.2)
    words = Parsed(write_report(run, certify=asked).page.read_text())
    cells = cells_of(words, "prune:")
    assert cells[3:8] == ["dlg", "original", "0 of 64", cells[6], "private"]
    assert cells[8:13] == ["masked", "original", "0 of 64", cells[6], "cannot be told"]
    assert cells[18:23] == ["any attacker", "original", "0 of 64", cells[6], "private"]
    assert "Shown to work: dlg. Not shown to work: masked: no positive control." in words.words
    path = run / "prune-0.9/model.json"
    path.write_text(
        path.read_text().replace(json.loads(path.read_text())["weights_sha256"], "0" * 64)
    )
    words = Parsed(write_report(run, certify=asked).page.read_text())
    assert cells_of(words, "prune:")[2] == "not measured"
    assert "undecided: delta 0.2 holds, gamma 0.2 not tested." in words.words
    assert "bit for bit (equal digests)" in words.words


def test_certificates_of_two_runs_on_a_page_hold_at_once(tmp_path: Path) -> None:
    runs = [make_audit(tmp_path / name, {"none": {"dlg": 5}}) for name in ("run", "other")]
    alone = Parsed(write_report(runs[0]).page.read_text()).words
    assert "with 97.5% certainty, and together with the most accuracy lost with 95%" in alone
    assert "hold at once" not in alone
    both = Parsed(write_report(runs, out=tmp_path / "both").page.read_text()).words
    assert "all 2 cases, on delta by any attack and on gamma, hold at once at 95%" in both


def test_certificates_of_batches_are_over_updates(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 4}}, batch_size=4)
    path = run / "none/records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["update"] = line["image"] // 4 * 4
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = write_report(run, certify="lineup")
    words = Parsed(report.page.read_text()).words
    assert "4 of 8 in 2 updates" in words and "so the bounds are over updates" in words
    assert f"{upper_bound(1, 2, 0.975):.1%}" in words
    said = "\n".join(report.certified)
    assert "4 of n = 8 images in 2 updates reached" in said and "count as independent" not in said
    assert "Images of one batch of 4 are not independent: bounds are over updates." in said


def test_classes_too_small_to_draw_from_stand_beside_the_mix_of_classes(tmp_path: Path) -> None:
    small = {EVIL: 3, "coat": 19}
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}}, passed_over=small)
    text, parsed = page(run)
    assert "<script>alert" not in text
    said = [words for words in parsed.texts if "no image was drawn of 2 classes, " in words]
    assert len(said) == 3 and all("'coat' with 19: a line-up needs 20" in words for words in said)
    assert any(words.startswith("A picture counts as reached") for words in said)
    assert any(words.startswith("Images unlike the 8 of") for words in said)
    (case,) = AuditResult.read(run).plain()
    assert case["passed_over"] == small


def test_images_of_a_user_without_splits_are_said_to_be_of_none(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}}, data="images")
    _, parsed = page(run)
    assert "Images unlike the 8 attacked here" in parsed.words
    said = " ".join(write_report(run, certify="lineup").certified)
    assert "images unlike the 8 (" in said
    run = make_audit(tmp_path / "spied", {"none": {"dlg": 5}}, split="train")
    assert "Images unlike the 8 of fashion-mnist-mini train attacked" in page(run)[1].words


def test_advice_that_is_set_in_is_a_list_below_its_line(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}})
    advice = ["None:", "  prune:0.9: no", "  3-1-7: no", "Beware."]
    report = write_files({"": AuditResult.read(run)}, tmp_path / "page", advice=advice)
    nested = "<li>None:<ul><li>prune:0.9: no</li><li>3-1-7: no</li></ul></li><li>Beware.</li>"
    text = report.page.read_text(encoding="utf-8")
    assert nested in text
    Parsed(text)


def test_a_star_is_explained_where_a_file_does_not_say_what_it_was_trained_under(
    tmp_path: Path,
) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}}, accuracies={"none": 0.9})
    assert "or its file does not say under which" in page(run)[1].words


def test_the_threshold_of_the_certificates_can_be_asked_for_and_decided(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 8}, "prune:0.9": {"dlg": 1}}, failed=1)
    write_report(run, certify=Threshold("psnr", 15, delta=0.9))
    words = Parsed((run / "index.html").read_text()).words
    assert "came as close as 15 dB PSNR" in words
    assert "prune:0.9: delta 0.9 holds; gamma was not asked for." in words
    assert "7 of 8, 1 failed" in words and "100.0%" in words
    write_report(run, certify=Threshold("psnr", 40, delta=0.9))
    assert (
        "recognized all the same: rank 1 by dlg in"
        in Parsed((run / "index.html").read_text()).words
    )
    with pytest.raises(GradveilError, match="metric of certify"):
        write_report(run, certify="lpips=0.1")


def test_without_line_ups_there_is_no_certificate_unless_asked_for(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}}, ranks=False)
    assert "Certificates" not in page(run)[1].words
    write_report(run, certify="ssim=0.3")
    assert "came to an SSIM of 0.3" in Parsed((run / "index.html").read_text()).words


def test_images_that_a_search_has_used_are_told_in_notes_certificates_and_settings(
    tmp_path: Path,
) -> None:
    defenses = {"none": {"dlg": 5}, "3-1-7": {"dlg": 1}}
    used = "were used by the search that chose a defense"
    bound = "Mind that the search that chose a defense has used 3 of the 8 images"
    text = "Name the policies.toml of their search"
    apart = page(make_audit(tmp_path / "apart", defenses, scored=300))[1].words
    assert "None of them is among the 300" in apart and text in apart
    assert used not in apart and bound not in apart
    overlap = make_audit(tmp_path / "overlap", defenses, scored=300, victims_scored=3, first=198)
    words = page(overlap)[1].words
    assert f"Warning: 3 of the 8 images attacked {used}" in words and bound in words
    result = AuditResult.read(overlap)
    made = {case.name: found for case, found in certify_cases(result, Threshold("lineup"))}
    assert any(line.startswith(bound) for line in certificates_in_words(made, result.cases[0]))
    without = page(make_audit(tmp_path / "without", defenses))[1].words
    assert not any(said in without for said in ("None of them is", used, bound, text))


LINE = {"mean": [0.1, 0.4, 1.0], "std": [0.02, 0.1, 0.0]}


def test_curves_of_gradients_are_drawn_where_there_are_any(tmp_path: Path) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}})
    assert "how much alike" not in page(run)[1].words
    lines = {"points": 3, "lines": {"none": LINE, "3-1-7": {"mean": [0.1, 0.2, 1.0]}}}
    layers = {"steps": [0, 300, 600], "layers": {"conv.0.weight": LINE}}
    cells = [
        make_cell(tmp_path / "lines", "lines", lines),
        make_cell(tmp_path / "layers", "layers", layers),
    ]
    made = write_report([run, *cells])
    assert made.page == run / "index.html"
    text = made.page.read_text()
    parsed = Parsed(text)
    tips = [str(a["data-tip"]) for a in parsed.named("button") if "data-tip" in a]
    assert "3-1-7, 50% of the way: 0.200" in tips
    assert "conv.0.weight, iteration 300: 0.400 ± 0.100" in tips
    assert text.count("<polyline") == 3
    assert "resnet20-4 on cifar100 under 3-1-7, means of 100 pictures" in parsed.words


@pytest.mark.parametrize(
    ("kind", "result", "says"),
    [
        ("lines", {"points": 5, "lines": {"none": LINE}}, "none has 3 numbers for 5 moments"),
        ("layers", {"steps": [0], "layers": {"a": {"mean": [1.0]}}}, "a has 1 numbers"),
        ("singles", {"values": {}}, "a cell of kind singles, which has no curves"),
    ],
)
def test_a_cell_without_whole_curves_is_refused(
    tmp_path: Path, kind: str, result: dict[str, Any], says: str
) -> None:
    run = make_audit(tmp_path / "run", {"none": {"dlg": 5}})
    with pytest.raises(GradveilError, match=says):
        write_report([run, make_cell(tmp_path / "cell", kind, result)])


def test_a_cell_alone_is_no_run(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "cell", "lines", {"points": 3, "lines": {"none": LINE}})
    with pytest.raises(GradveilError, match="give the folder of an audit or a search too"):
        write_report(cell)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.mkdir(), "holds no audit: there is no settings.json in it"),
        (lambda path: path.write_text(""), "holds no audit"),
    ],
)
def test_a_folder_without_a_run_is_refused(tmp_path: Path, make: Any, says: str) -> None:
    make(tmp_path / "run")
    with pytest.raises(GradveilError, match=says):
        write_report(tmp_path / "run")
    assert not (tmp_path / "run").is_dir() or not [*(tmp_path / "run").iterdir()]


def test_what_a_killed_report_was_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    run = make_search(tmp_path / "search")
    for name in (".audit.csv.abcd1234.part", ".index.html.abcd1234.part", ".other.part", "mine"):
        (run / name).write_text("half")
    write_report(run)
    left = {path.name for path in run.iterdir()}
    assert {".other.part", "mine", "audit.csv", "index.html"} <= left
    assert not [name for name in left if name.endswith("abcd1234.part")]
