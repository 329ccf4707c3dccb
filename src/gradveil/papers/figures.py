"""Figures of the experiments, drawn from their records as the papers draw them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradveil.papers.cells import Cell, Trained
from gradveil.papers.experiments import NONE, Entry
from gradveil.papers.measurements import Correlated, Layers, Lines, Singles
from gradveil.papers.queue import Part
from gradveil.papers.records import Records
from gradveil.papers.summaries import correlations, lowest
from gradveil.report.pictures import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Done = Sequence[tuple[str, Mapping[str, Any]]]
"""Rows and results of the cells that are done."""

WIDTH, HEIGHT = 5.0, 3.6  # inches of a panel


def draw_figures(parts: Sequence[Part], records: Records, folder: Path) -> list[Path]:
    """Draw a figure for each part that has one and is done, at least partly."""
    drawn = []
    for part in parts:
        for kind, draw in FIGURES.items():
            done = _done([entry for entry in part.entries if isinstance(entry.cell, kind)], records)
            if not done or (kind is Trained and not _has_curves(part)):
                continue
            path = folder / f"{part.experiment.id}-{part.way}.png"
            save_figure(draw(f"{part.experiment.id}, {part.way}", done), path)
            drawn.append(path)
    return drawn


def _done(entries: Sequence[Entry], records: Records) -> Done:
    found = ((entry.row, records.result(entry.cell)) for entry in entries)
    return [(row, result) for row, result in found if result is not None]


def _has_curves(part: Part) -> bool:
    """Tell whether curves of training are what the experiment shows."""
    return all(isinstance(entry.cell, Trained) for entry in part.entries)


def _panels(title: str, count: int) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * count, HEIGHT), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(1, count, squeeze=False)
    return figure, [*axes[0]]


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
    """Draw training loss and test accuracy by epoch, a line for each training."""
    figure, (loss, right) = _panels(title, 2)
    for row, result in done:
        history = result["history"]
        epochs = [each["epoch"] for each in history]
        loss.plot(epochs, [each["train_loss"] for each in history], label=row)
        right.plot(epochs, [100 * each["test_accuracy"] for each in history], label=row)
    loss.set(xlabel="epoch", ylabel="training loss")
    right.set(xlabel="epoch", ylabel="test accuracy, %")
    right.legend(fontsize=6)
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
        names = [name for name in values if name != NONE]
        best = lowest(values)
        colors = ["tab:red" if name in best else "tab:blue" for name in names]
        means = [float(np.mean(values[name])) for name in names]
        axis.bar(range(len(names)), means, color=colors)
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


FIGURES: dict[type[Cell], "Callable[[str, Done], Figure]"] = {
    Lines: draw_lines,
    Trained: draw_curves,
    Layers: draw_layers,
    Singles: draw_singles,
    Correlated: draw_correlations,
}
