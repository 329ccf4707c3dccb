"""A search's files: policies.toml for people and other commands, search.json and trials.csv for programs."""

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from gradveil.core.files import write_text
from gradveil.search.folders import POLICIES, RESULT, TRIALS, remove_parts
from gradveil.search.results import Found, Quantity, SearchResult
from gradveil.transforms.files import FORMAT

DIGITS = 6  # of a mean: where a search was stopped can change the last bits of its figures
HEADER = """\
# Transformation policies found by `gradveil search`. To use one:
#   gradveil train --defense policies.toml          the hybrid
#   gradveil audit --defense policies.toml:best     the best single policy; a number is a rank, such as policies.toml:3
#   Policy.load("policies.toml")                    in Python
"""


def write_files(result: SearchResult) -> None:
    """search.json comes last: where it is, everything is."""
    remove_parts(result.out)
    write_text(result.out / POLICIES, policies_text(result))
    write_text(result.out / TRIALS, trials_text(result))
    write_text(result.out / RESULT, json.dumps(result.plain(), allow_nan=False) + "\n")


def policies_text(result: SearchResult) -> str:
    head: dict[str, Any] = {"format": FORMAT, "best": str(result.best)}
    head |= {"no_hybrid": result.no_hybrid} if result.hybrid is None else {"hybrid": str(result.hybrid)}
    parts = [HEADER + _table(head), "[search]\n" + _table(result.settings)]
    parts += ["[[policy]]\n" + _table(_entry(rank, one)) for rank, one in enumerate(result.kept, start=1)]
    return "\n".join(parts)


def trials_text(result: SearchResult) -> str:
    names = list(dict.fromkeys(name for one in result.trials for name in one.quantities))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["trial", "policy", "state", *(f"{name}_{part}" for name in names for part in ("mean", "error", "n"))])
    for one in result.trials:
        known = [one.quantities.get(name) for name in names]
        cells = [cell for q in known for cell in (("", "", 0) if q is None else (q.mean, "" if q.error is None else q.error, q.n))]
        table.writerow([one.number, str(one.policy), one.state, *cells])
    return text.getvalue()


def _entry(rank: int, one: Found) -> dict[str, Any]:
    return {"rank": rank, "policy": str(one.policy), "trial": one.number} | dict(one.quantities)


def _table(values: Mapping[str, Any]) -> str:
    """Lines of TOML, which has no word for None: such values are left out."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items() if value is not None)


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case Quantity():
            parts = {"mean": _rounded(value.mean), "error": None if value.error is None else _rounded(value.error), "n": value.n}
            return "{" + ", ".join(f"{name} = {part!r}" for name, part in parts.items() if part is not None) + "}"
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
