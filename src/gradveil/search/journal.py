"""The journal of a study: a file that many processes add lines to, and the types of its lines.

This module imports Optuna, so others import it only where a study is opened.
"""

import itertools
import json
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState as StateOfTrial

from gradveil.core.errors import GradveilError
from gradveil.core.files import append_lines, regular_file
from gradveil.core.formats import Count
from gradveil.core.locks import locked
from gradveil.core.reading import MalformedError, convert, parse_loose_json

LONGEST_ENTRY = 64 << 20  # bytes of a line: a result has a number for each image


class JournalEntry(Struct, frozen=True, tag_field="op_code"):
    """A line of a study's journal, as Optuna writes it; its kind is a number, `op_code`."""

    worker_id: str


class StudyCreated(JournalEntry, frozen=True, tag=0):
    study_name: str
    directions: list[Count]


class StudyDeleted(JournalEntry, frozen=True, tag=1):
    study_id: Count


class StudyAttribute(JournalEntry, frozen=True, tag=2):
    study_id: Count
    user_attr: Annotated[dict[str, Any], Meta(min_length=1, max_length=1)]


class StudyNote(JournalEntry, frozen=True, tag=3):
    study_id: Count
    system_attr: Annotated[dict[str, Any], Meta(min_length=1, max_length=1)]


class TrialCreated(JournalEntry, frozen=True, tag=4, kw_only=True):
    study_id: Count
    datetime_start: str | None
    state: Count | UnsetType = UNSET
    params: dict[str, Count | float] | UnsetType = UNSET
    distributions: dict[str, str] | UnsetType = UNSET
    user_attrs: dict[str, Any] | UnsetType = UNSET
    system_attrs: dict[str, Any] | UnsetType = UNSET
    value: float | UnsetType | None = UNSET
    values: list[float] | UnsetType | None = UNSET
    intermediate_values: dict[str, float] | UnsetType = UNSET
    datetime_complete: str | UnsetType = UNSET


class TrialSlot(JournalEntry, frozen=True, tag=5):
    trial_id: Count
    param_name: str
    param_value_internal: Count | float
    distribution: str


class TrialState(JournalEntry, frozen=True, tag=6, kw_only=True):
    trial_id: Count
    state: Count
    values: list[float] | None
    datetime_start: str | UnsetType = UNSET
    datetime_complete: str | UnsetType = UNSET


class TrialStep(JournalEntry, frozen=True, tag=7):
    trial_id: Count
    step: Count
    intermediate_value: float


class TrialAttribute(JournalEntry, frozen=True, tag=8):
    trial_id: Count
    user_attr: Annotated[dict[str, Any], Meta(min_length=1, max_length=1)]


class TrialNote(JournalEntry, frozen=True, tag=9):
    trial_id: Count
    system_attr: Annotated[dict[str, Any], Meta(min_length=1, max_length=1)]


JournalLine = (
    StudyCreated
    | StudyDeleted
    | StudyAttribute
    | StudyNote
    | TrialCreated
    | TrialSlot
    | TrialState
    | TrialStep
    | TrialAttribute
    | TrialNote
)


def count_ended(path: Path) -> int:
    """Count the trials of a study's journal that have ended, whatever their result."""
    states = {
        entry["trial_id"]: StateOfTrial(entry["state"])
        for entry in Journal(path).read_logs(0)
        if entry["op_code"] == TrialState.__struct_config__.tag
    }
    return sum(state.is_finished() for state in states.values())


class Journal(JournalFileBackend):
    """A journal file that survives killed processes. It differs from Optuna's in two ways.

    The lock is the kernel's and goes with its holder, however that ends; Optuna's is a file, which
    a killed holder leaves behind for half a minute. And a line that a killed process did not finish
    is cut off before the next is written; otherwise the two would run together, and nobody could
    read the journal again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._ends = {0: 0}  # the position after so many lines

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Give the entries from this number on, each checked against its type.

        A last line that is no JSON, as a killed process leaves it, is left out; such damage before
        the end is an error, and so is an entry of another type anywhere.
        """
        regular_file(self._path)
        size = self._path.stat().st_size  # other processes may add lines meanwhile
        with self._path.open("rb") as file:
            known = max(number for number in self._ends if number <= log_number_from)
            file.seek(self._ends[known])
            torn: GradveilError | None = None
            for number in itertools.count(known):
                line = file.readline(LONGEST_ENTRY + 1)
                if not line or file.tell() > size:
                    return
                if torn is not None:
                    raise torn
                where = f"{self._path}, line {number + 1}"
                if len(line) > LONGEST_ENTRY:
                    raise GradveilError(f"{where}: longer than {LONGEST_ENTRY:,} bytes")
                if not line.endswith(b"\n"):
                    return
                try:
                    entry = parse_loose_json(line, where)
                except MalformedError as error:
                    is_none = "" if number else ", and it is no journal of a study"
                    torn = GradveilError(
                        f"{where} is damaged ({error.problem}){is_none}: restore it, or choose "
                        "another --out"
                    )
                    continue
                convert(entry, JournalLine, where)
                self._ends[number + 1] = file.tell()
                if number >= log_number_from:
                    yield entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with locked(self._path):
            append_lines(self._path, lines.encode())
