"""The file of a finished cell of the papers' experiments."""

from pathlib import Path
from typing import Any

from gradveil.core.formats import CELLS, CellFile
from gradveil.core.reading import check_format, convert, read_json

CELL = "cell.json"
FORMAT = "gradveil cell 1"


def read_cell(path: Path) -> dict[str, Any]:
    """Read what was written of a cell, its types checked."""
    found = read_json(path, dict[str, Any])
    check_format(found.get("format"), FORMAT, path)
    typed = convert(found, CellFile, path)
    if typed.kind in CELLS:
        convert(typed.result, CELLS[typed.kind], path)
    return found
