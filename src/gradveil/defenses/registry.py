"""The list of defenses, and defenses as text: `prune:0.95`, a policy, `my.module:Class(4)`.

Text is for command lines and callers. A user's own class is imported because they name it, so text
that was read from a file must never be parsed here.
"""

import ast
import inspect
import re
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from gradveil.core.boundary import check_shown
from gradveil.core.errors import GradveilError, kind_of, one_line, unknown
from gradveil.core.importing import RAISED, current_folder_importable, import_named
from gradveil.core.text import read_number
from gradveil.defenses.base import Defense
from gradveil.defenses.chain import THEN, chain, check_length
from gradveil.defenses.dpsgd import DPSGD, Clipping
from gradveil.defenses.dropout import DropoutDefense
from gradveil.defenses.noise import GaussianNoise, LaplacianNoise
from gradveil.defenses.policies import PolicyDefense, RandomPolicies
from gradveil.defenses.precode import Precode
from gradveil.defenses.pruning import FeedbackPruning, Pruning
from gradveil.defenses.soteria import Soteria
from gradveil.transforms import Policy

KINDS: tuple[type[Defense], ...] = (
    Defense,
    PolicyDefense,
    RandomPolicies,
    Pruning,
    FeedbackPruning,
    GaussianNoise,
    LaplacianNoise,
    Clipping,
    DPSGD,
    Soteria,
    Precode,
    DropoutDefense,
)
REGISTRY: dict[str, type[Defense]] = {kind.name: kind for kind in KINDS}
TYPES = {
    bool: "yes or no",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Policy: "a policy",
}
OWN = "package.module:Class(...)"
LONGEST = 2_000  # letters of a user's own defense


def assessed_defenses() -> tuple[Defense, ...]:
    """Return each defense that declares a sensible setting for an assessment, with that setting."""
    # A class that is made from another has its setting too: each counts once.
    texts = dict.fromkeys(kind.assessed for kind in KINDS if kind.assessed is not None)
    return tuple(map(parse, texts))


def as_defense(given: "Defense | Policy | str", name: str = "defense") -> Defense:
    """Return a defense itself, or the one that a policy or a text stands for.

    `name` is the argument's, for messages.
    """
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, Policy):
        return PolicyDefense(given)
    if isinstance(given, Defense):
        return given
    example = "Pruning(0.95)"
    if isinstance(given, type) and issubclass(given, Defense):
        example = f"{given.__name__}(...)"
    raise GradveilError(
        f"{name}: {kind_of(given)}; expected a Defense, such as {example}, or its text, such as "
        "prune:0.95"
    )


def parse(text: str) -> Defense:
    """Read `3-1-7+43-18-18`, `prune:0.95`, `clip:1,then,my.module:Class(4)`, or `none`."""
    parts = [part.strip() for part in text.split(THEN)]
    check_length(len(parts))
    return chain([_parsed(part) for part in parts])


def _parsed(text: str) -> Defense:
    name, _, settings = text.partition(":")
    is_file = re.search(r"\.toml(:|$)", text) is not None
    if not is_file and any(letter.isdigit() and not letter.isascii() for letter in text):
        raise GradveilError(f"defense {text!r}: write its digits as 0 to 9")
    if name in REGISTRY:
        return _made(REGISTRY[name], settings, text)
    if not is_file and re.match(r"[^\W\d][\w.]*:[^\W\d][\w.]*\s*(\(|$)", text):
        return _own(text)
    if is_file or re.match(r"\d|[a-z_]+\(", text):
        return PolicyDefense(policy=Policy.find(text))
    raise unknown("defense", name, (*REGISTRY, "a policy such as 3-1-7", "PATH.toml", OWN))


def _own(text: str) -> Defense:
    """Make a defense of a user's own class from `package.module:Class(literals)`."""
    module, _, call = text.partition(":")
    if len(text) > LONGEST:
        raise GradveilError(f"defense {text[:40]!r}...: a text of more than {LONGEST:,} letters")
    try:
        read = ast.parse(call, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise GradveilError(f"defense {text!r} cannot be read: write {OWN}") from None
    made = read if isinstance(read, ast.Call) else ast.Call(read, [], [])
    if not isinstance(made.func, ast.Name | ast.Attribute):
        raise GradveilError(f"defense {text!r} cannot be read: write {OWN}")
    values = [_literal(each, call, text) for each in made.args]
    named = {each.arg: _literal(each.value, call, text) for each in made.keywords if each.arg}
    if len(named) < len(made.keywords):
        raise GradveilError(f"defense {text!r}: write each argument by itself, without **")
    reference = f"{module}:{ast.get_source_segment(call, made.func)}"
    kind = import_named(reference, "defense", _is_defense)
    if not isinstance(kind, type) or not issubclass(kind, Defense):
        found = "a class" if isinstance(kind, type) else kind_of(kind)
        raise GradveilError(
            f"defense {text!r}: {reference} is {found}, but no subclass of gradveil's Defense"
        )
    try:
        with current_folder_importable():
            made_defense = kind(*values, **named)
    except GradveilError:
        raise
    except RAISED as error:
        raise GradveilError(
            f"defense {text!r} could not be made: {one_line(error, 200)}; "
            f"it takes {_signature(kind)}"
        ) from error
    check_shown(made_defense, "__str__", "defense")
    return made_defense


def _is_defense(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Defense) and value is not Defense


def _literal(node: ast.expr, call: str, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise GradveilError(
            f"defense {text!r}: the argument {ast.get_source_segment(call, node)} is no literal; "
            "write numbers, texts in quotes, True, False, None, or lists of these"
        ) from None


def _signature(kind: type[Defense]) -> str:
    try:
        return str(inspect.signature(kind)).partition(" -> ")[0]
    except (ValueError, TypeError):
        return "other arguments"


def _made(kind: type[Defense], text: str, whole: str) -> Defense:
    types, values = _types(kind), {}
    for number, part in enumerate(text.split(",") if text else ()):
        key, named, value = part.partition("=")
        if not named and kind.first is not None and number == 0:
            key, value = kind.first, part
        if key.strip() not in types or (not named and value != part):
            raise GradveilError(
                f"defense {whole!r}: there is no setting {part.strip()!r}; "
                f"{kind.name} has {_known(kind)}"
            )
        if key.strip() in values:
            raise GradveilError(f"defense {whole!r}: {key.strip()} is set twice")
        values[key.strip()] = _value(types[key.strip()], value.strip(), key.strip(), whole)
    absent = [
        setting.name
        for setting in fields(kind)
        if setting.default is MISSING
        and setting.default_factory is MISSING
        and setting.name not in values
    ]
    if absent:
        raise GradveilError(
            f"defense {whole!r}: {' and '.join(absent)} must be given, as in {kind.example}"
        )
    try:
        return kind(**values)
    except GradveilError as error:
        raise GradveilError(f"{error} (in {whole!r}; {kind.name} has {_known(kind)})") from None


def _types(kind: type[Defense]) -> dict[str, Any]:
    """Return the type of each setting; for a setting that may be None, the other type."""
    hints = get_type_hints(kind)
    return {
        field.name: next(
            (t for t in get_args(hints[field.name]) if t is not type(None)), hints[field.name]
        )
        for field in fields(kind)
    }


def _value(kind: Any, text: str, key: str, whole: str) -> Any:
    try:
        if kind is bool:
            return {"yes": True, "no": False}[text.lower()]
        if kind in (int, float):
            return read_number(text, kind)
        return Policy.find(text) if kind is Policy else kind(text)
    except GradveilError:
        raise
    except (ValueError, KeyError):
        raise GradveilError(
            f"defense {whole!r}: {key} is {text!r}; expected {TYPES[kind]}"
        ) from None


def _known(kind: type[Defense]) -> str:
    return ", ".join(_types(kind)) or "no settings"
