"""Figures of the experiments, drawn from their records as the papers draw them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from gradveil.papers.beyond import EARLY, OverTraining
from gradveil.papers.cells import GRID, Audited, Cell, Trained
from gradveil.papers.experiments import NONE, Entry, Pictures
from gradveil.papers.measurements import Correlated, Layers, Lines, Singles
from gradveil.papers.plan import Part
from gradveil.papers.precode import PrecodeReconstructions
from gradveil.papers.records import Records
from gradveil.papers.summaries import correlations, lowest
from gradveil.papers.tables import count_first, way_words
from gradveil.report.pictures import open_picture, save_figure, save_picture
from gradveil.stats import clopper_pearson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Done = Sequence[tuple[str, Mapping[str, Any]]]
"""Rows and results of the cells that are done."""

WIDTH, HEIGHT = 5.0, 3.6  # inches of a panel
GAP = 12  # pixels between pictures
FINAL_STEP = -1  # stands for the end of a training
STYLES = ("-", "--", ":", "-.")
SPREAD = 0.06  # of the way to the next step, between the points of two lines

Stages = Mapping[tuple[str, str], Sequence[tuple[int, int, int]]]


@dataclass(frozen=True)
class Drawing:
    """A figure: the function that draws it into a file, and its caption."""

    draw: Callable[[Path], None]
    caption: str


def draw_figures(parts: Sequence[Part], records: Records, folder: Path) -> list[Path]:
    """Draw a figure for each part that has one and is done, at least partly."""
    drawn = []
    for part in parts:
        path = folder / f"{part.experiment.id}-{part.way}.png"
        if (drawing := find_drawing(part, records)) is not None:
            drawing.draw(path)
            drawn.append(path)
    return drawn


def find_drawing(part: Part, records: Records) -> Drawing | None:
    """Return a part's figure; None where there is nothing to draw."""
    title = _title(part)
    if isinstance(part.experiment, OverTraining):
        stages = find_stages(part, records)
        return Drawing(partial(_save, draw_stages, title, stages), STAGES) if stages else None
    if isinstance(part.experiment, Pictures | PrecodeReconstructions):
        grids = _grids(part, records)
        return Drawing(partial(stack_pictures, grids), GRIDS) if grids else None
    for kind, (draw, caption) in FIGURES.items():
        done = _done([entry for entry in part.entries if isinstance(entry.cell, kind)], records)
        if done and (kind is not Trained or _has_curves(part)):
            return Drawing(partial(_save, draw, title, done), caption(done))
    return None


def _title(part: Part) -> str:
    """Name the experiment, the way, and the data set and model where they are the same for all."""
    trainings = [entry.cell.training for entry in part.entries]
    names = [{each.data for each in trainings}, {each.model for each in trainings}]
    same = ", ".join(next(iter(some)) for some in names if len(some) == 1)
    return f"{part.experiment.id}, {way_words(part.way)}{f': {same}' if same else ''}"


def _save(draw: "Callable[[str, Any], Figure]", title: str, found: Any, path: Path) -> None:
    save_figure(draw(title, found), path)


def _grids(part: Part, records: Records) -> list[list[Path]]:
    """Return the pictures that the part's audits kept, each once: a column for each model."""
    cells = {entry.cell.key: entry.cell for entry in part.entries if records.done(entry.cell)}
    columns: dict[str, list[Path]] = {}
    for cell in cells.values():
        path = records.folder(cell) / GRID
        if path.is_file():
            columns.setdefault(cell.training.model, []).append(path)
    return [*columns.values()]


def stack_pictures(columns: Sequence[Sequence[Path]], target: Path) -> None:
    """Write one picture with these below each other, in columns."""
    opened = [[open_picture(path) for path in column] for column in columns]
    width = max(picture.width for column in opened for picture in column)
    height = max(sum(picture.height + GAP for picture in column) for column in opened)
    whole = Image.new("RGB", (len(opened) * (width + GAP) - GAP, height), "white")
    for number, column in enumerate(opened):
        left, top = number * (width + GAP), 0
        for picture in column:
            whole.paste(picture.convert("RGB"), (left + (width - picture.width) // 2, top))
            top += picture.height + GAP
    save_picture(target, whole)


def find_stages(part: Part, records: Records) -> Stages:
    """Return (step, rank 1, images) by row and attack, of the first training.

    Rows are named as in `OverTraining.entries`.
    """
    found: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for row, cell in part.entries:
        assert isinstance(cell, Audited)
        case = records.case(cell)
        if case is None or cell.training.seed:
            continue
        made = case.of("attack", cell.attack)
        hits = count_first(made) or 0
        step = FINAL_STEP if cell.training.at is None else cell.training.at
        line = found.setdefault((row.partition(",")[0], cell.attack), [])
        line.append((step, hits, len(made)))
    return found


def draw_stages(title: str, stages: Stages) -> "Figure":
    """Draw the share of images with rank 1 by step of training, with 95% intervals.

    Lines of one row have one color, those of one attack one style.
    """
    figure, (axis,) = _panels(title, 1)
    steps = sorted({step for line in stages.values() for step, _, _ in line}, key=_order)
    rows, attacks = ([*dict.fromkeys(names)] for names in zip(*stages, strict=True))
    for number, ((row, attack), line) in enumerate(stages.items()):
        points = sorted(line, key=lambda point: _order(point[0]))
        shift = SPREAD * (number - (len(stages) - 1) / 2)
        places = [steps.index(step) + shift for step, _, _ in points]
        shares = np.array([hits / n for _, hits, n in points])
        bounds = np.array([clopper_pearson(hits, n) for _, hits, n in points])
        errors = np.abs(bounds.T - shares)
        axis.errorbar(
            places,
            100 * shares,
            100 * errors,
            color=f"C{rows.index(row)}",
            linestyle=STYLES[attacks.index(attack) % len(STYLES)],
            marker="o",
            label=f"{row}, {attack}",
        )
    axis.set_xticks(range(len(steps)), ["end" if step < 0 else f"{step:,}" for step in steps])
    axis.set(xlabel="step of training", ylabel="rank 1, % of images", ylim=(-2, 102))
    axis.legend(fontsize=7)
    return figure


def _order(step: int) -> float:
    return float("inf") if step < 0 else step


def _done(entries: Sequence[Entry], records: Records) -> Done:
    found = ((entry.row, records.result(entry.cell)) for entry in entries)
    return [(row, result) for row, result in found if result is not None]


def _has_curves(part: Part) -> bool:
    """Tell whether curves of training are what the experiment shows."""
    return all(isinstance(entry.cell, Trained) for entry in part.entries)


def _panels(title: str, count: int, lines: int = 1) -> "tuple[Figure, list[Axes]]":
    """Return a figure with so many panels in each of its lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * count, HEIGHT * lines), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(lines, count, squeeze=False)
    return figure, [*axes.flat]


def draw_lines(title: str, done: Done) -> "Figure":
    """Draw GradSim from noise to the image: mean and one standard deviation, by policy."""
    figure, (axis,) = _panels(title, 1)
    for _, result in done:
        way = np.linspace(0, 1, result["points"])
        for policy, each in result["lines"].items():
            mean, std = np.array(each["mean"]), np.array(each["std"])
            (line,) = axis.plot(way, mean, label=policy)
            axis.fill_between(way, mean - std, mean + std, alpha=0.2, color=line.get_color())
    axis.set(xlabel="from noise to the image", ylabel="GradSim")
    axis.legend()
    return figure


def draw_curves(title: str, done: Done) -> "Figure":
    """Draw training loss and test accuracy by epoch, a curve for each training.

    Rows such as `cifar100, mlp, none` have a pair of panels for each data set and model, and
    trainings of one row have one color.
    """
    groups: dict[str, dict[str, list[Any]]] = {}
    for row, result in done:
        where, _, name = row.rpartition(", ")
        groups.setdefault(where, {}).setdefault(name, []).append(result["history"])
    figure, axes = _panels(title, 2, len(groups))
    for number, (where, rows) in enumerate(groups.items()):
        loss, right = axes[2 * number : 2 * number + 2]
        for color, (name, trainings) in enumerate(rows.items()):
            for again, history in enumerate(trainings):
                epochs = [each["epoch"] for each in history]
                for axis, values in (
                    (loss, [each["train_loss"] for each in history]),
                    (right, [100 * each["test_accuracy"] for each in history]),
                ):
                    label = None if again else name
                    axis.plot(epochs, values, color=f"C{color}", label=label)
        loss.set(xlabel="epoch", ylabel="training loss", title=where)
        right.set(xlabel="epoch", ylabel="test accuracy, %", title=where)
        loss.legend(fontsize=7)
    return figure


def draw_layers(title: str, done: Done) -> "Figure":
    """Draw the likeness of gradients during the attack: a panel for each layer."""
    layers = [*done[0][1]["layers"]]
    figure, axes = _panels(title, len(layers))
    for axis, layer in zip(axes, layers, strict=True):
        for row, result in done:
            if layer in result["layers"]:
                axis.plot(result["steps"], result["layers"][layer]["mean"], label=row)
        axis.set(xlabel="iteration", ylabel="cosine", title=layer)
    axes[0].legend(fontsize=8)
    return figure


def draw_singles(title: str, done: Done) -> "Figure":
    """Draw S_pri of each transformation, the five lowest in red: a panel for each rule."""
    result = done[0][1]["values"]
    figure, axes = _panels(title, len(result))
    for axis, (rule, values) in zip(axes, result.items(), strict=True):
        names = sorted((name for name in values if name != NONE), key=int)
        best = lowest(values)
        colors = ["tab:red" if name in best else "tab:blue" for name in names]
        means = [float(np.mean(values[name])) for name in names]
        axis.bar([int(name) for name in names], means, color=colors)
        axis.axhline(float(np.mean(values[NONE])), color="black", linewidth=0.8)
        axis.set(xlabel="transformation", ylabel=f"S_pri, rule of the {rule}")
    return figure


def draw_correlations(title: str, done: Done) -> "Figure":
    """Draw PSNR against S_pri, a point for each policy: a panel for each rule."""
    result = done[0][1]
    figure, axes = _panels(title, len(result["privacy"]))
    levels = np.array([each["psnr"] for each in result["attack"].values()])
    for axis, (rule, values) in zip(axes, result["privacy"].items(), strict=True):
        scores = np.array([values[name] for name in result["attack"]])
        r, low, high = correlations(scores, levels)
        axis.scatter(scores.mean(1), levels.mean(1), s=10)
        axis.set(xlabel=f"S_pri, rule of the {rule}", ylabel="PSNR, dB")
        axis.set_title(f"r = {r:.2f} ({low:.2f} to {high:.2f})", fontsize=9)
    return figure


def _lines_caption(_: Done) -> str:
    return (
        "Mean GradSim with the gradient of the image, on the way from noise (0) to the image (1), "
        "by policy; the bands are one standard deviation over images."
    )


def _curves_caption(_: Done) -> str:
    return "Training loss and test accuracy by epoch, by defense; each line is a training."


def _layers_caption(_: Done) -> str:
    return "Mean cosine of the layer's gradient with the shared one, by iteration of the attack."


def _singles_caption(done: Done) -> str:
    images = len(done[0][1]["values"][next(iter(done[0][1]["values"]))][NONE])
    return (
        f"S_pri of each transformation by its number, mean of {images} images; a panel for each "
        "definition. The five lowest are red, the line is S_pri without any."
    )


def _correlations_caption(done: Done) -> str:
    attacked = [*done[0][1]["attack"].values()]
    return (
        f"PSNR of the attack against S_pri; each of the {len(attacked)} points is a random policy, "
        f"mean of {len(attacked[0]['psnr'])} images. Above: Pearson's r with its 95% interval."
    )


STAGES = (
    "Share of images with rank 1 by step of training, for each defense and attack, with exact 95% "
    "intervals over images; the first training of each alone. Steps are those of trainings of "
    f"{EARLY} epochs, the end that of others."
)
GRIDS = (
    "Originals above, reconstructions below, with PSNR and rank in the line-up; a column of rows "
    "for each model. The attack is named above each row; others of the table have no pictures here."
)
FIGURES: dict[type[Cell], tuple[Callable[[str, Done], "Figure"], Callable[[Done], str]]] = {
    Lines: (draw_lines, _lines_caption),
    Trained: (draw_curves, _curves_caption),
    Layers: (draw_layers, _layers_caption),
    Singles: (draw_singles, _singles_caption),
    Correlated: (draw_correlations, _correlations_caption),
}
