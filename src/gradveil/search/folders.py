"""The search's folder: whose it is, what lies where, and a lock for what only one process may do at a time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError
from gradveil.core.job_folder import SETTINGS, Kind, claim, locked, remove_empty

LOCK = ".lock"
TRAINING = "semi-trained"
JOURNAL = "study.journal"
CONFIRM = "confirm"
RESULT = "search.json"
POLICIES = "policies.toml"
TRIALS = "trials.csv"
PARTS = (".*.part",)  # not those of the training and the audits, which see to their own
SEARCH = Kind("a search", "search", ignored=(LOCK,))


@contextmanager
def claimed(out: Path, wanted: Mapping[str, Any]) -> Iterator[None]:
    """The folder as this search's own. A search that fails before it has anything to keep gives it back."""
    SEARCH.refuse_other(out, wanted)
    new = False
    if not (out / SETTINGS).is_file():
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GradveilError(
                f"cannot write into {out}: {error.strerror or error}; choose another --out"
            ) from error
        with alone(out, lambda: None):
            SEARCH.refuse_other(out, wanted)  # another may have been faster
            new = claim(out, wanted, parts=PARTS)
    try:
        yield
    except Exception:
        if new:
            release(out)
        raise


@contextmanager
def alone(out: Path, busy: Callable[[], None]) -> Iterator[None]:
    """While no other process of this search is in such a block; `busy` is called before a wait."""
    with locked(out / LOCK, busy):
        yield


def remove_parts(out: Path) -> None:
    """Files that a killed process was writing. To be called alone."""
    for pattern in PARTS:
        for unfinished in out.glob(pattern):
            unfinished.unlink(missing_ok=True)


def release(out: Path) -> None:
    """Give the folder back, unless it holds more than the claim."""
    if {entry.name for entry in out.iterdir()} <= {SETTINGS, LOCK}:
        for name in (SETTINGS, LOCK):
            (out / name).unlink(missing_ok=True)
        remove_empty(out)
