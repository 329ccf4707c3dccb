"""The file of a finished cell of the papers' experiments, and the types of what is in it."""

from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from gradveil.core.formats import Count, Positive, Share
from gradveil.core.reading import check_format, convert, read_json

CELL = "cell.json"
FORMAT = "gradveil cell 1"

Values = dict[str, dict[str, list[float]]]
"""Numbers by two names, such as policy and quantity."""


class TrainingCell(Struct, frozen=True):
    """The result of a cell of the papers' experiments that is a training."""

    accuracy: Share
    test_images: Positive | UnsetType = UNSET
    training_seconds: float | UnsetType = UNSET
    history: list[dict[str, float]] | UnsetType = UNSET


class AuditCell(Struct, frozen=True):
    """The result of a cell that is an audit; `case` is a folder beside the file."""

    case: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,99}$")]
    accuracy: Share | None
    attack_seconds: float


class SinglesCell(Struct, frozen=True):
    """The result of a cell that scores transformations, by rule and policy."""

    values: Values


class LinesCell(Struct, frozen=True):
    """The result of a cell that follows GradSim, by policy, then mean and std."""

    points: Positive
    lines: Values


class LayersCell(Struct, frozen=True):
    """The result of a cell that compares gradients by layer."""

    steps: list[Count]
    layers: Values


class CorrelationCell(Struct, frozen=True):
    """The result of a cell that scores policies and attacks them."""

    privacy: Values
    attack: Values


RowName = Annotated[str, Meta(pattern=r"^[a-z-]{1,20}$")]
"""The name of a model or a row of a search's audits, which is a part of a folder's name."""


class SearchCell(Struct, frozen=True):
    """The result of a cell that is a search; `cases` are its audits, rows by model."""

    states: dict[str, Count]
    kept: list[str]
    best: str
    hybrid: str | None
    cases: dict[RowName, list[RowName]]


CELLS: dict[str, type[Struct]] = {
    "training": TrainingCell,
    "audit": AuditCell,
    "tuned": AuditCell,
    "singles": SinglesCell,
    "lines": LinesCell,
    "layers": LayersCell,
    "correlation": CorrelationCell,
    "search": SearchCell,
}
"""The types of results, by the kind of the cell."""


class CellFile(Struct, frozen=True):
    """cell.json: a cell of the papers' experiments that is done."""

    format: str
    key: str
    kind: str
    cell: dict[str, Any]
    n: Count
    seconds: float
    result: dict[str, Any]


def read_cell(path: Path) -> dict[str, Any]:
    """Read what was written of a cell, its types checked."""
    found = read_json(path, dict[str, Any])
    check_format(found.get("format"), FORMAT, path)
    typed = convert(found, CellFile, path)
    if typed.kind in CELLS:
        convert(typed.result, CELLS[typed.kind], path)
    return found
