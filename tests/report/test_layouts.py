"""Texts are broken where they may be and lose nothing; tables take the room that there is."""

import io
import re

import pytest
from rich.console import Console

from gradveil.report.layout import Fitted, broken

TEXTS = (
    "prune-feedback:0.99",
    "gaussian:0.001,then,prune:0.95",
    "dp:norm=1,multiplier=1.1,sample_rate=0.0128",
    "clip:1e+06,then,laplacian:1e-06",
    "3-1-7+43-18-18,then,gaussian:1e-05, clean gradient",
    "invert(7)-translate_x(9)-contrast(2)+rotate(3)-shear_y(5)",
    "lenet on fashion-mnist, defense none, labels known, seed 0",
    "",
)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [9, 12, 18, 24, 80])
def test_lines_fit_lose_nothing_and_cut_no_number(text: str, width: int) -> None:
    lines = broken(text, width)
    assert max(map(len, lines)) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert [number for line in lines for number in NUMBER.findall(line)] == NUMBER.findall(text)


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("prune-feedback:0.99", 18, ["prune-feedback:", "0.99"]),
        ("dp:norm=1,multiplier=1.1", 18, ["dp:norm=1,", "multiplier=1.1"]),
        ("3-1-7+43-18-18", 10, ["3-1-7+", "43-18-18"]),
        ("none, labels known, seed 0", 23, ["none, labels known,", "seed 0"]),
        ("without_a_break_anywhere", 10, ["without_a_", "break_", "anywhere"]),
        ("abcdefgh", 3, ["abc", "def", "gh"]),
        (" + gaussian noise 0.001", 24, [" + gaussian noise 0.001"]),
    ],
)
def test_the_best_places_to_break_come_first(text: str, width: int, lines: list[str]) -> None:
    assert broken(text, width) == lines


def shown(table: Fitted, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def table() -> Fitted:
    made = Fitted(
        "A title that is longer than its table, seed 0",
        ("defense", "attacker", "dB"),
        {0: 4, 1: 11},
    )
    made.row("prune:0.95,then,clip:1", "adam-cosine [x]", "12.5")
    return made


def test_a_table_takes_the_room_it_needs_and_its_title_the_whole_line(table: Fitted) -> None:
    title, _, _, row = shown(table, 60)
    assert (
        title == "A title that is longer than its table, seed 0"
        and row == "prune:0.95,then,clip:1 adam-cosine [x] 12.5"
    )


def test_the_first_column_gives_way_then_the_next_and_numbers_never(table: Fitted) -> None:
    assert shown(table, 34)[-2:] == ["prune:0.95,   adam-cosine [x] 12.5", "then,clip:1"]
    assert shown(table, 28)[-2:] == ["prune:0.95, adam-cosine 12.5", "then,clip:1 [x]"]
    assert all("12.5" in "".join(shown(table, width)) for width in (22, 24, 26))
    assert (
        shown(table, 60)[-1] == "prune:0.95,then,clip:1 adam-cosine [x] 12.5"
    )  # a table can be shown again, wider


def test_extras_are_left_out_in_their_order_before_texts_are_squeezed_further() -> None:
    made = Fitted("Title", ("name", "n", "rare", "p"), {0: 6}, extras=(2, 1))
    made.row("dlg of two", "16", "0.25", "0.001")
    assert shown(made, 24)[1].split() == ["name", "n", "rare", "p"]
    assert shown(made, 20)[-2:] == ["dlg of 16 0.25 0.001", "two"]
    assert shown(made, 19)[-1].split() == ["dlg", "of", "two", "16", "0.001"]
    assert shown(made, 12)[-2].split() == ["dlg", "of", "0.001"]
    assert shown(made, 24)[-1] == "dlg of two 16 0.25 0.001"  # wider again, it is whole


def test_a_table_that_tells_names_what_there_was_no_room_for() -> None:
    made = Fitted("Title", ("name", "n", "rare", "p"), {0: 6}, extras=(2, 1), tells=True)
    made.row("dlg of two", "16", "0.25", "0.001")
    assert shown(made, 24)[-1] == "dlg of two 16 0.25 0.001"
    assert shown(made, 12)[-2:] == ["no room for", "n; rare"]
