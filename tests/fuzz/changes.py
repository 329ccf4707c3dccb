"""Changes of files: values of other types, parts dropped or doubled, bytes cut or flipped."""

import copy
import json
from collections.abc import Callable
from typing import Any

Choose = Callable[[int], int]
"""A number below the one given."""

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**70, 0.5, -1e308, "", "text", "\n\x1b[31m", "x" * 10_000),
    *(
        [],
        {},
        [None],
        {"": None},
        [[[[[0]]]]],
        {"a": {"b": {"c": []}}},
        ["a", 1, None],
        "9" * 5_000,
    ),
)
RAW = (
    b"9" * 5_000,
    b"1e400",
    b"NaN",
    b"-Infinity",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
)
TOML = ("3", '"text"', "[1]", "9" * 5_000, "nan", "1979-05-27", "{a = 1}", "[" * 5_000, '"\\n"', "")


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys, the outermost first."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        outer = waiting.pop(0)
        for key in [*outer] if isinstance(outer, dict) else range(len(outer)):
            found.append((outer, key))
            if isinstance(outer[key], dict | list):
                waiting.append(outer[key])
    return found


def swapped(value: Any, choose: Choose) -> Any:
    """The tree with a part replaced, dropped, renamed, doubled or wrapped."""
    tree = [copy.deepcopy(value)]
    spots = places(tree)
    outer, key = spots[choose(len(spots))]
    match choose(6):
        case 0 if outer is not tree:
            del outer[key]
        case 1 if isinstance(outer, dict):
            outer[f"{key}x"] = outer.pop(key)
        case 2 if isinstance(outer, list) and outer is not tree:
            outer.append(outer[key])
        case 3:
            outer[key] = [outer[key]]
        case _:
            outer[key] = ODD[choose(len(ODD))]
    return tree[0]


def broken(data: bytes, choose: Choose) -> bytes:
    """The bytes cut, flipped, doubled or filled in between."""
    if not data:
        return RAW[choose(len(RAW))]
    start = choose(len(data))
    end = min(len(data), start + 1 + choose(40))
    match choose(5):
        case 0:
            return data[:start]
        case 1:
            return data[:start] + bytes([data[start] ^ (1 << choose(8))]) + data[start + 1 :]
        case 2:
            return data[:end] + data[start:]
        case 3:
            return data[:start] + data[end:]
        case _:
            return data[:start] + RAW[choose(len(RAW))] + data[end:]


def json_text(value: Any, choose: Choose) -> bytes:
    """A JSON text with a change of the tree, of a number, or of the bytes."""
    kind = choose(4)
    if kind == 0:
        return broken(json.dumps(value).encode(), choose)
    tree = swapped(value, choose)
    if kind == 1:
        tree = swapped(tree, choose)
    data = json.dumps(tree).encode()
    if kind == 2 and b": " in data:  # a value, or its key, in a way that no writer of JSON has
        parts = data.split(b": ")
        spot = 1 + choose(len(parts) - 1)
        parts[spot] = RAW[choose(len(RAW))] + parts[spot][1:]
        data = b": ".join(parts)
    return data


def toml_text(text: str, choose: Choose) -> bytes:
    lines = text.split("\n")
    spot = choose(len(lines))
    match choose(6):
        case 0:
            return broken(text.encode(), choose)
        case 1:
            del lines[spot]
        case 2:
            lines.insert(spot, lines[choose(len(lines))])
        case 3:
            lines[spot] = "a" + ".a" * 10 ** choose(6) + " = 1"
        case _:
            key = lines[spot].partition("=")[0]
            lines[spot] = f"{key}= {TOML[choose(len(TOML))]}"
    return "\n".join(lines).encode()
