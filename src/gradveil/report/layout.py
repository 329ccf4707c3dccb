"""Tables that fit the terminal: names are broken into lines, numbers never."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from gradveil.core.text import on_one_line

BREAKS = (
    re.compile(r"(?<=[,:;] )"),
    re.compile(r"(?<=[,+ ])(?<!\de\+)"),  # not in 1e+06
    # Where the column is too narrow otherwise; not in 1e-06 or after a sign.
    re.compile(r"(?<=[:=/_-])(?<!\de-)(?<![:=]-)"),
    re.compile(r"(?=.)"),
)
"""Positions where a text may be broken, the best first."""

WORD = 26  # letters: a longer word may be broken at the third kind of position
NARROWEST = 8


def broken(text: str, width: int) -> list[str]:
    """Break a text into lines; a piece wider than a line is broken at the next kind of position."""
    return [line.rstrip() for line in _broken(text, width, BREAKS) if line.strip()] or [""]


def _broken(text: str, width: int, breaks: Sequence[re.Pattern[str]]) -> list[str]:
    """Return the lines with the spaces that they end with, which another piece may follow."""
    lines = [""]
    for piece in breaks[0].split(text):
        if cell_len((lines[-1] + piece).rstrip()) <= width:
            lines[-1] += piece
        elif cell_len(piece.rstrip()) <= width or len(breaks) == 1:
            lines.append(piece)
        else:
            lines += _broken(piece, width, breaks[1:])
    return lines


@dataclass(frozen=True)
class Breakable:
    """A cell of one or more lines."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [line for part in self.text.split("\n") for line in broken(part, options.max_width)]
        yield Text("\n".join(lines), no_wrap=True, overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        pieces = [
            piece.rstrip() for line in self.text.split("\n") for piece in BREAKS[1].split(line)
        ]
        return Measurement(max(map(cell_len, pieces)), max(map(cell_len, self.text.split("\n"))))


class Fitted(Table):
    """A table that gives way to a narrow terminal, with a heading as wide as the terminal.

    `gives` are the columns whose texts may be broken, in the order in which they give way, each
    with the width that it keeps as long as another can give; after that the last gives first. The
    other columns hold numbers. Of these `extras` are left out, the first of them first, where the
    table would not fit with all texts at the widths that they keep; a line below names them if the
    table `tells`.
    """

    def __init__(
        self,
        heading: str,
        columns: Sequence[str],
        gives: Mapping[int, int],
        extras: Sequence[int] = (),
        *,
        tells: bool = False,
    ) -> None:
        super().__init__(*columns, box=SIMPLE_HEAD, show_edge=False, padding=0)
        self.heading, self.gives, self.extras = on_one_line(heading), gives, extras
        self.tells = tells
        for index, column in enumerate(self.columns):
            column.no_wrap = index not in gives
            column.justify = "left" if index in gives else "right"

    def row(self, *cells: str | Sequence[str], style: str = "") -> None:
        """Add a row of texts; a cell of several lines is a list of them.

        A name within a text cannot add lines, nor send a terminal codes.
        """
        texts = [
            on_one_line(cell) if isinstance(cell, str) else "\n".join(map(on_one_line, cell))
            for cell in cells
        ]
        self.add_row(
            *(
                Breakable(text) if index in self.gives else Text(text)
                for index, text in enumerate(texts)
            ),
            style=style,
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sizes = [_measured(column, console, options) for column in self.columns]
        left_out = self._left_out(sizes, options.max_width)
        fixed = [
            size.maximum
            for index, size in enumerate(sizes)
            if index not in self.gives and index not in left_out
        ]
        room = options.max_width - sum(fixed) - (len(sizes) - len(left_out) - 1)
        for index, width in self._widths(sizes, room).items():
            self.columns[index].width = width
        yield _lines(self.heading, options, "table.title")
        whole = self.columns
        self.columns = [column for index, column in enumerate(whole) if index not in left_out]
        try:
            yield from super().__rich_console__(console, options)
        finally:
            self.columns = whole  # a table can be shown again, wider
        if self.tells and left_out:
            heads = "; ".join(str(whole[index].header) for index in sorted(left_out))
            yield _lines(f"no room for {heads}", options, "dim")

    def _left_out(self, sizes: Sequence[Measurement], width: int) -> set[int]:
        """Return the extras that there is no room for."""
        least = self._least(sizes)
        widths = [
            min(size.maximum, least.get(index, size.maximum)) for index, size in enumerate(sizes)
        ]
        over = sum(widths) + len(widths) - 1 - width
        left_out: set[int] = set()
        for index in self.extras:
            if over > 0:
                left_out.add(index)
                over -= widths[index] + 1
        return left_out

    def _least(self, sizes: Sequence[Measurement]) -> dict[int, int]:
        """Return the widths that the columns of texts keep as long as another can give."""
        return {
            index: max(floor, min(sizes[index].minimum, WORD))
            for index, floor in self.gives.items()
        }

    def _widths(self, sizes: Sequence[Measurement], room: int) -> dict[int, int]:
        """Return the widths of the columns that give way, as far as there is no room for all."""
        widths = {index: sizes[index].maximum for index in self.gives}
        least = self._least(sizes)
        last_resort = [(index, NARROWEST) for index in reversed(least)]
        for index, floor in [*least.items(), *last_resort]:
            over = max(0, sum(widths.values()) - room)
            widths[index] = max(min(widths[index], floor), widths[index] - over)
        return widths


def _lines(text: str, options: ConsoleOptions, style: str) -> Text:
    lines = "\n".join(broken(text, options.max_width))
    return Text(lines, style=style, no_wrap=True, overflow="fold")


def _measured(column: Column, console: Console, options: ConsoleOptions) -> Measurement:
    sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    return Measurement(max(size.minimum for size in sizes), max(size.maximum for size in sizes))
