"""Figures for papers: one column wide, in the format that the file's suffix names."""

from collections.abc import Mapping
from pathlib import Path

from gradveil.audits import AuditResult
from gradveil.core.text import on_one_line, shortened
from gradveil.report.answer import attacked
from gradveil.report.audit import lineup_head
from gradveil.report.pictures import save_figure

COLUMN = 3.35  # inches, a column of a paper with two
NAME = 34  # letters of a case's name


def draw_leakage(results: Mapping[str, AuditResult], path: Path) -> None:
    """Draw the share of rank 1 of the strongest attack on each case, with its 95% interval.

    The sham stands beside it as a cross, and luck as a line.
    """
    from matplotlib.figure import Figure  # slow to import, and only needed here

    cases = [(run, case) for run, result in results.items() for case in attacked(result)]
    figure = Figure(figsize=(COLUMN, 0.75 + 0.24 * len(cases)), layout="constrained")
    axis = figure.subplots()
    names = []
    for position, (run, case) in enumerate(cases):
        row = case.strongest
        low, high = (100 * bound for bound in row.identified_bounds)
        share = 100 * row.identified / row.n
        label = f"{run}: {case.name}" if len(results) > 1 else case.name
        names.append(f"{shortened(on_one_line(label), NAME)}\n{row.attack}")
        if row.candidates:
            axis.hlines(position, low, high, color="C0", alpha=0.35, linewidth=4)
            axis.plot(share, position, "o", color="C0", markersize=4.5)
        for sham in case.rows:
            if (sham.kind, sham.truth) == ("sham", row.truth) and sham.candidates:
                middle = 100 * sham.identified / sham.n
                axis.plot(middle, position, "x", color="0.4", markersize=4.5)
    chance = max(case.strongest.verdict.chance for _, case in cases)
    axis.axvline(100 * min(chance, 1.0), color="black", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names], fontsize=6)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlim(-2, 102)
    axis.tick_params(axis="x", labelsize=6)
    head = lineup_head([case for _, case in cases]).replace("\n", " ")
    n = max(case.strongest.n for _, case in cases)
    axis.set_xlabel(
        f"rank 1 in a {head}, %, n = {n}\nbar: 95%; cross: sham; dotted: luck", fontsize=6.5
    )
    subject = next(iter(results.values())).settings
    title = shortened(on_one_line(f"{subject['model']} on {subject['data']}"), 60)
    axis.set_title(title, fontsize=7, parse_math=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    save_figure(figure, path, dpi=300)
