"""A job's folder: what job it belongs to, how another is refused, and a lock that goes with the process."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gradveil.core.errors import GradveilError
from gradveil.core.files import write_text

if sys.platform != "win32":
    import fcntl

SETTINGS = "settings.json"
SHORT = 60  # letters of a setting that a message can show
SHOWN = 3  # settings that a message names
MARKS = {"trials": "a search", "epochs": "a training", "cases": "an audit", "attacks": "an audit"}
"""A setting that jobs of a kind have, and not those after it; folders do not say their kind otherwise."""

PARTS = (".*.part", "*/.*.part")  # files that a killed run was writing


@dataclass(frozen=True)
class Kind:
    """A kind of job, as messages name it, and the files that do not make a folder somebody else's."""

    name: str  # such as "an audit"
    short: str  # such as "audit", after "no"
    ignored: tuple[str, ...] = ()

    def read(self, out: Path) -> dict[str, Any]:
        """The settings of the job that the folder belongs to."""
        path = out / SETTINGS
        try:
            return dict(json.loads(path.read_text()))
        except FileNotFoundError:
            raise GradveilError(
                f"{out} holds no {self.short}: there is no {SETTINGS} in it"
            ) from None
        except (OSError, ValueError, TypeError):
            raise GradveilError(
                f"{path} is no JSON object of settings: choose another --out"
            ) from None

    def refuse_other(self, out: Path, wanted: Mapping[str, Any]) -> None:
        """An error if the folder holds anything but this very job. Nothing is written."""
        if out.exists() and not out.is_dir():
            raise GradveilError(f"{out} is a file: choose another --out, a folder")
        if not (out / SETTINGS).is_file():
            if out.is_dir() and any(not self._ours(entry) for entry in out.iterdir()):
                raise GradveilError(
                    f"{out} is not empty and holds no {self.short}: choose another --out"
                )
            return
        there = self.read(out)
        found, own = _kind(there), _kind(wanted)
        if found and own and found != own:
            raise GradveilError(f"{out} holds {found}, not {own}: choose another --out")
        if changes := differences(there, wanted):
            raise GradveilError(
                f"{out} holds {self.name} with other settings ({changes}): choose another --out"
            )

    def _ours(self, entry: Path) -> bool:
        return entry.name.endswith(".part") or entry.name in self.ignored


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """In words, such as `steps 3 there, 4 here`, the first few; a value too long to show is only named. Empty where all is equal."""
    plain = json.loads(json.dumps(dict(here)))
    other = sorted(key for key in plain.keys() | there.keys() if plain.get(key) != there.get(key))
    more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
    return ", ".join(_change(key, there.get(key), plain.get(key)) for key in other[:SHOWN]) + more


def _kind(settings: Mapping[str, Any]) -> str | None:
    return next((kind for mark, kind in MARKS.items() if mark in settings), None)


def _change(key: str, there: object, here: object) -> str:
    short = max(len(str(there)), len(str(here))) <= SHORT
    return f"{key} {there} there, {here} here" if short else f"other {key}"


def claim(out: Path, wanted: Mapping[str, Any], parts: Iterable[str] = PARTS) -> bool:
    """Make the folder this job's own, and rid it of files that a killed run was writing. True where it was nobody's before."""
    for pattern in parts:
        for unfinished in out.glob(pattern):
            unfinished.unlink(missing_ok=True)
    if (out / SETTINGS).is_file():
        return False
    write_text(out / SETTINGS, json.dumps(dict(wanted), indent=2, sort_keys=True) + "\n")
    return True


def remove_empty(*folders: Path) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def locked(path: Path, busy: Callable[[], None]) -> Iterator[None]:
    """While this process alone holds the lock of the file, which is made if need be. It goes with the process, however it ends.

    `busy` is called when another holds it; if it returns, the lock is waited for.
    """
    with _held(path, busy):
        yield


def _held(path: Path, busy: Callable[[], None]) -> IO[bytes]:
    while True:
        file = path.open("ab")
        if sys.platform == "win32":  # which has no such lock
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                busy()
            except BaseException:
                file.close()
                raise
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # it was removed while this process waited
