"""Summaries of the measurements that are no audits: the best transformations, correlations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradveil.papers.experiments import NONE, Entry
from gradveil.papers.measurements import Correlated, Layers, Lines, Singles
from gradveil.papers.published import published
from gradveil.papers.records import Records

RESAMPLES = 2_000
WORDS = {
    "psnr": "PSNR",
    "ssim": "SSIM",
    "lineup": "rank 1",
    "over_blind": "dB over the knowing guess",
}

Values = NDArray[np.float64]


def lowest(values: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the five transformations with the lowest mean; the policy none is not among them."""
    means = {name: float(np.mean(some)) for name, some in values.items() if name != NONE}
    return sorted(means, key=lambda name: means[name])[:5]


def overlap(values: Mapping[str, Sequence[float]]) -> tuple[int, int, int]:
    """Return how many of the paper's five are among the five lowest, with bootstrap bounds."""
    paper = {str(number) for number in published()["best"]["paper"]}
    names = [name for name in values if name != NONE]
    table = np.array([values[name] for name in names])
    drawn = np.random.default_rng(0).integers(table.shape[1], size=(RESAMPLES, table.shape[1]))
    counts = []
    for some in drawn:
        order = np.argsort(table[:, some].mean(1), kind="stable")[: len(paper)]
        counts.append(len(paper & {names[k] for k in order}))
    low, high = np.quantile(counts, [0.025, 0.975], method="nearest")
    return len(paper & {*lowest(values)}), int(low), int(high)


def correlations(
    left: Values, right: Values, seed: int = 0, *, ranks: bool = False
) -> tuple[float, float, float]:
    """Return Pearson's or Spearman's r of two tables' row means, with bootstrap bounds (95%).

    Rows are policies, the same in both tables; columns are images, which may differ in number.
    Policies and the images of each table are resampled together: the r is of these policies, and
    these images stand for others.
    """
    rng = np.random.default_rng(seed)
    policies = rng.integers(len(left), size=(RESAMPLES, len(left)))
    again = [_resampled(some, policies, rng) for some in (left, right)]
    means = [some.mean(1)[None] for some in (left, right)]
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = _r(*again, ranks=ranks)
        value = float(_r(*means, ranks=ranks)[0])
    some = drawn[np.isfinite(drawn)]
    low, high = np.quantile(some, [0.025, 0.975]) if len(some) else (np.nan, np.nan)
    return value, float(low), float(high)


def _resampled(table: Values, policies: NDArray[np.int64], rng: np.random.Generator) -> Values:
    """Return (resamples, policies): means over images drawn anew, of the policies drawn."""
    images = table.shape[1]
    counts = rng.multinomial(images, np.full(images, 1 / images), size=len(policies))
    means: Values = counts @ table.T / images
    return np.take_along_axis(means, policies, axis=1)


def _r(left: Values, right: Values, *, ranks: bool) -> Values:
    from scipy.stats import rankdata

    return (
        _pearson(rankdata(left, axis=1), rankdata(right, axis=1))
        if ranks
        else _pearson(left, right)
    )


def _pearson(left: Values, right: Values) -> Values:
    left, right = (some - some.mean(1, keepdims=True) for some in (left, right))
    found: Values = (left * right).sum(1) / np.sqrt((left**2).sum(1) * (right**2).sum(1))
    return found


def correlation_table(result: Mapping[str, Any]) -> list[tuple[str, str, str, float, float, float]]:
    """Return rule, quantity, kind of r, and r with its bounds, for all that was measured."""
    names = [*result["attack"]]
    found = []
    for rule, values in result["privacy"].items():
        score = np.array([values[name] for name in names])
        for quantity in WORDS:
            attacked = np.array([result["attack"][name][quantity] for name in names])
            for kind in ("Pearson", "Spearman"):
                r = correlations(score, attacked, ranks=kind == "Spearman")
                found.append((rule, quantity, kind, *r))
    return found


def measurement_lines(entry: Entry, records: Records) -> list[list[str]]:
    """Return what a measurement gave, as (quantity, value); empty where it is not done."""
    result = records.result(entry.cell)
    if result is None:
        return []
    make = next(lines for kind, lines in LINES.items() if isinstance(entry.cell, kind))
    model = f"{entry.row}: " if isinstance(entry.cell, Layers) else ""
    lines = [("images", str(entry.cell.n)), *make(result)]
    return [[f"{model}{name}", value] for name, value in lines]


def _similarity_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    middle = result["points"] // 2
    return [
        (f"GradSim half way, {policy}", f"{each['mean'][middle]:.3f} ± {each['std'][middle]:.3f}")
        for policy, each in result["lines"].items()
    ]


def _layer_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (f"cosine at the end, {layer}", f"{each['mean'][-1]:.3f} ± {each['std'][-1]:.3f}")
        for layer, each in result["layers"].items()
    ]


def _single_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (f"five lowest, rule of the {rule}", ", ".join(lowest(values)))
        for rule, values in result["values"].items()
    ]


def _correlation_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("policies", str(len(result["attack"])))] + [
        (
            f"{kind}'s r of S_pri ({rule}) and {WORDS[quantity]}",
            f"{r:.2f} ({low:.2f} to {high:.2f})",
        )
        for rule, quantity, kind, r, low, high in correlation_table(result)
    ]


LINES: dict[type, Callable[[Mapping[str, Any]], list[tuple[str, str]]]] = {
    Lines: _similarity_lines,
    Layers: _layer_lines,
    Singles: _single_lines,
    Correlated: _correlation_lines,
}
