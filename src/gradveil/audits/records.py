"""Records and pictures of an audit on disk: written chunk by chunk, read back after a stop."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from safetensors.torch import save
from torch import Tensor

from gradveil.audits.job import slug
from gradveil.core.errors import GradveilError
from gradveil.core.files import append_lines, shown, write_bytes
from gradveil.core.formats import PictureFacts, RecordLine
from gradveil.core.job_folder import SETTINGS, remove_empty
from gradveil.core.reading import parse_json, read_lines
from gradveil.core.tensor_files import read_safetensors

RECORDS = "records.jsonl"
MODEL = "model.json"
IMAGES = "images"
FILES = (RECORDS, MODEL, SETTINGS)
"""Files of a case beside its pictures. The settings are removed last: they say whose it is."""

Scores = Mapping[str, float]
Key = tuple[str, str, int]
"""Kind, attack and chunk, whose records are written together."""


@dataclass(frozen=True)
class Record:
    """The result of an attack on an image, a line of JSON.

    `scores` are by truth, `used` and `original`, and empty where the status is not ok.
    """

    experiment: str
    kind: str  # attack, blind, positive, sham, bar or ceiling
    attack: str
    chunk: int
    image: int  # its number in the split
    status: str
    label: int
    label_found: int | None
    distance: float | None  # None where the attack has none, or diverged
    candidates: int  # of its line-up, 0 where there is none
    scores: Mapping[str, Scores]
    seconds: float  # the chunk's, divided by its images
    update: int | None = None  # the first image of its batch; None in records of format 2
    chance: Mapping[str, float] | None = None  # of identification among others; format 2 alone
    certain: bool | None = None  # whether the attack knows without the truth that it is exact

    @property
    def ok(self) -> bool:
        """Whether there is a reconstruction to score."""
        return self.status == "ok"

    @property
    def shared_in(self) -> int:
        """The update that it was shared in, by its first image; its own where none is known."""
        return self.image if self.update is None else self.update

    @property
    def key(self) -> Key:
        """The kind, attack and chunk that it was written with."""
        return self.kind, self.attack, self.chunk


def by_update(records: Sequence[Record]) -> list[list[Record]]:
    """Return the records of each update, in the order of their first ones."""
    found: dict[int, list[Record]] = {}
    for record in records:
        found.setdefault(record.shared_in, []).append(record)
    return list(found.values())


def finite(value: float) -> float | None:
    """Return the value, or None where it is NaN or infinite, which JSON does not know."""
    return value if math.isfinite(value) else None


def append(path: Path, records: Sequence[Record]) -> None:
    """Write all records at once; they have reached the disk when this returns."""
    lines = "".join(json.dumps(_plain(record), allow_nan=False) + "\n" for record in records)
    append_lines(path, lines.encode())


def _plain(record: Record) -> dict[str, Any]:
    """Return the record as JSON has it, without older formats' chance, and claims not made."""
    left_out = {"chance"} if record.certain is not None else {"chance", "certain"}
    return {name: value for name, value in asdict(record).items() if name not in left_out}


def read_records(path: Path) -> list[Record]:
    """Read every whole record.

    A last line that a killed run left torn is left out; damage before it is an error.
    """
    return [record for record, _ in _read(path)]


def recover(path: Path, sizes: Mapping[Key, int]) -> list[Record]:
    """Read the records of whole chunks, `sizes` images each, and cut the rest off the file."""
    kept, end = _whole(path, sizes)
    if path.is_file() and path.stat().st_size > end:
        write_bytes(path, path.read_bytes()[:end])
    return kept


def whole_chunks(path: Path, sizes: Mapping[Key, int]) -> list[Record]:
    """Read the records of whole chunks, and leave the file as it is."""
    return _whole(path, sizes)[0]


def _whole(path: Path, sizes: Mapping[Key, int]) -> tuple[list[Record], int]:
    """Return the records of whole chunks, and the position of their end."""
    kept: list[Record] = []
    part: list[Record] = []
    end = 0
    for record, position in _read(path):
        part.append(record)
        if record.key not in sizes or record.key != part[0].key:
            raise GradveilError(
                f"{path} holds a record of {record.kind} {record.attack}, chunk {record.chunk}, "
                "out of place"
            )
        if len(part) == sizes[record.key]:
            kept, part, end = kept + part, [], position
    return kept, end


def _read(path: Path) -> list[tuple[Record, int]]:
    """Return the records, each with the position of its end."""
    if not path.is_file():
        return []
    found = [(_record(line), position) for line, position in read_lines(path, RecordLine)]
    lines: dict[tuple[Key, int], int] = {}
    for number, (record, _) in enumerate(found, start=1):
        first = lines.setdefault((record.key, record.image), number)
        if first != number:
            raise GradveilError(
                f"{shown(path)}, line {number}: image {record.image} of {shown(record.attack)} is "
                f"there twice, as in line {first}"
            )
    return found


def _record(line: RecordLine) -> Record:
    plain = to_builtins(line)
    return Record(**plain)


def images_path(out: Path, kind: str, attack: str, chunk: int) -> Path:
    """Return the path of the pictures of an attack on a chunk."""
    prefix = "" if kind in ("attack", "blind") else f"{kind}-"
    return out / IMAGES / f"{prefix}{slug(attack)}-{chunk:04d}.safetensors"


def save_images(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write uint8 tensors and facts about them, whole or not at all."""
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(plain, metadata={"gradveil": json.dumps(dict(facts))}))


def load_images(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_images` wrote."""
    tensors, metadata = read_safetensors(path)
    facts = parse_json(metadata.get("gradveil", "null").encode(), PictureFacts, path)
    return tensors, to_builtins(facts)


def release(out: Path) -> None:
    """Give a case's folder back after a failure, unless it holds records."""
    if (out / RECORDS).exists() and (out / RECORDS).stat().st_size:
        return
    for path in (*out.glob(f"{IMAGES}/*.safetensors"), *map(out.joinpath, FILES)):
        path.unlink(missing_ok=True)
    remove_empty(out / IMAGES, out)
