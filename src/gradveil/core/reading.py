"""Text files read back from disk: JSON, JSON lines and TOML, checked against a type.

Only regular files are read, and never beyond a bound on their size. Any failure is a
`GradveilError` of one line that names the file and the field. msgspec checks the types (its own,
or dataclasses): it weighs 0.7 MB without dependencies, pydantic 10 MB, reads records nearly twice
as fast, and refuses NaN.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

from gradveil import __version__
from gradveil.core.errors import GradveilError
from gradveil.core.files import read_bytes, regular_file, shown

T = TypeVar("T")

MOST = 4 << 20  # bytes of a JSON file, unless its reader says otherwise
MOST_TOML = 1 << 20  # the parser is plain Python, and slow
LONGEST_LINE = 1 << 20
DEEPEST = 64  # brackets within brackets
UNKNOWN = "unknown field"
CHOICES = 12  # fields that an error names at most: files that people write have few
DOTS = 200  # in a line of TOML: the parts of a dotted key become tables within tables

_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_AT = re.compile(r"(.*?)(?: - at (.*))?", re.DOTALL)
_ABOUT_FIELD = {
    re.compile(r"Object missing required field `(.*)`", re.DOTALL): "missing",
    re.compile(r"Object contains unknown field `(.*)`", re.DOTALL): UNKNOWN,
}


class MalformedError(GradveilError):
    """The text is no JSON or TOML, as that of a torn file. `problem` is the reason alone."""

    def __init__(self, where: object, problem: str) -> None:
        super().__init__(f"{shown(where)}: {problem}")
        self.problem = problem


class WrongTypeError(GradveilError):
    """A value is not of the type that its field has."""


@overload
def read_json(path: Path, kind: type[T], *, most: int = MOST) -> T: ...
@overload
def read_json(path: Path, kind: UnionType, *, most: int = MOST) -> Any: ...
def read_json(path: Path, kind: Any, *, most: int = MOST) -> Any:
    """Return the value in a JSON file of at most `most` bytes."""
    return parse_json(read_bytes(path, most), kind, path)


@overload
def parse_json(data: bytes, kind: type[T], where: object) -> T: ...
@overload
def parse_json(data: bytes, kind: UnionType, where: object) -> Any: ...
def parse_json(data: bytes, kind: Any, where: object) -> Any:
    """Return the value in a JSON text; `where` names it in errors.

    Of a key that is there twice, both values are checked and the last one holds.
    """
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise MalformedError(where, f"no UTF-8 text at byte {error.start}") from None
    if (deep := nesting(data)) > DEEPEST:
        raise MalformedError(where, f"brackets nested {deep} deep, at most {DEEPEST} may be")
    try:
        return _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise WrongTypeError(_told(error, where, kind)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        if b"\\ud" not in data.lower():
            raise MalformedError(where, shown(error)) from None
    return convert(_with_surrogates(data, where), kind, where)


def parse_loose_json(data: bytes, where: object) -> Any:
    """Return the plain value of another program's text, in which NaN and infinity are numbers."""
    if (deep := nesting(data)) > DEEPEST:
        raise MalformedError(where, f"brackets nested {deep} deep, at most {DEEPEST} may be")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of 5,000 digits
        raise MalformedError(where, shown(error)) from None


def read_lines(path: Path, kind: type[T]) -> list[tuple[T, int]]:
    """Return the values of a file of JSON lines, each with the byte position after its line.

    A last line that is no JSON, as a killed process leaves it, is left out, and so is text after
    the last line feed. Such damage before the end is an error, and a wrong type is one everywhere.
    """
    regular_file(path)
    found: list[tuple[T, int]] = []
    torn: GradveilError | None = None
    position = number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if torn is not None:
                    raise torn
                whole = line.endswith(b"\n")
                if not whole and len(line) <= LONGEST_LINE:
                    break
                position += len(line)
                try:
                    if len(line) > LONGEST_LINE:
                        raise MalformedError(
                            f"line {number}", f"longer than {LONGEST_LINE:,} bytes"
                        )
                    found.append(
                        (parse_json(line, kind, f"{shown(path)}, line {number}"), position)
                    )
                except MalformedError as error:
                    torn = GradveilError(
                        f"line {number} of {shown(path)} is damaged ({error.problem})"
                    )
    except OSError as error:
        raise GradveilError(f"cannot read {shown(path)}: {error.strerror or error}") from None
    return found


def read_toml(path: Path, kind: type[T], *, most: int = MOST_TOML) -> T:
    """Return the tables of a TOML file of at most `most` bytes."""
    data = read_bytes(path, most)
    try:
        text = data.decode()
        if (dots := max(line.count(".") for line in text.split("\n"))) > DOTS:
            raise MalformedError(path, f"a line with {dots:,} dots, at most {DOTS} may be")
        found = tomllib.loads(text)
    except MalformedError:
        raise
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, or a number of 5,000 digits
        raise MalformedError(path, f"no TOML file: {shown(error)}") from None
    if _too_deep(found):
        raise MalformedError(path, f"tables nested more than {DEEPEST} deep")
    return convert(found, kind, path)


@overload
def convert(value: object, kind: type[T], where: object) -> T: ...
@overload
def convert(value: object, kind: UnionType, where: object) -> Any: ...
def convert(value: object, kind: Any, where: object) -> Any:
    """Turn plain values, as a parser gives them, into the type; `where` names them in errors."""
    try:
        return msgspec.convert(value, kind)
    except UnicodeEncodeError:
        raise WrongTypeError(f"{shown(where)}: a text that is no UTF-8 is out of place") from None
    except (msgspec.ValidationError, RecursionError) as error:
        raise WrongTypeError(_told(error, where, kind)) from None


def check_format(found: object, known: str, where: object) -> None:
    """Refuse a file whose `format` is not the known one."""
    if found != known:
        raise GradveilError(
            f"{shown(where)}: its format is {shown(repr(found))}, expected {known!r}; make it "
            f"again with this version of gradveil, {__version__}"
        )


def written_by(found: Mapping[str, Any]) -> str:
    """Say such as `; gradveil 0.3.0 wrote it, this is 0.1.0`; empty unless another is named."""
    versions = found.get("versions")
    said = versions.get("gradveil") if isinstance(versions, Mapping) else found.get("gradveil")
    if not isinstance(said, str) or said == __version__:
        return ""
    return f"; gradveil {shown(said, 20)} wrote it, this is {__version__}"


def nesting(data: bytes) -> int:
    """Return how deep the brackets of a JSON text are nested; those in strings do not count."""
    if data.count(b"[") + data.count(b"{") <= DEEPEST:
        return 0
    depth = deepest = 0
    for token in _TOKENS.finditer(data):
        first = data[token.start()]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first in b"]}":
            depth -= 1
    return deepest


def _with_surrogates(data: bytes, where: object) -> Any:
    """Return the value of a text with half a surrogate pair, as a name that is no UTF-8 gives it.

    msgspec refuses such a text, and Python writes it.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise MalformedError(where, shown(error)) from None


@cache
def _decoder(kind: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)


def _told(error: Exception, where: object, kind: Any) -> str:
    """Put msgspec's words, such as ``Expected `int`, got `str` - at `$.images` ``, field first."""
    matched = _AT.fullmatch(str(error))
    problem, path = matched.groups() if matched else (str(error), None)
    field = (path or "").replace("`", "").replace("$.", "").replace("$", "")
    for pattern, words in _ABOUT_FIELD.items():
        if named := pattern.fullmatch(problem):
            choices = _fields(kind, field) if words == UNKNOWN else ""
            field, problem = f"{field}.{named[1]}".lstrip("."), words + choices
    problem = problem.replace("`", "")
    problem = problem[:1].lower() + problem[1:]
    return ": ".join(filter(None, (shown(where), shown(field), shown(problem))))


def _fields(kind: Any, path: str) -> str:
    """Say which fields there are at a path of a type, where they are few."""
    for name in filter(None, path.split(".")):
        kind = next((each.type for each in _fields_of(kind) if each.encode_name == name), None)
    names = [each.encode_name for each in _fields_of(kind)]
    return f"; choose from {', '.join(names)}" if 0 < len(names) <= CHOICES else ""


def _fields_of(kind: Any) -> "tuple[msgspec.structs.FieldInfo, ...]":
    known = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return msgspec.structs.fields(kind) if known else ()


def _too_deep(value: object) -> bool:
    level: Sequence[object] = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
