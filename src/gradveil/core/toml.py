"""Values written as TOML; `core.reading.read_toml` reads them back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def toml_lines(values: Mapping[str, Any]) -> str:
    """Return a line `name = value` for each; TOML has no null, so None is left out."""
    return "".join(f"{_key(k)} = {toml_value(v)}\n" for k, v in values.items() if v is not None)


def toml_value(value: Any) -> str:
    """Return a text, number, flag, list or table (inline) as TOML."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case Mapping():
            pairs = (f"{_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None)
            return "{" + ", ".join(pairs) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case _:
            return _text(str(value))


def toml_list(name: str, values: Sequence[str]) -> str:
    """Return a list of texts with a line for each."""
    lines = "".join(f"    {toml_value(value)},\n" for value in values)
    return f"{_key(name)} = [\n{lines}]\n"


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("_", "a").replace("-", "a").isalnum()
    return name if plain else _text(name)


def _text(text: str) -> str:
    """Return a TOML string: a JSON string, but for the character 7F and half letters."""
    whole = text.encode(errors="backslashreplace").decode()
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")
