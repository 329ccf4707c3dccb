"""A job's folder: which job it belongs to, and how another is refused."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError, OtherSettingsError
from gradveil.core.files import (
    MissingFileError,
    check_writable,
    refuse_ways_out,
    remove_unfinished,
    shown,
    write_text,
)
from gradveil.core.formats import KINDS
from gradveil.core.locks import LOCK
from gradveil.core.reading import (
    MalformedError,
    WrongTypeError,
    check_format,
    convert,
    read_json,
    written_by,
)

SETTINGS = "settings.json"
SHORT = 60  # letters of a setting that a message can show
SHOWN = 3  # settings that a message names
PARTS = (".*.part", "*/.*.part")  # files that a killed run was writing


@dataclass(frozen=True)
class Kind:
    """A kind of job, as messages name it, and how its settings are written.

    `format` is the format of the settings that this version writes, such as "gradveil audit 3", and
    `schema` their type; without a format the settings are those of version 0.1.0. Settings of the
    formats `older` can be read too.
    """

    name: str  # such as "an audit"
    short: str  # such as "audit", after "no"
    format: str | None = None
    schema: type | None = None
    older: tuple[str, ...] = ()

    def read(self, out: Path) -> dict[str, Any]:
        """Return the settings of the job that the folder belongs to, their types checked."""
        path = out / SETTINGS
        found = self._found(out)
        kinds = dict(KINDS.values())
        if self.name in kinds and (other := _kind(found)) not in (None, self.name):
            raise GradveilError(f"{shown(out)} holds {other}, no {self.short}")
        if found.get("format") not in self.older and (self.format is not None or "format" in found):
            check_format(found.get("format"), self.format or "none", path)
        schema = self.schema or kinds.get(self.name)
        if schema is not None:
            try:
                convert(found, schema, path)
            except WrongTypeError as error:
                raise WrongTypeError(f"{error}{written_by(found)}; choose another folder") from None
        return found

    def refuse_other(self, out: Path, wanted: Mapping[str, Any]) -> None:
        """Refuse a folder that holds anything but this very job. Nothing is written."""
        try:
            if out.exists() and not out.is_dir():
                raise GradveilError(f"{shown(out)} is a file: choose another --out, a folder")
            check_writable(out / SETTINGS)
            if out.is_dir():
                refuse_ways_out(out)
            if not (out / SETTINGS).is_file():
                if out.is_dir() and not all(map(_is_passing, out.iterdir())):
                    raise GradveilError(
                        f"{shown(out)} is not empty and holds no {self.short}: choose another --out"
                    )
                return
        except OSError as error:
            raise GradveilError(
                f"cannot use {shown(out)}: {error.strerror or error}; choose another --out"
            ) from None
        there = self._found(out)
        found, asked = _kind(there), _kind(wanted)
        if found and asked and found != asked:
            raise GradveilError(f"{out} holds {found}, not {asked}: choose another --out")
        if changes := differences(there, wanted):
            raise OtherSettingsError(
                f"{out} holds {self.name} with other settings ({changes}): choose another --out"
            )

    def _found(self, out: Path) -> dict[str, Any]:
        path = out / SETTINGS
        try:
            return read_json(path, dict[str, Any])
        except MissingFileError:
            raise GradveilError(
                f"{shown(out)} holds no {self.short}: there is no {SETTINGS} in it"
            ) from None
        except (MalformedError, WrongTypeError) as error:
            problem = error.problem if isinstance(error, MalformedError) else "another JSON value"
            raise GradveilError(
                f"{shown(path)} is no JSON object of settings ({problem}): choose another folder"
            ) from None


def _is_passing(path: Path) -> bool:
    """Tell whether a file is there while a job writes, and says nothing of whose folder it is."""
    return path.name == LOCK or path.name.endswith(".part")


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Name the first few settings that differ, such as `steps 3 there, 4 here`; empty without any.

    A value too long to show is only named.
    """
    plain = json.loads(json.dumps(dict(here)))
    other = sorted(key for key in plain.keys() | there.keys() if plain.get(key) != there.get(key))
    more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
    return ", ".join(_change(key, there.get(key), plain.get(key)) for key in other[:SHOWN]) + more


def _kind(settings: Mapping[str, Any]) -> str | None:
    """Return the kind of job that has such settings, as messages name it."""
    return next((name for mark, (name, _) in KINDS.items() if mark in settings), None)


def _change(key: str, there: object, here: object) -> str:
    short = max(len(str(there)), len(str(here))) <= SHORT
    name = shown(key, SHORT)
    return f"{name} {shown(there)} there, {shown(here)} here" if short else f"other {name}"


def claim(out: Path, wanted: Mapping[str, Any], parts: Iterable[str] = PARTS) -> bool:
    """Make the folder this job's; True where it was nobody's before.

    Files that a killed run was writing are removed.
    """
    remove_unfinished(out, parts)
    if (out / SETTINGS).is_file():
        return False
    write_text(out / SETTINGS, json.dumps(dict(wanted), indent=2, sort_keys=True) + "\n")
    return True


def remove_empty(*folders: Path) -> None:
    """Remove those of the folders that hold nothing."""
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
