"""One JSON line for each image: written chunk by chunk, read back after a stop, a torn end cut off."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gradveil.core.errors import GradveilError
from gradveil.core.files import write_bytes

RECORDS = "records.jsonl"
Scores = Mapping[str, float]
Key = tuple[str, str, int]
"""Kind, attack and chunk: what is written in one go."""


@dataclass(frozen=True)
class Record:
    """What one attack made of one image. `scores` are by truth, `used` and `original`, and empty where the status is not ok."""

    experiment: str
    kind: str  # attack, blind or positive
    attack: str
    chunk: int
    image: int  # its place in the split
    status: str
    label: int
    label_found: int | None
    distance: float | None  # None where the attack has none, or diverged
    candidates: int
    chance: Mapping[str, float]  # by truth: of identification by the label alone, or by luck
    scores: Mapping[str, Scores]
    seconds: float  # the chunk's, divided by its images

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def key(self) -> Key:
        return self.kind, self.attack, self.chunk


def finite(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def append(path: Path, records: Sequence[Record]) -> None:
    """All of them in one write that has reached the disk when this returns."""
    lines = "".join(json.dumps(asdict(record), allow_nan=False) + "\n" for record in records)
    try:
        with path.open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise GradveilError(
            f"cannot write {path}: {error.strerror or error}; mend that and run again: what is whole is kept"
        ) from error


def read_records(path: Path) -> list[Record]:
    """Every whole record. A last line that a killed run left torn is left out; damage before it is an error."""
    return [record for record, _ in _read(path)]


def recover(path: Path, sizes: Mapping[Key, int]) -> list[Record]:
    """The records of whole chunks, `sizes` images each; what follows them is cut off the file, to be done again."""
    kept: list[Record] = []
    part: list[Record] = []
    end = 0
    for record, position in _read(path):
        part.append(record)
        if record.key not in sizes or record.key != part[0].key:
            raise GradveilError(
                f"{path} holds a record of {record.kind} {record.attack}, chunk {record.chunk}, out of place"
            )
        if len(part) == sizes[record.key]:
            kept, part, end = kept + part, [], position
    if path.is_file() and path.stat().st_size > end:
        write_bytes(path, path.read_bytes()[:end])
    return kept


def _read(path: Path) -> list[tuple[Record, int]]:
    """Records, each with the position of its end."""
    if not path.is_file():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    found: list[tuple[Record, int]] = []
    position = 0
    for number, line in enumerate(lines, start=1):
        position += len(line) + 1
        try:
            found.append((Record(**json.loads(line)), position))
        except (ValueError, TypeError):
            if number == len(lines) and not rest:
                break
            raise GradveilError(
                f"line {number} of {path} is damaged: choose another --out"
            ) from None
    return found
