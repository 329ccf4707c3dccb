"""Curves of the page: GradSim from noise to the picture, and gradients by layer in an attack.

They are measured by cells of the papers' experiments, which `gradveil reproduce` records.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.core.cell_files import CELL, read_cell
from gradveil.core.errors import GradveilError
from gradveil.core.files import shown
from gradveil.report.markup import Html
from gradveil.report.plots import COLORS, Axis, Plot, Point, round_steps

KINDS = ("lines", "layers")
LIKE = "likeness of the gradients (cosine)"
LONGEST = 400  # numbers of a curve, each of which is a point on the page


@dataclass(frozen=True)
class Curves:
    """A record of a cell that follows gradients; `subject` says on what they were measured."""

    kind: str
    subject: str
    n: int
    result: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Curves":
        """Read the record in a folder; refuse one of another kind."""
        found = read_cell(folder / CELL)
        if found["kind"] not in KINDS:
            raise GradveilError(
                f"{shown(folder)} holds a cell of kind {shown(found['kind'])}, which has no "
                f"curves; choose from {', '.join(KINDS)}"
            )
        curves = cls(found["kind"], _subject(found["cell"]), found["n"], found["result"])
        for name, values in curves.means.items():
            if not 2 <= len(values) <= LONGEST or len(values) != len(curves.at):
                raise GradveilError(
                    f"{shown(folder / CELL)}: {shown(name)} has {len(values)} numbers for "
                    f"{len(curves.at)} moments; expected as many, from 2 to {LONGEST}"
                )
        return curves

    @property
    def at(self) -> list[float]:
        """Where the numbers of each curve stand: the share of the picture, or the iteration."""
        if self.kind == "layers":
            return [float(step) for step in self.result["steps"]]
        last = max(1, self.result["points"] - 1)
        return [number / last for number in range(self.result["points"])]

    @property
    def means(self) -> dict[str, Sequence[float]]:
        """The means over images of each curve, by policy or layer."""
        named: Mapping[str, Mapping[str, Sequence[float]]] = self.result[self.kind]
        return {name: each.get("mean", ()) for name, each in named.items()}

    def plots(self) -> Iterator[Html]:
        """Give a plot of all curves, with n and what they were measured on."""
        named: Mapping[str, Mapping[str, Sequence[float]]] = self.result[self.kind]
        lines, legend = [], []
        for number, (name, means) in enumerate(self.means.items()):
            color = 1 + number % COLORS
            title = f"no policy ({name})" if name == "none" else name
            spread = named[name].get("std", ())
            more = [f" ± {std:.3f}" for std in spread] if len(spread) == len(means) else None
            lines.append(
                [
                    Point(x, mean, f"{title}, {self._where(x)}: {mean:.3f}{std}", color=color)
                    for x, mean, std in zip(self.at, means, more or [""] * len(means), strict=True)
                ]
            )
            legend.append((f"color{color}", title))
        points = [point for line in lines for point in line]
        low = min(0.0, *(point.y for point in points))
        high = max(1.0, *(point.y for point in points))
        ticks = [(value, f"{value:.2g}") for value in round_steps(low, high)]
        y = Axis(LIKE, low - 0.02, high + 0.02, ticks)
        yield Plot(self._title, self._x, y, points, lines, None, legend).html()

    def _where(self, x: float) -> str:
        return f"iteration {x:.0f}" if self.kind == "layers" else f"{x:.0%} of the way"

    @property
    def _x(self) -> Axis:
        if self.kind == "layers":
            low, high = self.at[0], self.at[-1]
            ticks = [(value, f"{value:g}") for value in round_steps(low, high)]
            return Axis("iteration of the attack", low, high, ticks)
        ticks = [(share / 4, f"{share / 4:.0%}") for share in range(5)]
        return Axis("from noise to the picture", 0.0, 1.0, ticks)

    @property
    def _title(self) -> str:
        of = f"{self.subject}, means of {self.n} pictures"
        if self.kind == "layers":
            return f"Gradient of the attack's picture against the shared one, by layer: {of}"
        return f"GradSim, the likeness of a picture's gradient and that of its mix with noise: {of}"


def _subject(cell: Mapping[str, Any]) -> str:
    """Name the model, the data and the defense of a cell, as far as its settings do."""
    training = cell.get("training")
    named = training if isinstance(training, Mapping) else cell
    parts = [str(named[key]) for key in ("model", "data") if key in named]
    if "defense" in cell and str(cell["defense"]) != "none":
        parts.append(f"under {cell['defense']}")
    return " ".join(parts[:1]) + (f" on {' '.join(parts[1:])}" if parts[1:] else "")
