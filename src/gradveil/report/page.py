"""The page of a run: one file with the answer, the pictures, every figure, and its limits."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from typing import Any

from gradveil import __version__
from gradveil.audits import AuditResult, CaseResult, Threshold
from gradveil.core.text import shortened
from gradveil.report import meters, plots
from gradveil.report.answer import (
    BARE,
    HEADLINES,
    attacked,
    given_words,
    make_answer,
    untested_words,
)
from gradveil.report.audit import audit_in_words, lineup_head
from gradveil.report.certificates import certificate_section
from gradveil.report.curves import Curves
from gradveil.report.gallery import ALL_BYTES, Budget, films, gallery, slider
from gradveil.report.glossary import glossary_section
from gradveil.report.markup import Html, data_block, element, joined, prose
from gradveil.report.page_table import figure_table
from gradveil.report.provenance import published, settings_section
from gradveil.report.search import search_in_words
from gradveil.report.tables import csv_text, flat_rows
from gradveil.report.verdict import Decision
from gradveil.search import SearchResult

LONGEST = 40  # letters of a policy in the name of a case
PRIVATE = (
    "This page shows private pictures. They are in it because it was made with --with-pictures: "
    "do not forward it to anyone who may not see them."
)


@dataclass(frozen=True)
class Page:
    """The page of one run or of several side by side, by their names.

    `search` is the search that a single run confirms. `with_pictures` shows the pictures of a
    user's own data too; those of published data sets are always shown. `threshold` is that of the
    certificates, by default rank 1 in the line-up. `advice` is that of an assessment.
    """

    results: Mapping[str, AuditResult]
    decision: Decision
    search: SearchResult | None = None
    with_pictures: bool = False
    threshold: Threshold | None = None
    curves: Sequence[Curves] = ()
    advice: Sequence[str] = ()

    @cached_property
    def runs(self) -> dict[str, AuditResult]:
        """The audits, with the cases that have been attacked."""
        return {
            name: replace(result, cases=tuple(attacked(result)))
            for name, result in self.results.items()
        }

    @cached_property
    def cases(self) -> list[tuple[str, CaseResult]]:
        """All cases with their names, which begin with the run's where there are several."""
        many = len(self.runs) > 1
        return [
            (f"{run} · {self.name_of(case)}" if many else self.name_of(case), case)
            for run, result in self.runs.items()
            for case in result.cases
        ]

    def name_of(self, case: CaseResult) -> str:
        """Return the name of a case; those of a search have folders such as untrained-hybrid."""
        if self.search is not None:
            model, _, row = case.out.name.rpartition("-")
            policy = "" if case.defense in BARE else f": {shortened(case.name, LONGEST)}"
            return f"{row} on the {model} model{policy}"
        if case.defense == "none":
            return f"no defense{case.name.removeprefix('none')}"
        return case.name

    @cached_property
    def ids(self) -> dict[int, str]:
        """Names of the cases within the page: the number of the run, and the case's folder."""
        return {
            id(case): f"{number_}/{case.out.name}"
            for number_, result in enumerate(self.runs.values())
            for case in result.cases
        }

    @cached_property
    def private(self) -> bool:
        """Whether any of the images is a user's own."""
        return any(not published(str(run.settings["data"])) for run in self.runs.values())

    def html(self) -> str:
        """Return the whole file."""
        style, script = _asset("page.css"), _asset("page.js")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        # Nothing is loaded from anywhere, and no script runs but this one.
        policy = (
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        )
        body = self._body()
        head = element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("meta", name="generator", content=f"gradveil {__version__}"),
            element("title", f"{self.title} · gradveil"),
            element("style", Html(style)),
        )
        return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"

    @property
    def title(self) -> str:
        """What was audited, on one line."""
        subjects = [
            f"{run.settings['model']} on {run.settings['data']}" for run in self.runs.values()
        ]
        return ", ".join(dict.fromkeys(subjects))

    def _body(self) -> Html:
        pictures, data = self._pictures()
        settings = settings_section(self.runs, self.search, self.name_of)
        sections = [
            ("advice", "What to do", self._advice()),
            ("given", "What the attacker was given", self._given()),
            ("pictures", "Private pictures and their reconstructions", pictures),
            ("leakage", "How much leaks", self._leakage()),
            ("accuracy", "Leakage against accuracy", plots.accuracy_plot(self.cases, self.ids)),
            ("training", "Leakage over training", self._training()),
            ("bounds", "Certificates: what holds for all such pictures", self._bounds()),
            ("search", "The search: privacy against accuracy", self._search()),
            ("gradients", "Gradients: how much alike they are", self._curves()),
            ("thresholds", "Thresholds", self._thresholds()),
            ("untested", "What was not tested", self._untested()),
            ("table", "Every figure", figure_table(self.runs, self.search is not None)),
            ("notes", "Notes on the figures", self._notes()),
            ("glossary", "Glossary", glossary_section()),
            ("provenance", "Settings, versions, and the command to run it again", settings),
        ]
        there = [(name, title, inner) for name, title, inner in sections if inner is not None]
        files_ = {"audit.csv": csv_text(self.runs), "rows.json": [*flat_rows(self.runs)]}
        return element(
            "body",
            element("a", "Skip to the answer", href="#answer", class_="skip"),
            self._banner(),
            self._header(there),
            element("main", *(_section(*part) for part in there), id="main"),
            element("footer", f"Made by gradveil {__version__} from the records of the run."),
            element("div", id="tip", role="status", hidden=True),
            data_block("gallery-data", data),
            data_block("files-data", files_),
            Html(f"<script>{_asset('page.js')}</script>"),
        )

    def _banner(self) -> Html | None:
        if not (self.private and self.with_pictures):
            return None
        return element("p", PRIVATE, class_="private", role="alert")

    def _header(self, sections: Sequence[tuple[str, str, Html]]) -> Html:
        links = [
            element("a", title.split(":")[0].split(",")[0], href=f"#{name}")
            for name, title, _ in sections
        ]
        return element(
            "header",
            element("p", "Data reconstruction audit", class_="kicker"),
            *(self._answer(name, run) for name, run in self.runs.items()),
            element("nav", *links, aria_label="Sections"),
            id="answer",
        )

    def _answer(self, name: str, run: AuditResult) -> Html:
        found, settings = make_answer(run), run.settings
        several = len(self.runs) > 1
        level = "h2" if several else "h1"
        facts = [
            f"{settings['model']} on {settings['data']}",
            f"{settings['images']} pictures",
            _counted(len({r.attack for c in run.cases for r in c.of("attack")}), "attack"),
            _counted(len({c.defense for c in run.cases if not c.control} - {*BARE}), "defense"),
            f"seed {settings['seed']}",
        ]
        return element(
            "section",
            element("p", name, class_="run") if several else None,
            element(level, HEADLINES[found.tone]),
            element("p", found.sentences[0], class_="lead"),
            element("p", found.sentences[1], class_="lead second"),
            element("ul", *(element("li", fact) for fact in facts), class_="chips"),
            class_=f"answer {found.tone}",
        )

    def _advice(self) -> Html | None:
        lines: list[tuple[str, list[Html]]] = []
        for line in self.advice:  # one that is set in belongs to the line before
            if line.startswith(" ") and lines:
                lines[-1][1].append(element("li", prose(line.strip())))
            else:
                lines.append((line.strip(), []))
        items = [
            element("li", prose(text), element("ul", *more) if more else "") for text, more in lines
        ]
        return element("ul", *items, class_="lines") if items else None

    def _given(self) -> Html:
        lines = {pair: None for run in self.runs.values() for pair in given_words(run)}
        parts = [
            joined([element("dt", name), element("dd", prose(_sentence(words)))])
            for name, words in lines
        ]
        return element("dl", *parts, class_="facts")

    def _pictures(self) -> tuple[Html, dict[str, Any]]:
        empty: dict[str, Any] = {"originals": {}, "cases": []}
        if self.private and not self.with_pictures:
            words = (
                "The pictures are left out: the images are not of a published data set that "
                "gradveil knows, so they may be private. ",
                element("code", "gradveil report RUN --with-pictures"),
                " puts them in.",
            )
            return element("p", *words, class_="note"), empty
        budget, parts = Budget(ALL_BYTES), []
        public = "" if self.private else "The data set is published, so its pictures are shown. "
        intro = (
            f"{public}The first row is what clients keep to themselves. Every other picture was "
            "computed from an update alone, by the strongest attack on the defense at its left."
        )
        parts.append(element("p", intro))
        for name, run in self.runs.items():
            table = films([(self.name_of(case), case) for case in run.cases], budget)
            if table is not None:
                several = len(self.runs) > 1
                head = element("h3", name) if several else None
                parts.append(element("div", head, slider(), table, class_="film-box"))
        data = gallery(self.cases, self.ids, budget)
        shown = [entry for entry in data["cases"] if entry["images"]]
        if not shown:
            return element(
                "p", "The files of the pictures are not in the folder.", class_="note"
            ), empty
        parts += [
            element("h3", "Every picture, worst first"),
            element("div", id="gallery", class_="gallery"),
            element("noscript", "The pictures need JavaScript, which is switched off."),
        ]
        return joined(parts), data

    def _leakage(self) -> Html:
        size = lineup_head([case for _, case in self.cases]).replace("\n", " ")
        intro = (
            f"A dot is the share of pictures with rank 1, {size}: the reconstruction resembles the "
            "true picture more than every other. The bar is its 95% interval, the thin line what "
            "luck gives, dB are over the blind guess. Controls, in gray, say how far the same "
            "count comes without the victim's update (blind, sham, bar), at best (ceiling), and on "
            "an easy model (positive)."
        )
        if not any(row.candidates for _, case in self.cases for row in case.rows):
            intro = (
                "No line-up could be made, so there is no share of recognized pictures; the notes "
                "on the figures say why. At the right are dB over the blind guess."
            )
        legend = element(
            "p",
            *(
                element("span", element("i", class_=f"key {kind}"), words)
                for kind, words in (
                    ("strongest", "strongest attack"),
                    ("attack", "other attacks"),
                    ("control", "controls"),
                    ("luck", "luck"),
                )
            ),
            class_="legend",
        )
        named = self.cases if len(self.cases) <= meters.OPEN else meters.by_leakage(self.cases)
        return joined([element("p", intro), legend, meters.meters(named)])

    def _training(self) -> Html | None:
        made = [plots.training_plot(run, self.ids) for run in self.runs.values()]
        drawn = [plot for plot in made if plot is not None]
        return joined(drawn) if drawn else None

    def _bounds(self) -> Html | None:
        count = sum(run.count for run in self.runs.values())
        made = {
            name: certificate_section(run, self.threshold, self.name_of, count)
            for name, run in self.runs.items()
        }
        there = {name: part for name, part in made.items() if part is not None}
        heads = len(self.runs) > 1
        parts = [
            joined([element("h3", name) if heads else None, part]) for name, part in there.items()
        ]
        return joined(parts) if parts else None

    def _curves(self) -> Html | None:
        drawn = [plot for curves in self.curves for plot in curves.plots()]
        return joined(drawn) if drawn else None

    def _search(self) -> Html | None:
        if self.search is None:
            return None
        shown = {
            str(case.defense).removeprefix("policy:").partition(",")[0]: self.ids[id(case)]
            for _, case in reversed(self.cases)
        }
        plot = plots.search_plot(self.search, shown)
        words = [element("li", prose(line)) for line in search_in_words(self.search)]
        return joined([plot, element("ul", *words, class_="lines")])

    def _thresholds(self) -> Html | None:
        decision = self.decision
        if decision.thresholds is None:
            return None
        state = "All thresholds hold." if decision.passed else "Thresholds are broken."
        rows = [
            element("li", check.words + ".", class_="holds" if check.holds else "broken")
            for check in sorted(decision.checks, key=lambda check: bool(check.holds))
        ]
        head = element("p", state, class_="state " + ("holds" if decision.passed else "broken"))
        return joined([head, element("ul", *rows, class_="lines checks")])

    def _untested(self) -> Html:
        lines = {line: None for run in self.runs.values() for line in untested_words(run)}
        return element("ul", *(element("li", prose(line)) for line in lines), class_="lines")

    def _notes(self) -> Html:
        parts = []
        for name, run in self.runs.items():
            words = audit_in_words(run, self.name_of, on_page=True)
            lines = [element("li", prose(line)) for line in words]
            parts.append(element("h3", name) if len(self.runs) > 1 else None)
            parts.append(element("ul", *lines, class_="lines"))
        return joined(parts)


def _asset(name: str) -> str:
    return files("gradveil.report").joinpath("assets", name).read_text(encoding="utf-8")


def _section(name: str, title: str, inner: Html) -> Html:
    head = element("h2", title, id=f"{name}-title")
    return element("section", head, inner, id=name, aria_labelledby=f"{name}-title")


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count or 'no'} {word}s"
