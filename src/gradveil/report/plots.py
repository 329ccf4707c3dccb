"""Plots of the page, as HTML whose letters keep their size at every width."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gradveil.audits import AuditResult, CaseResult, Row
from gradveil.report.markup import Html, element, joined
from gradveil.report.meters import percent
from gradveil.search import SearchResult, TriedPolicy
from gradveil.search.results import HEADS, SHARES

COLORS = 8  # of lines and points
NO_DEFENSE = 2  # the color of no defense, which no other has

Ids = Mapping[int, str]
"""The names of cases in the page's gallery, by `id()` of the case."""


@dataclass(frozen=True)
class Axis:
    """An axis: its label, its ends, its ticks with their words, and its scale."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    scale: Callable[[float], float] = float

    def at(self, value: float) -> str:
        """Return the position of a value from the axis's start, for a style sheet."""
        low, high = self.scale(self.low), self.scale(self.high)
        return percent((self.scale(value) - low) / ((high - low) or 1))


@dataclass(frozen=True)
class Point:
    """A point with the interval of its height.

    `tip` is shown at it, and `case` names the pictures that it opens.
    """

    x: float
    y: float
    tip: str
    low: float | None = None
    high: float | None = None
    kind: str = ""
    color: int = 0
    case: str | None = None


@dataclass(frozen=True)
class Plot:
    """Points over two axes, lines between some of them, and a level that luck gives."""

    title: str
    x: Axis
    y: Axis
    points: Sequence[Point]
    lines: Sequence[Sequence[Point]] = ()
    level: tuple[float, str] | None = None
    legend: Sequence[tuple[str, str]] = field(default=())  # class and words

    def html(self) -> Html:
        """Return the plot as a figure."""
        level = []
        if self.level is not None:
            value, words = self.level
            style = f"bottom:{self.y.at(value)}"
            level = [element("div", element("span", words), class_="level", style=style)]
        area = element(
            "div",
            *(_tick(words, f"left:{self.x.at(value)}", "x") for value, words in self.x.ticks),
            *(_tick(words, f"bottom:{self.y.at(value)}", "y") for value, words in self.y.ticks),
            *level,
            self._drawn_lines(),
            *map(self._dot, self.points),
            class_="area",
        )
        legend = [
            element("span", element("i", class_=f"key {kind}"), words)
            for kind, words in self.legend
        ]
        return element(
            "figure",
            element("figcaption", self.title),
            element("p", self.y.label, class_="axis-y"),
            area,
            element("p", self.x.label, class_="axis-x"),
            element("p", *legend, class_="legend") if legend else None,
            class_="plot",
        )

    def _drawn_lines(self) -> Html | None:
        if not self.lines:
            return None
        drawn = []
        for line in self.lines:
            corners = " ".join(
                f"{self.x.at(point.x)[:-1]},{100 - float(self.y.at(point.y)[:-1]):.2f}"
                for point in line
            )
            drawn.append(element("polyline", points=corners, class_=f"color{line[0].color}"))
        return element(
            "svg", *drawn, viewBox="0 0 100 100", preserveAspectRatio="none", aria_hidden="true"
        )

    def _dot(self, point: Point) -> Html:
        left = self.x.at(point.x)
        bars = []
        if point.low is not None and point.high is not None:
            low, high = (float(self.y.at(value)[:-1]) for value in (point.low, point.high))
            style = f"left:{left};bottom:{low:.2f}%;height:{high - low:.2f}%"
            bars = [element("i", class_=f"bar color{point.color}", style=style)]
        button = element(
            "button",
            type="button",
            class_=f"point color{point.color} {point.kind}".rstrip(),
            style=f"left:{left};bottom:{self.y.at(point.y)}",
            aria_label=point.tip,
            data_tip=point.tip,
            data_case=point.case,
        )
        return joined([*bars, button])


def _tick(words: str, style: str, axis: str) -> Html:
    return element("div", element("span", words), class_=f"tick {axis}", style=style)


def round_steps(low: float, high: float) -> list[float]:
    """Return about five round numbers from low to high."""
    rough = (high - low) / 4 or 1.0
    size: float = 10 ** math.floor(math.log10(rough))
    size *= next(factor for factor in (1, 2, 5, 10) if factor * size >= rough)
    first = math.ceil(low / size)
    return [n * size for n in range(first, math.floor(high / size + 1e-9) + 1)]


def _padded(values: Sequence[float], label: str, words: Callable[[float], str]) -> Axis:
    """Return an axis with some room on both sides of the values."""
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or max(0.05 * abs(high), 0.01)
    low, high = low - room, high + room
    return Axis(label, low, high, [(value, words(value)) for value in round_steps(low, high)])


SHARE_AXIS = Axis("rank 1 in the line-up", -0.02, 1.02, [(k / 4, f"{k / 4:.0%}") for k in range(5)])


def _leak_point(case: CaseResult, x: float, name: str, color: int, row: Row, ids: Ids) -> Point:
    low, high = row.identified_bounds
    known = "" if case.model is None else f", accuracy {case.model.accuracy:.1%}"
    tip = (
        f"{name}: {row.attack}, rank 1 in {row.identified} of {row.n} line-ups "
        f"(95%: {low:.0%} to {high:.0%}){known}"
    )
    share = row.identified / row.n
    return Point(x, share, tip, low, high, "", color, ids.get(id(case)))


def _color(case: CaseResult, number: int) -> int:
    """Return the number of a color in the style sheet."""
    others = [color for color in range(1, COLORS + 1) if color != NO_DEFENSE]
    return NO_DEFENSE if case.defense == "none" else others[number % len(others)]


def _luck(rows: Sequence[Row]) -> tuple[float, str]:
    chance = max(row.verdict.chance for row in rows)
    return chance, f"luck {chance:.1%}"


def accuracy_plot(cases: Sequence[tuple[str, CaseResult]], ids: Ids) -> Html | None:
    """Return leakage against accuracy; None unless two accuracies that differ are known."""
    known = [
        (name, case)
        for name, case in _last_steps(cases)
        if case.model and case.strongest.candidates
    ]
    if len({case.model.accuracy for _, case in known if case.model}) < 2:
        return None
    points, legend = [], []
    for number, (name, case) in enumerate(known):
        assert case.model is not None
        marked = name + ("" if case.trained_so else " *")
        color = _color(case, number if len(known) <= COLORS else 0)
        points.append(_leak_point(case, case.model.accuracy, marked, color, case.strongest, ids))
        legend.append((f"color{color}", marked))
    if len(known) > COLORS:
        legend = [(f"color{NO_DEFENSE}", "no defense"), ("color1", "a defense")]
    x = _padded([point.x for point in points], "accuracy of the model", lambda v: f"{v:.3g}")
    ticks = [(value, f"{value:.1%}".replace(".0%", "%")) for value, _ in x.ticks]
    x = Axis(x.label, x.low, x.high, ticks)
    level = _luck([case.strongest for _, case in known])
    title = "The strongest attack on each defense, against the accuracy that the defense leaves"
    legend.append(("span", "95% interval"))
    return Plot(title, x, SHARE_AXIS, points, (), level, legend).html()


def _last_steps(cases: Sequence[tuple[str, CaseResult]]) -> list[tuple[str, CaseResult]]:
    """Return the cases, of a defense over training only that after the last step."""
    last: dict[object, tuple[str, CaseResult]] = {}
    for name, case in cases:
        over = case.asked_step is not None
        key = (case.out.parent, case.defense, case.clean) if over else case.out
        if key not in last or (case.step or 0) >= (last[key][1].step or 0):
            last[key] = name, case
    return [*last.values()]


def training_plot(result: AuditResult, ids: Ids) -> Html | None:
    """Return leakage over training, a line for each defense; None without steps."""
    lines: dict[str, list[tuple[int, CaseResult]]] = {}
    for case in result.cases:
        if case.asked_step is not None and case.step is not None and case.strongest.candidates:
            label = case.defense + (", clean gradient" if case.clean else "")
            lines.setdefault(label, []).append((case.step, case))
    steps = sorted({step for line in lines.values() for step, _ in line})
    if len(steps) < 2:
        return None
    made, legend = [], []
    for number, (label, line) in enumerate(lines.items()):
        color = _color(line[0][1], number)
        line.sort(key=lambda pair: pair[0])
        points = [
            _leak_point(case, step, f"{label}, step {step}", color, case.strongest, ids)
            for step, case in line
        ]
        made.append(points)
        legend.append((f"color{color}", label))
    # Even up to step 1, then by powers of 10: the first steps change most.
    scale = math.log1p
    x = Axis("training step", 0 if steps[0] == 0 else steps[0] * 0.8, steps[-1] * 1.1, [], scale)
    ticks: list[tuple[float, str]] = []
    for step in steps:  # those that do not stand on the one before
        if not ticks or float(x.at(step)[:-1]) - float(x.at(ticks[-1][0])[:-1]) > 6:
            ticks.append((step, str(step)))
    x = Axis(x.label, x.low, x.high, ticks, scale)
    points = [point for line_ in made for point in line_]
    level = _luck([case.strongest for line in lines.values() for _, case in line])
    title = "The strongest attack after so many steps of training"
    return Plot(title, x, SHARE_AXIS, points, made, level, legend).html()


def search_plot(result: SearchResult, shown: Mapping[str, str]) -> Html | None:
    """Return the policies of a search, leakage against accuracy.

    `shown` are the names of cases in the gallery, by the text of their policy.
    """
    settings = result.settings
    score = (
        "privacy" if settings.get("score") == "privacy" else settings.get("rank_by", "over_blind")
    )
    tried = [t for t in result.trials if {score, "accuracy"} <= t.quantities.keys()]
    if not tried:
        return None
    kept = {trial.number for trial in result.kept}
    points = [_policy_point(trial, score, trial.number in kept, shown) for trial in tried]
    points.sort(key=lambda point: point.kind)  # those kept are drawn last, above the others
    form = (lambda v: f"{v:.0%}") if score in SHARES else (lambda v: f"{v:.3g}")
    x = _padded([p.x for p in points], f"{HEADS['accuracy']}: higher costs less accuracy", _short)
    y = _padded([p.y for p in points], f"{HEADS[score]}: lower leaks less", form)
    threshold = float(settings["threshold"])
    legend = [("policy", "a policy"), ("policy z-kept", "kept")]
    if shown:
        legend.append(("policy shown", "audited: select it for its pictures"))
    title = f"{len(tried)} of {len(result.trials)} policies drawn, accuracy threshold {threshold:g}"
    return Plot(title, x, y, points, (), None, legend).html()


def _short(value: float) -> str:
    return f"{value:.4g}"


def _policy_point(trial: TriedPolicy, score: str, kept: bool, shown: Mapping[str, str]) -> Point:
    leak, accurate = trial.quantities[score], trial.quantities["accuracy"]
    text = str(trial.policy)
    tip = (
        f"policy {text}, trial {trial.number}: {HEADS[score]} {leak.text(score in SHARES)}, "
        f"{HEADS['accuracy']} {accurate.text()}{', kept' if kept else ''}"
    )
    kind = ("policy z-kept" if kept else "policy") + (" shown" if text in shown else "")
    return Point(accurate.mean, leak.mean, tip, kind=kind, case=shown.get(text))
