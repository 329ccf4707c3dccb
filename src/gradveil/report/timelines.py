"""Leakage over training time, as a picture: one line for each defence and attack, and the level of a blind guess."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradveil.audits import GridResult, Part, Row
from gradveil.audits.folders import PICTURES
from gradveil.report.pictures import save_figure
from gradveil.statistics import mean_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "training-time.png"
LINES = ("-", "--", "-.", ":")
MARKS = "osD^vPX*<>"


def draw_timeline(result: GridResult) -> Path:
    """Identified and dB over blind against the training step, into the grid's folder. Against the images that were used."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    figure = Figure(figsize=(9.5, 7.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    names = list(dict.fromkeys(attack for part in result.parts for attack in _attacks(part)))
    for color, (label, parts) in enumerate(_by_defense(result.parts).items()):
        for attack in names:
            found = [(_step(part), row) for part in parts if (row := _row(part, attack)) is not None]
            if found:
                _line(top, bottom, sorted(found, key=lambda pair: pair[0]), f"{label}: {attack}", color, names.index(attack))
    chance = max(row.verdict.chance for part in result.parts for row in part.audit.rows if (row.kind, row.truth) == ("attack", "used"))
    top.axhline(100 * chance, color="black", linewidth=0.8, linestyle=":", label=f"blind: {chance:.1%}")
    bottom.axhline(0, color="black", linewidth=0.8, linestyle=":", label="best blind guess")
    top.set_ylabel("identified, %")
    top.set_ylim(-3, 103)
    bottom.set_ylabel("dB over the best blind guess")
    _steps(bottom, sorted({_step(part) for part in result.parts}))
    settings = result.settings
    title = f"{settings['model']} on {settings['data']}: leakage over training, n = {settings['images']} images, intervals of 95%"
    figure.suptitle(title, fontsize=10)
    figure.legend(*top.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
    path = result.out / PICTURES / NAME
    save_figure(figure, path)
    return path


def _line(top: "Axes", bottom: "Axes", found: Sequence[tuple[int, Row]], label: str, color: int, attack: int) -> None:
    """With the 95% interval of each point, a little aside so that lines at one step do not cover each other."""
    aside = (color + attack / 3) * 0.03
    steps = [step + aside * max(3 * step, 1) for step, _ in found]
    shares = [(row.identified / row.n, *row.identified_bounds) for _, row in found]
    heights = [(row.over_blind.mean, *(mean_interval(row.over_blind) or (None, None))) for _, row in found]
    for axis, factor, points in ((top, 100, shares), (bottom, 1, heights)):
        middle, low, high = ([float("nan") if value is None else factor * value for value in side] for side in zip(*points, strict=True))
        spread = [[m - below for m, below in zip(middle, low, strict=True)], [above - m for m, above in zip(middle, high, strict=True)]]
        drawn = axis.errorbar(steps, middle, spread, label=label, color=f"C{color}", elinewidth=0.6, capsize=2)
        drawn.lines[0].set(linestyle=LINES[attack % len(LINES)], marker=MARKS[attack % len(MARKS)], markersize=4)


def _steps(axis: "Axes", steps: Sequence[int]) -> None:
    """By powers, from the first step; where that is 0, even distances between 0 and 1."""
    last = max(1.4 * max(1, steps[-1]), 1.1 * float(axis.dataLim.x1))  # many lines stand further aside
    if steps[0] == 0:
        axis.set_xscale("symlog", linthresh=1, base=10)
        axis.set_xlim(-0.25, last)
    else:
        axis.set_xscale("log")
        axis.set_xlim(steps[0] / 1.4, last)
    axis.set_xticks(steps, [str(step) for step in steps], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("training step")


def _by_defense(parts: Sequence[Part]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.case.defense + (", clean gradient" if part.case.clean else ""), []).append(part)
    return found


def _attacks(part: Part) -> list[str]:
    return [row.attack for row in part.audit.rows if (row.kind, row.truth) == ("attack", "used")]


def _row(part: Part, attack: str) -> Row | None:
    found = [row for row in part.audit.rows if (row.kind, row.truth, row.attack) == ("attack", "used", attack)]
    return found[0] if found else None


def _step(part: Part) -> int:
    """The end of a training whose file does not say its steps stands far to the right."""
    return part.step if part.step is not None else 10**6
