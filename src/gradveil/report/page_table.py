"""The page's table of every figure: sorted and filtered by the page's script."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.audits import AuditResult
from gradveil.audits.results import TESTED
from gradveil.report.audit import number
from gradveil.report.markup import Html, breakable, element, joined, scrolled
from gradveil.report.tables import flat_rows

TABLE = {
    "run": "run",
    "folder": "folder",
    "defense": "defense",
    "step": "step",
    "kind": "kind",
    "attack": "attack or control",
    "truth": "against",
    "n": "n",
    "identified": "rank 1",
    "percent": "share",
    "interval": "95%",
    "top5": "top 5",
    "percentile": "mean percentile",
    "p": "p",
    "over_blind": "dB over blind",
    "psnr": "PSNR dB",
    "ssim": "SSIM",
    "accuracy": "accuracy",
    "flags": "",
}
NUMBERS = (
    "step",
    "n",
    "identified",
    "percent",
    "top5",
    "percentile",
    "p",
    "over_blind",
    "psnr",
    "ssim",
    "accuracy",
)

Line = dict[str, tuple[str, Any]]
"""The cells of a line: the words, and the value that they are sorted by."""


def figure_table(results: Mapping[str, AuditResult], with_folders: bool) -> Html:
    """Return the table of every figure, with its filters and downloads.

    The folder of a case tells those of a search apart, whose defenses are audited on two models.
    """
    lines = [_table_line(line) for line in flat_rows(results)]
    shown = [name for name in TABLE if with_folders or name != "folder"]
    names = [n for n in shown if any(line.get(n, ("", ""))[0] != "" for line in lines)]
    heads = [
        element(
            "th",
            element("button", TABLE[name] or "flags", type="button"),
            scope="col",
            class_="number" if name in NUMBERS else None,
        )
        for name in names
    ]
    table = element(
        "table",
        element("thead", element("tr", *heads)),
        element("tbody", *(_row(line, names) for line in lines)),
        id="rows",
        class_="data",
    )
    return joined([_tools(lines), scrolled(table, "Table of figures", "scroll figures")])


def _tools(lines: Sequence[Line]) -> Html:
    """Return the filters and downloads above the table."""
    kinds = dict.fromkeys(line["kind"][0] for line in lines)
    choices = [element("option", "all kinds", value="")]
    choices += [element("option", kind, value=kind) for kind in kinds]
    return element(
        "div",
        element("label", "Filter ", element("input", type="search", id="filter")),
        element("label", "Kind ", element("select", *choices, id="kinds")),
        element("button", "CSV", type="button", class_="save", data_file="audit.csv"),
        element("button", "JSON", type="button", class_="save", data_file="rows.json"),
        element("span", f"{len(lines)} rows", id="count", role="status"),
        class_="tools",
    )


def _row(line: Line, names: Sequence[str]) -> Html:
    """Return a line as a row of the table."""
    cells = [
        element(
            "td",
            line[name][0] if name in NUMBERS else breakable(line[name][0]),
            data_value=line[name][1],
            class_="number" if name in NUMBERS else None,
        )
        for name in names
    ]
    marked = "strongest" if line["strongest"][0] else None
    return element("tr", *cells, data_kind=line["kind"][0], class_=marked)


def _table_line(line: Mapping[str, Any]) -> Line:
    """Return the cells of a row of figures."""
    made: Line = {key: ("" if value is None else str(value), value) for key, value in line.items()}
    made["defense"] = (f"{line['defense']}{', clean gradient' if line['clean'] else ''}",) * 2
    made["strongest"] = ("strongest" if line["strongest"] else "", line["strongest"])
    share = line["identified"] / line["n"]
    known = bool(line["candidates"])
    made["percent"] = (f"{share:.1%}", share) if known else ("", None)
    made["identified"] = (f"{line['identified']}/{line['n']}", share) if known else ("", None)
    low, high = line["identified_low"], line["identified_high"]
    made["interval"] = (f"{low:.0%} to {high:.0%}", low) if known else ("", None)
    top5, mean, p = line["top5"], line["percentile"], line["p_identified"]
    made["top5"] = ("", None) if top5 is None else (f"{top5}/{line['n']}", top5 / line["n"])
    made["percentile"] = ("", None) if mean is None else (f"{mean:.1%}", mean)
    made["p"] = (f"{p:.2g}", p) if known and line["kind"] in TESTED else ("", None)
    for name, form in (("over_blind", "+.2f"), ("psnr", ".2f"), ("ssim", ".3f")):
        made[name] = (number(line[name], form), line[name])
    accuracy = line["accuracy"]
    made["accuracy"] = ("" if accuracy is None else f"{accuracy:.1%}", accuracy)
    return made
