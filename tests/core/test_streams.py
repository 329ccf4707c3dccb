"""Text from outside stays in its line, and is printed on every stream as far as it can be."""

import io

import pytest

from gradveil.core.streams import HANDLER, OutputLostError
from gradveil.core.text import SafeConsole, on_one_line, printable, shortened
from gradveil.report.layout import Fitted


def test_letters_that_a_stream_lacks_are_spelled_or_escaped() -> None:
    text = "1.5 ± 0.2 ≤ … \udcff\u4e2d"
    assert text.encode("ascii", HANDLER) == rb"1.5 +- 0.2 <= ... \udcff\u4e2d"
    assert "± \udcff".encode("utf-8", HANDLER) == "± ".encode() + rb"\udcff"


def test_a_name_stays_in_its_line() -> None:
    assert printable("a\nb\x1b[31m\u202e") == "a\nb\\x1b[31m\\u202e"
    assert on_one_line("a\nb\rc\x9b") == r"a\nb\rc\x9b"
    assert shortened("abcdef", 6) == "abcdef" and shortened("abcdefgh", 4) == "ab...gh"


def test_a_name_adds_no_lines_to_a_table() -> None:
    table = Fitted("of x\nerror: none", ("name", "n"), {0: 8})
    table.row("a\nerror: b\x1b[2J", "1")
    table.row(["first", "second\x07"], "2")
    text = io.StringIO()
    SafeConsole(file=text, width=60).print(table)
    lines = [line.strip() for line in text.getvalue().splitlines()]
    assert not any(line.startswith("error") for line in lines)
    assert r"of x\nerror: none" in lines and "first" in lines[-2] and r"second\x07" in lines[-1]


def test_a_lost_output_says_whether_its_reader_left() -> None:
    assert OutputLostError(BrokenPipeError(32, "Broken pipe")).gone
    full = OutputLostError(OSError(28, "No space left on device"))
    assert not full.gone and "cannot print the result: No space left on device" in str(full)


@pytest.mark.parametrize("text", ["", "plain", "\u4e2d\u6587", "é", "emoji \U0001f600"])
def test_what_can_be_printed_is_left_as_it_is(text: str) -> None:
    assert printable(text) == on_one_line(text) == text
