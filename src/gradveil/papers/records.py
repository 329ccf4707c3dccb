"""Records of finished cells: written as each ends, found again anywhere by the cell's key."""

import json
import platform
import tarfile
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gradveil import __version__
from gradveil.audits.model import read_facts
from gradveil.audits.records import RECORDS, read_records
from gradveil.audits.results import CASE, CaseResult
from gradveil.core.cell_files import CELL, FORMAT, read_cell
from gradveil.core.errors import GradveilError
from gradveil.core.files import (
    read_gzipped,
    remove_unfinished,
    replacing,
    shown,
    unfinished,
    write_text,
)
from gradveil.core.job_folder import PARTS
from gradveil.core.locks import held
from gradveil.engine.device import find_device
from gradveil.papers.cells import PACKED, Audited, Cell, Workspace
from gradveil.papers.searched import Searched
from gradveil.search.confirm import CONFIRM

COMMITTED = Path("benchmarks") / "results" / "reproduce"
"""Where records lie in the repository."""

LARGEST = 64 << 20  # bytes of an audit's records


@dataclass(frozen=True)
class Records:
    """Folders of records; new ones are written to the first, and found in all."""

    folders: tuple[Path, ...] = (COMMITTED,)

    def facts(self, cell: Cell) -> dict[str, Any] | None:
        """Return what was written of a cell; None where it is not done."""
        for folder in self.folders:
            path = folder / cell.key / CELL
            if not path.is_file():
                continue
            found = read_cell(path)
            if found["key"] != cell.key or found["kind"] != cell.kind:
                raise GradveilError(f"{shown(path)} is of another cell: remove its folder")
            return found
        return None

    def done(self, cell: Cell) -> bool:
        """Tell whether a cell is done."""
        return self.facts(cell) is not None

    def result(self, cell: Cell) -> Any:
        """Return the result of a cell; None where it is not done."""
        found = self.facts(cell)
        return None if found is None else found["result"]

    def case(self, cell: Audited) -> CaseResult | None:
        """Return the audit of a cell; None where it is not done."""
        result = self.result(cell)
        return None if result is None else read_case(self.folder(cell) / str(result["case"]))

    def confirmed(self, cell: Searched) -> dict[str, dict[str, CaseResult]]:
        """Return the audits of a search by model and row; empty where it is not done."""
        result = self.result(cell)
        if result is None:
            return {}
        folder = self.folder(cell) / CONFIRM
        return {
            str(model): {str(row): read_case(folder / f"{model}-{row}") for row in rows}
            for model, rows in result["cases"].items()
        }

    def folder(self, cell: Cell) -> Path:
        """Return the folder of a cell that is done."""
        folders = (folder / cell.key for folder in self.folders)
        return next(folder for folder in folders if (folder / CELL).is_file())

    def write(
        self, cell: Cell, workspace: Workspace, result: dict[str, Any], seconds: float
    ) -> Path:
        """Write a finished cell; `cell.json` comes last, and says that the others are whole."""
        target = self.folders[0] / cell.key
        remove_unfinished(target, PARTS)
        cell.keep(workspace, target)
        facts = {
            "format": FORMAT,
            "key": cell.key,
            "kind": cell.kind,
            "cell": cell.settings(),
            "n": cell.n,
            "seconds": round(seconds, 1),
            "estimated_seconds": round(cell.seconds, 1),
            "estimated_training_seconds": round(cell.training.seconds, 1),
            "device": device_name(workspace.device),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "versions": {
                "gradveil": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "result": result,
        }
        write_text(target / CELL, json.dumps(facts, sort_keys=True) + "\n")
        return target

    def archive(self, path: Path, lock: Path) -> None:
        """Write all records of the first folder into one tar file, which can be sent elsewhere.

        The folder `lock` is held meanwhile, so that of several processes the last writes all.
        """
        with held(lock, lambda _: None):
            remove_unfinished(path.parent, [unfinished(path)])
            with replacing(path) as part, tarfile.open(part, "w:gz") as made:
                for cell in sorted(self.folders[0].glob(f"*/{CELL}")):
                    made.add(cell.parent, arcname=cell.parent.name)


@cache
def read_case(folder: Path) -> CaseResult:
    """Read a finished audit, once: tables and claims look at it many times."""
    packed = folder / PACKED
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / RECORDS
        plain.write_bytes(read_gzipped(packed, LARGEST))
        try:
            records = tuple(read_records(plain))
        except GradveilError as error:
            raise GradveilError(str(error).replace(str(plain), shown(packed))) from None
    return CaseResult(folder, CASE.read(folder), records, read_facts(folder))


def device_name(device: str) -> str:
    """Return the GPU's name, or `cpu`."""
    found = find_device(device)
    return torch.cuda.get_device_name(found) if found.type == "cuda" else "cpu"
