"""gradveil policy show: the list, the picture, and what it refuses."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

HYBRID = "3-1-7+43-18-18"


def test_a_hybrid_is_listed_as_two_policies_of_three_named_transformations(gradveil: Any) -> None:
    result = gradveil(f"policy show {HYBRID} --json").result
    assert result["policy"] == HYBRID and result["picture"] is None
    listed = [
        [(t["index"], t["name"], t["magnitude"]) for t in policy] for policy in result["policies"]
    ]
    assert listed == [
        [(3, "translate_x", 9), (1, "contrast", 6), (7, "translate_y", 2)],
        [(43, "translate_y", 3), (18, "contrast", 7), (18, "contrast", 7)],
    ]
    first = result["policies"][0][0]
    assert (
        first["value"] == pytest.approx(150 / 331)
        and first["random_sign"] is True
        and first["means"]
    )


def test_named_transformations_have_no_library_number(gradveil: Any) -> None:
    result = gradveil("policy show rotate(2)-invert(0) --json").result
    assert [(t["index"], t["name"], t["random_sign"]) for t in result["policies"][0]] == [
        (None, "rotate", False),
        (None, "invert", False),
    ]


def test_no_policy_is_an_empty_list(gradveil: Any) -> None:
    assert gradveil("policy show none --json").result["policies"] == [[]]


def test_people_get_a_table(gradveil: Any) -> None:
    outcome = gradveil(f"policy show {HYBRID}")
    assert (
        outcome.status == 0 and "translate_x(9)" in outcome.shown and "contrast(7)" in outcome.shown
    )


def test_a_number_out_of_range_is_told_with_the_range(gradveil: Any) -> None:
    assert gradveil("policy show 3-99").error == (
        "policy '3-99': transformation 99 is out of range: "
        "choose 0 to 49, or a name such as translate_x(9)"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3-",
        "+",
        "3+",
        "x",
        "3-1-7-8",
        "foo(3)",
        "rotate(12)",
        "rotate",
        "3.5",
        "3 1",
        "³",
        "none-3",
    ],
)
def test_a_policy_that_cannot_be_read_is_one_line_that_quotes_it(gradveil: Any, text: str) -> None:
    assert gradveil("policy show", "--json", "--", text).error.startswith(f"policy {text!r}: ")


@pytest.mark.parametrize(
    ("mode", "size"),
    [("RGB", (40, 30)), ("L", (9, 9)), ("RGBA", (20, 20)), ("P", (20, 20)), ("1", (20, 20))],
)
def test_a_picture_of_any_kind_is_drawn_on(
    gradveil: Any, tmp_path: Path, mode: str, size: tuple[int, int]
) -> None:
    Image.new(mode, size).save(tmp_path / "photo.png")
    outcome = gradveil("policy show 3-1-7 --image photo.png --out new/policy.png --json")
    assert outcome.result["picture"] == "new/policy.png"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["policy.png"]
    with Image.open(tmp_path / "new" / "policy.png") as drawn:
        assert drawn.format == "PNG" and drawn.width > drawn.height


def test_without_an_image_an_embedded_one_is_drawn_on_and_the_seed_decides(
    gradveil: Any, tmp_path: Path
) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert gradveil(f"policy show {HYBRID} --seed {seed} --out {name}.png").status == 0
    first, again, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first == again != other


def test_an_image_without_a_place_for_the_drawing_is_refused(gradveil: Any) -> None:
    assert (
        gradveil("policy show 3 --image photo.png").error
        == "--image needs --out, the file to draw into"
    )


@pytest.mark.parametrize("name", ["notes.txt", "missing.png", "folder", "half.png", "empty.png"])
def test_an_image_that_is_none_is_named_and_nothing_is_drawn(
    gradveil: Any, tmp_path: Path, name: str
) -> None:
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.png").touch()
    Image.effect_noise((60, 60), 50).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:1_500])
    assert name in gradveil(f"policy show 3 --image {name} --out policy.png").error
    assert not (tmp_path / "policy.png").exists()


@pytest.mark.parametrize("out", ["folder", "file/policy.png"])
def test_a_place_that_cannot_be_drawn_into_is_told(gradveil: Any, tmp_path: Path, out: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert f"cannot write {out}: " in gradveil(f"policy show 3 --out {out}").error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_drawing_that_does_not_fit_on_the_disk_leaves_nothing(
    gradveil: Any, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1_000, before[1])
    )  # as a full disk: the write ends half way
    try:
        outcome = gradveil("policy show 3 --out policy.png")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write policy.png: File too large" in outcome.error
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_told(gradveil: Any, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert (
        "cannot write locked/policy.png: Permission denied"
        in gradveil("policy show 3 --out locked/policy.png").error
    )
