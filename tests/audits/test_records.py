"""Records reach the disk whole; whatever a killed run tore off is cut away, and nothing else is."""

from dataclasses import replace
from pathlib import Path

import pytest

from gradveil.audits.records import Record, append, finite, read_records, recover
from gradveil.core.errors import GradveilError

SIZES = {("attack", "a", 0): 2, ("attack", "a", 1): 2}


def record(image: int) -> Record:
    names = ("mse", "psnr", "ssim", "psnr_affine", "over_blind")
    scores = {
        "used": dict.fromkeys(names, 12.5 + image) | {"rank": 1 + image},
        "original": dict.fromkeys(names, 8.0) | {"rank": 20},
    }
    return Record(
        "e",
        "attack",
        "a",
        image // 2,
        image,
        "ok",
        3,
        None,
        0.25,
        500,
        scores,
        0.1,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "records.jsonl"
    append(file, [record(0), record(1)])
    append(file, [record(2), record(3)])
    return file


def test_a_record_that_is_there_twice_is_refused(path: Path) -> None:
    append(path, [record(1)])
    for read in (read_records, lambda path: recover(path, SIZES)):
        before = path.read_bytes()
        with pytest.raises(GradveilError, match=r"line 5: image 1 of a is there twice.* line 2$"):
            read(path)
        assert path.read_bytes() == before


def test_what_was_written_is_read_back(path: Path) -> None:
    assert read_records(path) == [record(i) for i in range(4)] == recover(path, SIZES)


def test_a_file_torn_anywhere_keeps_its_whole_chunks_and_no_more(path: Path) -> None:
    whole = path.read_bytes()
    half = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    lines = [place + side for place, byte in enumerate(whole) if byte == 10 for side in (-1, 0, 1)]
    for end in (*range(0, len(whole), 37), *lines[:-1]):
        path.write_bytes(whole[:end])
        kept = recover(path, SIZES)
        assert kept == ([record(0), record(1)] if end >= half else [])
        assert path.read_bytes() == whole[: half if end >= half else 0]


def test_zeros_that_a_power_cut_left_are_cut_away(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 300)
    assert len(recover(path, SIZES)) == 4 and path.read_bytes() == whole


def test_damage_before_the_end_is_an_error_and_the_file_stays(path: Path) -> None:
    damaged = path.read_bytes().replace(b'"image": 1', b'"imag', 1)
    path.write_bytes(damaged)
    with pytest.raises(GradveilError, match=r"line 2 of .* is damaged"):
        recover(path, SIZES)
    assert path.read_bytes() == damaged


def test_a_record_that_does_not_belong_is_an_error(path: Path) -> None:
    append(path, [replace(record(0), attack="b")])
    with pytest.raises(GradveilError, match="attack b, chunk 0, out of place"):
        recover(path, SIZES)


def test_no_file_means_no_records(tmp_path: Path) -> None:
    assert recover(tmp_path / "none", SIZES) == [] == read_records(tmp_path / "none")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_json_never_holds_what_is_not_finite(path: Path, wrong: float) -> None:
    before = path.read_bytes()
    with pytest.raises(ValueError, match="Out of range float"):
        append(path, [replace(record(0), distance=wrong)])
    assert path.read_bytes() == before and finite(wrong) is None and finite(2.0) == 2.0


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GradveilError, match="cannot write"):
        append(tmp_path / "file" / "records.jsonl", [record(0)])
