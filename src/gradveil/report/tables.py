"""Tables of audits for other programs: CSV and LaTeX, of one run or of several side by side."""

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from gradveil.audits import AuditResult, CaseResult
from gradveil.core.text import on_one_line
from gradveil.report.answer import attacked
from gradveil.report.audit import chosen_blind, lineup_head, number, spread

SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "≤": r"$\le$",
        "±": r"$\pm$",
        **{letter: f"\\{letter}" for letter in "&%$#_"},
    }
)


def flat_rows(results: Mapping[str, AuditResult]) -> Iterator[dict[str, Any]]:
    """Give the lines of all runs; the run's name stands first where there are several."""
    for name, result in results.items():
        for line in result.flat():
            yield {"run": name, **line} if len(results) > 1 else line


def csv_text(results: Mapping[str, AuditResult]) -> str:
    """Write audit.csv: a line for each case, attack or control, and truth."""
    lines = [*flat_rows(results)]
    text = io.StringIO()
    table = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    table.writeheader()
    table.writerows({key: _cell(value) for key, value in line.items()} for line in lines)
    return text.getvalue()


def _cell(value: object) -> object:
    """Return a value for CSV.

    A program for spreadsheets runs a text that begins like a formula; a quote before it stops that.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return value
    text = on_one_line(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def latex_text(results: Mapping[str, AuditResult]) -> str:
    """Write a LaTeX table (booktabs) of the strongest attack on each case, with its controls."""
    cases = [(name, case) for name, result in results.items() for case in attacked(result)]
    several = len(results) > 1
    head = lineup_head([case for _, case in cases]).replace("\n", " ")
    columns = [
        *(["run"] if several else []),
        "defense",
        "accuracy",
        "strongest attack",
        head,
        "95\\%",
        "sham",
        "PSNR dB",
        "blind dB",
        "SSIM",
    ]
    lines = [
        "% Needs \\usepackage{booktabs}. Rank 1 in a line-up: the reconstruction resembles the",
        "% true picture more than all others of its class in the line-up.",
        f"\\begin{{tabular}}{{{'l' * (len(columns) - 6)}{'r' * 6}}}",
        "\\toprule",
        " & ".join(columns) + " \\\\",
        "\\midrule",
    ]
    for name, case in cases:
        cells = [*([name] if several else []), *_latex_cells(case)]
        lines.append(" & ".join(_latex(cell) for cell in cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _latex_cells(case: CaseResult) -> list[str]:
    row = case.strongest
    low, high = row.identified_bounds
    rows = [other for other in case.rows if other.truth == row.truth]
    sham = next((other.lineup for other in rows if other.kind == "sham"), "-")
    known = "-" if case.model is None else f"{case.model.accuracy:.1%}"
    return [
        case.name,
        known,
        row.attack,
        row.lineup,
        f"{low:.0%} to {high:.0%}" if row.candidates else "-",
        sham,
        spread(row.psnr, ".1f"),
        number(chosen_blind(rows).psnr.mean, ".1f"),
        number(row.ssim.mean, ".2f"),
    ]


def _latex(text: str) -> str:
    return on_one_line(text).translate(SPECIAL)
