"""Tables that fit the terminal: names are broken where they may be, numbers never, and a title takes the whole line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

BREAKS = (
    re.compile(r"(?<=[,:;] )"),
    re.compile(r"(?<=[,+ ])(?<!\de\+)"),  # not in 1e+06
    re.compile(
        r"(?<=[:=/_-])(?<!\de-)(?<![:=]-)"
    ),  # where the column is too narrow otherwise; not in 1e-06 or after a sign
    re.compile(r"(?=.)"),
)
"""Where a text may be broken, the best places first."""

WORD = 26  # letters: a longer one may be broken at the third kind of place
NARROWEST = 8


def broken(text: str, width: int, breaks: Sequence[re.Pattern[str]] = BREAKS) -> list[str]:
    """Its lines. A part that is too long for one is broken at the next kind of place."""
    lines = [""]
    for piece in breaks[0].split(text):
        if cell_len((lines[-1] + piece).rstrip()) <= width:
            lines[-1] += piece
        elif cell_len(piece.rstrip()) <= width or len(breaks) == 1:
            lines.append(piece)
        else:
            lines += broken(piece, width, breaks[1:])
    return [line.rstrip() for line in lines if line.strip()] or [""]


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
    """`gives`: the columns whose texts may be broken, in the order in which they give way to a narrow terminal, and the width that
    each keeps as long as another can give; after that the last gives first. The other columns hold numbers.
    """

    def __init__(self, heading: str, columns: Sequence[str], gives: Mapping[int, int]) -> None:
        super().__init__(*columns, box=SIMPLE_HEAD, show_edge=False, padding=0)
        self.heading, self.gives = heading, gives
        for place, column in enumerate(self.columns):
            column.no_wrap, column.justify = (
                place not in gives,
                "left" if place in gives else "right",
            )

    def row(self, *cells: str, style: str = "") -> None:
        self.add_row(
            *(Breakable(cell) if place in self.gives else cell for place, cell in enumerate(cells)),
            style=style,
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for place, width in self._widths(console, options).items():
            self.columns[place].width = width
        yield Text(
            "\n".join(broken(self.heading, options.max_width)),
            style="table.title",
            no_wrap=True,
            overflow="fold",
        )
        yield from super().__rich_console__(console, options)

    def _widths(self, console: Console, options: ConsoleOptions) -> dict[int, int]:
        """Of the columns that give way: what they would have, less what there is no room for."""
        sizes = [_measured(column, console, options) for column in self.columns]
        widths = {place: sizes[place].maximum for place in self.gives}
        least = {
            place: max(floor, min(sizes[place].minimum, WORD))
            for place, floor in self.gives.items()
        }
        fixed = sum(size.maximum for place, size in enumerate(sizes) if place not in self.gives)
        room = options.max_width - fixed - (len(sizes) - 1)
        last_resort = [(place, NARROWEST) for place in reversed(least)]
        for place, floor in [*least.items(), *last_resort]:
            over = max(0, sum(widths.values()) - room)
            widths[place] = max(min(widths[place], floor), widths[place] - over)
        return widths


def _measured(column: Column, console: Console, options: ConsoleOptions) -> Measurement:
    sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    return Measurement(max(size.minimum for size in sizes), max(size.maximum for size in sizes))
