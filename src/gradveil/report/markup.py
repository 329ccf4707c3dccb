"""HTML as values: every text is escaped unless it was made here."""

import html
import json
import re
from collections.abc import Iterable
from typing import Any

from gradveil.core.text import on_one_line

VOID = ("meta", "img", "input", "br", "link")
SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


class Html(str):
    """A text that is HTML already, and is not escaped again."""

    __slots__ = ()


def escaped(text: object) -> Html:
    """Return a text as HTML shows it; letters that show nothing become escapes such as `\\x1b`."""
    return text if isinstance(text, Html) else Html(html.escape(on_one_line(text)))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element with escaped children and attributes; None and False are left out.

    `class_` stands for `class`, `data_kind` for `data-kind`; True is an attribute without a value.
    """
    words = [name]
    for key, value in attributes.items():
        written = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(written)
        elif value is not None and value is not False:
            words.append(f'{written}="{escaped(value)}"')
    start = f"<{' '.join(words)}>"
    return Html(start if name in VOID else f"{start}{joined(children)}</{name}>")


def breakable(text: object) -> Html:
    """Return a name that a browser may break after commas and joints, not within its words."""
    return joined(re.split(r"(?<=[,+:;/])", on_one_line(text)), "<wbr>")


def prose(text: str) -> Html:
    """Return a sentence whose `parts between backticks` are code."""
    parts = re.split(r"`([^`]+)`", text)
    return joined(element("code", part) if n % 2 else part for n, part in enumerate(parts))


def joined(parts: Iterable[object], between: str = "") -> Html:
    """Return the parts one after another; None is left out."""
    return Html(between.join(escaped(part) for part in parts if part is not None))


def scrolled(table: Html, label: str, kind: str = "scroll") -> Html:
    """Return a table in a region that scrolls where the page is narrow, by keys too."""
    return element("div", table, class_=kind, tabindex="0", role="region", aria_label=label)


def data_block(name: str, value: Any) -> Html:
    """Return JSON in an element that no browser runs, and that no text within can end."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).translate(SCRIPT)
    return Html(f'<script type="application/json" id="{escaped(name)}">{text}</script>')
