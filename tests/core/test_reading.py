"""Whatever a file holds, reading it gives a value of its type or one line that names the file."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, to_builtins

from gradveil import __version__
from gradveil.core.errors import GradveilError
from gradveil.core.files import MissingFileError
from gradveil.core.formats import (
    KINDS,
    PoliciesFile,
    RecordLine,
    SearchFile,
    TrainedModel,
    TrialAttributes,
)
from gradveil.core.reading import (
    DEEPEST,
    LONGEST_LINE,
    MalformedError,
    WrongTypeError,
    check_format,
    convert,
    nesting,
    parse_json,
    read_json,
    read_lines,
    read_toml,
    written_by,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Inner(Struct):
    name: str


class Thing(Struct, forbid_unknown_fields=True):
    images: int
    parts: list[Inner] = []
    more: dict[str, Any] = {}


def saved(folder: Path, data: bytes) -> Path:
    (folder / "thing.json").write_bytes(data)
    return folder / "thing.json"


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = saved(tmp_path, b'{"images": 3, "parts": [{"name": "a"}], "more": {"x": [1, null]}}')
    assert read_json(path, Thing) == Thing(3, [Inner("a")], {"x": [1, None]})
    assert read_json(saved(tmp_path, b"null"), TrainedModel | None) is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"images": "3"}', "images: expected int, got str"),
        (b'{"images": 3.0}', "images: expected int, got float"),
        (b'{"images": true}', "images: expected int, got bool"),
        (b'{"images": 3, "parts": [{"name": 3}]}', r"parts\[0\].name: expected str, got int"),
        (b'{"images": 3, "parts": [{}]}', r"parts\[0\].name: missing"),
        (b"{}", "images: missing"),
        (b'{"images": 3, "extra": 1}', "extra: unknown field; choose from images, parts, more"),
        (b"[1]", "expected object, got array"),
        (b'{"images": ' + b"9" * 5000 + b"}", "images: integer value out of range"),
    ],
)
def test_a_wrong_type_names_the_file_and_the_field(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(WrongTypeError, match=rf"^{tmp_path}/thing.json: {says}$"):
        read_json(saved(tmp_path, data), Thing)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (b'{"images": 3', "truncated"),
        (b'{"images": NaN}', "invalid character"),
        (b'{"images": Infinity}', "invalid character"),
        (b'{"images": 3} x', "trailing characters"),
        (b'{"images": 3, "more": {"x": "\xff\xfe"}}', "no UTF-8 text at byte 29"),
        (b"\xff\xfe{\x00}\x00", "no UTF-8 text at byte 0"),
        (b'{"more": {"x": "\\ud800", "y": NaN}}', "NaN is no JSON"),
        (b'{"more": {"x": "\\ud800"}', "delimiter"),
        (b"[" * 100_000 + b"]" * 100_000, "nested 100000 deep"),
        (b'{"images": 3, "extra": ' + b"[" * 100_000, "nested 100001 deep"),
        (b'{"more": {"x": ' + b'{"a":' * 100 + b"1" + b"}" * 102, "nested 102 deep"),
    ],
)
def test_a_text_that_is_no_json_is_one_line(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(MalformedError, match=says) as caught:
        read_json(saved(tmp_path, data), Thing)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/thing.json: ") and "\n" not in text and len(text) < 400


def test_a_name_that_is_no_utf8_comes_back_as_python_wrote_it(tmp_path: Path) -> None:
    plain = {"images": 3, "more": {"x": os.fsdecode(b"a\xff")}}
    path = saved(tmp_path, json.dumps(plain).encode())
    assert read_json(path, Thing).more == plain["more"]
    with pytest.raises(WrongTypeError, match="a text that is no UTF-8 is out of place"):
        read_json(saved(tmp_path, json.dumps(plain | {"images": "\udcff"}).encode()), Thing)


def test_nesting_counts_no_brackets_in_strings() -> None:
    assert nesting(b"[" * 70 + b"]" * 70) == 70
    text = json.dumps({"a": ["[" * 100, '"{' * 50, "\\"], "b": {"c": "}" * 9}}).encode()
    assert nesting(text) == 2 and parse_json(text, dict[str, Any], "x")["b"] == {"c": "}" * 9}
    assert nesting(b'"' + b'\\"[' * 200_000) == 0  # a string without an end takes no time


@pytest.mark.parametrize("depth", [DEEPEST, DEEPEST + 1])
def test_brackets_may_be_nested_so_deep_and_no_deeper(depth: int) -> None:
    data = b"[" * depth + b"]" * depth
    if depth > DEEPEST:
        with pytest.raises(MalformedError, match=f"nested {depth} deep"):
            parse_json(data, list[Any], "x")
    else:
        assert parse_json(data, list[Any], "x") == json.loads(data)


def test_a_field_with_odd_letters_cannot_break_the_line(tmp_path: Path) -> None:
    name = "a\nb\x1b[31m" + "x" * 10_000
    path = saved(tmp_path, json.dumps({"images": 3, name: 1}).encode())
    with pytest.raises(WrongTypeError, match="unknown field") as caught:
        read_json(path, Thing)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1_000


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_what_is_no_regular_file_is_refused_and_not_opened(tmp_path: Path, fifo: Path) -> None:
    for path, kind in (
        (fifo, "a FIFO"),
        (Path("/dev/zero"), "a device"),
        (tmp_path, "a folder"),
    ):
        for read in (read_json, read_lines, read_toml):
            with pytest.raises(GradveilError, match=rf"cannot read {path}: it is {kind}"):
                read(path, dict[str, Any])
    with pytest.raises(MissingFileError, match="no file at"):
        read_json(tmp_path / "none", Thing)
    with pytest.raises(MissingFileError, match="no file at"):
        read_json(fifo / "below", Thing)
    for name in ("x" * 10_000, "x\0y"):
        with pytest.raises(GradveilError, match=r"cannot read .*(too long|null)") as caught:
            read_json(tmp_path / name, Thing)
        assert len(str(caught.value)) < 500


def test_a_file_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, b'{"images": 3}')
    assert read_json(path, Thing, most=13).images == 3
    with pytest.raises(GradveilError, match="it has 13 bytes, at most 12"):
        read_json(path, Thing, most=12)
    with pytest.raises(GradveilError, match="more than 100 bytes"):  # of no size, by its state
        read_json(Path("/proc/self/smaps"), Thing, most=100)


LINES = b'{"name": "a"}\n{"name": "b"}\n'


@pytest.mark.parametrize(
    "tail", [b"", b"{", b'{"name": "c"}', b"\0" * 300, b'{"na\n', b"\xff\n", b"[" * 200 + b"\n"]
)
def test_a_torn_last_line_is_left_out(tmp_path: Path, tail: bytes) -> None:
    found = read_lines(saved(tmp_path, LINES + tail), Inner)
    assert found == [(Inner("a"), 14), (Inner("b"), 28)]


@pytest.mark.parametrize("line", [b'{"na\n', b"\xff\n", b"\n", b"x" * (LONGEST_LINE + 10) + b"\n"])
def test_a_damaged_line_before_the_end_is_an_error(tmp_path: Path, line: bytes) -> None:
    path = saved(tmp_path, LINES + line + LINES)
    with pytest.raises(GradveilError, match=rf"^line 3 of {path} is damaged \("):
        read_lines(path, Inner)


@pytest.mark.parametrize("tail", [b"", b'{"name": "c"}\n'])
def test_a_wrong_type_in_a_line_is_an_error_wherever_it_stands(tmp_path: Path, tail: bytes) -> None:
    path = saved(tmp_path, LINES + b'{"name": 3}\n' + tail)
    with pytest.raises(WrongTypeError, match=rf"^{path}, line 3: name: expected str, got int$"):
        read_lines(path, Inner)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("best = ", "Invalid value"),
        (f"best = {'9' * 5000}", "4300 digits"),
        (f"x = {'[' * 100_000}", "recursion|nested|Exceeded"),
        ("a" + ".a" * 100_000 + " = 1", "a line with 100,000 dots, at most 200"),
        ("a" + ".a" * 150 + " = 1", "tables nested more than 64 deep"),
        ("x = '\udcff'", "utf-8"),
        ("best = 3\n[[policy]]\npolicy = '3'", "best: expected str, got int"),
        ("best = '3'\npolicy = []", "policy: expected array of length >= 1"),
        ("best = 1979-05-27\n[[policy]]\npolicy = '3'", "best: expected str, got date"),
    ],
)
def test_a_file_that_is_no_toml_or_another_is_one_line(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(GradveilError, match=says) as caught:
        read_toml(path, PoliciesFile)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 500


def test_formats_and_versions_are_told() -> None:
    check_format("gradveil audit 2", "gradveil audit 2", "x")
    with pytest.raises(GradveilError) as caught:
        check_format("gradveil audit 3", "gradveil audit 2", "x")
    assert str(caught.value) == (
        "x: its format is 'gradveil audit 3', expected 'gradveil audit 2'; make it again with this "
        f"version of gradveil, {__version__}"
    )
    assert written_by({"versions": {"gradveil": "9"}}) == (
        f"; gradveil 9 wrote it, this is {__version__}"
    )
    for same in ({}, {"versions": 3}, {"gradveil": __version__}, {"versions": {"gradveil": 3}}):
        assert written_by(same) == ""


def test_a_record_that_is_ok_needs_its_scores() -> None:
    path = next(RESULTS.glob("grids/*/*/records.jsonl"))
    plain = json.loads(path.read_bytes().split(b"\n")[0])
    assert convert(plain | {"status": "failed: x", "scores": {}}, RecordLine, "x").scores
    with pytest.raises(WrongTypeError, match="x: scores: used and original are needed"):
        convert(plain | {"scores": {}}, RecordLine, "x")


def test_every_kept_record_reads_and_is_written_as_it_was() -> None:
    for pattern in ("grids/**/*.jsonl", "searches/**/*.jsonl", "audits/*.jsonl"):
        paths = [*RESULTS.glob(pattern)]
        assert paths, pattern
        for path in paths:
            found = read_lines(path, RecordLine)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            later = ("update", "chance", "certain")  # which not every format or attack has
            plain = [
                {k: v for k, v in to_builtins(record).items() if v is not None or k not in later}
                for record, _ in found
            ]
            assert found and plain == lines, path


def test_every_kept_file_of_settings_models_and_policies_is_readable() -> None:
    kinds = set()
    for path in RESULTS.rglob("settings.json"):
        found = read_json(path, dict[str, Any])
        mark = next(mark for mark in KINDS if mark in found)
        convert(found, KINDS[mark][1], path)
        kinds.add(mark)
    models = [read_json(path, TrainedModel | None) for path in RESULTS.rglob("model.json")]
    policies = [read_toml(path, PoliciesFile) for path in RESULTS.rglob("policies.toml")]
    assert kinds >= {"cases", "attacks"}
    assert None in models and any(model is not None for model in models)
    assert policies and all(one.best == one.policy[0].policy for one in policies)


def test_results_and_attributes_of_searches_have_types() -> None:
    quantity = {"mean": 1.0, "error": None, "n": 3}
    trial = {"number": 0, "policy": "3-1-7", "state": "scored", "quantities": {"ssim": quantity}}
    plain: dict[str, Any] = {
        "format": "gradveil search 1",
        "settings": {"data": "x"},
        "trials": [trial],
        "kept": [0],
        "front": [],
        "best": "3-1-7",
        "hybrid": None,
        "no_hybrid": "one policy",
        "saving": {"dropped": 1, "scored": 2, "all": 3, "unjudged": 0, "share": 0.5},
        "notes": [],
        "study": "gradveil",
        "storage": "x",
        "confirmed": {"untrained": {"none": "none"}},
        "words": [],
    }
    assert convert(plain, SearchFile, "x").trials[0].quantities["ssim"].n == 3
    with pytest.raises(WrongTypeError, match=r"x: trials\[0\].number: expected int >= 0"):
        convert(plain | {"trials": [trial | {"number": -1}]}, SearchFile, "x")
    result = {"state": "scored", "values": {"ssim": [0.5]}}
    convert({"owner": "a", "policy": "none", "result": result, "nsga2:x": 1}, TrialAttributes, "x")
    with pytest.raises(WrongTypeError, match=r"x: result\.state: missing"):
        convert({"result": {"values": {}}}, TrialAttributes, "x")


@pytest.fixture(autouse=True)
def within_a_minute() -> Iterator[None]:
    """A test that waits for a FIFO would wait for ever: end it loudly."""
    timer = threading.Timer(60, os._exit, (1,))
    timer.start()
    yield
    timer.cancel()
