"""Optuna's journal file, safe against processes that are killed while they write. Import it where Optuna is needed, not before."""

import json
import os
from pathlib import Path
from typing import IO, Any

from optuna.storages.journal import JournalFileBackend

from gradveil.core.folders import locked

BLOCK = 1 << 16


class Journal(JournalFileBackend):
    """Differs from Optuna's own in two ways.

    The lock is the kernel's and goes with its holder, however that ends; Optuna's is a file, which a killed holder leaves behind
    for half a minute. And a line that a killed process did not finish is cut off before the next is written; otherwise the two
    would run together, and nobody could read the journal again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with locked(self._path, lambda: None), self._path.open("rb+") as file:
            cut_unfinished_line(file)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())


def cut_unfinished_line(file: IO[bytes]) -> None:
    """Leaves the file at its end, which is the end of a line."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        end = start + newline + 1
        if newline >= 0:
            break
    if end < size:
        file.truncate(end)
    file.seek(end)
