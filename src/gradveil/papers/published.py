"""The figures that the papers print, from `published.toml`, which is shipped with the package."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from gradveil.core.errors import unknown

SOURCES = ("paper", "replication")


@cache
def published() -> dict[str, Any]:
    """Return everything in the file: tables, claims, the correlation, the best transformations."""
    return tomllib.loads(files("gradveil.papers").joinpath("published.toml").read_text())


def table_rows(table: str) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Return a table's figures by row, then by source (paper, replication), then by quantity.

    Quantities are psnr and its std in dB, acc in percent.
    """
    tables = published()["tables"]
    if table not in tables:
        raise unknown("table", table, tables)
    rows: dict[str, dict[str, dict[str, float]]] = tables[table]["rows"]
    return rows


def table_title(table: str) -> str:
    """Return the title of a published table."""
    return str(published()["tables"][table]["title"])


def figure(table: str, row: str, source: str, quantity: str) -> float | None:
    """Return a published figure; None where the source does not print it."""
    return table_rows(table).get(row, {}).get(source, {}).get(quantity)


def claim(number: int | str) -> str:
    """Return a claim of the paper by its number, 1 to 7."""
    return str(published()["claims"][str(number)])
