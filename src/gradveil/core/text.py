"""Text from outside: made safe to print or to show in a notebook, and numbers read from it."""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

N = TypeVar("N", int, float)


def printable(text: str) -> str:
    r"""Return the text with every character that shows nothing written as an escape, such as \x1b.

    A terminal would obey some of them: they move the cursor, change the window's title or reverse
    the direction of writing. Line ends are kept.
    """
    if text.replace("\n", "").isprintable():  # nearly always, and much quicker than by letters
        return text
    return "".join(
        letter if letter == "\n" or letter.isprintable() else _escaped(letter) for letter in text
    )


def on_one_line(text: object) -> str:
    r"""Return the text `printable` with its line ends as \n, so that a name stays in its line."""
    return printable(str(text)).replace("\n", r"\n")


def shortened(text: str, longest: int) -> str:
    """Return the text, or its beginning and end where it has more letters than `longest`."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}...{text[-(longest // 2) :]}"


def as_html(text: str) -> str:
    """Return the text on one line, so that HTML shows it as it is."""
    return html.escape(on_one_line(text))


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """Return a table for a notebook."""
    named = f"<caption>{as_html(caption)}</caption>" if caption else ""
    lines = [_html_row("th", heads), *(_html_row("td", cells) for cells in rows)]
    return f"<table>{named}{''.join(lines)}</table>"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{as_html(cell)}</{tag}>" for cell in cells) + "</tr>"


def read_number(text: str, kind: type[N]) -> N:
    """Read a number that a user writes: digits 0 to 9, nothing that only Python knows.

    Python also takes `1_000` and the digits of every script. ValueError: it is no number.
    """
    if not re.fullmatch(r"[+-]?([0-9.]+([eE][+-]?[0-9]+)?|inf|nan)", text.strip()):
        raise ValueError(f"{text!r} is no number")
    return kind(text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii")


class SafeConsole(Console):
    """Prints text and tables with their own characters made `printable`; styles stay."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Give the pieces of text that a renderable is printed as."""
        for piece in super().render(renderable, options):
            text, style, control = piece
            yield piece if control else Segment(printable(text), style)
