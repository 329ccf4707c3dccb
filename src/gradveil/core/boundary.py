"""The boundary that a call of a user's crosses: arguments are checked, user code is contained.

A public function is decorated with `public`, and a public dataclass calls `check_fields`: their
annotations say what an argument may be, so that a wrong one is a line that names it, before
anything is done. `check_shown` refuses a defense or attack whose text does not tell its settings.
"""

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, lru_cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from gradveil.core.errors import GradveilError, kind_of, one_line, with_article
from gradveil.core.importing import RAISED, contained

P = ParamSpec("P")
T = TypeVar("T")

LARGEST = 2**63  # whole numbers from there on are no seeds, and no JSON that others read
LONGEST_PATH = 4_096  # letters, as on Linux
SHOWN = 40  # letters of a wrong value in a message
SCALARS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
WORDS = {
    "torch.nn.modules.module.Module": "a torch.nn.Module",
    "torch.Tensor": "a torch.Tensor",
    "torch._C.Generator": "a torch.Generator",
    "pathlib.Path": "a path",
}


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function check its arguments by their annotations, and contain user code it calls.

    Numbers of other libraries, such as NumPy's, become Python's.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*given: P.args, **more: P.kwargs) -> T:
        try:
            bound, hints = signature.bind(*given, **more), _hints(function)
        except TypeError as error:  # as Python words it where it calls the function itself
            raise TypeError(f"{function.__name__}() {error}") from None
        for name, value in bound.arguments.items():
            if name in hints:
                bound.arguments[name] = check_value(value, hints[name], name)
        with contained():
            return function(*bound.args, **bound.kwargs)

    return checked


def check_fields(instance: Any) -> None:
    """Check the fields of a frozen dataclass by their annotations."""
    hints = _hints(type(instance))  # type: ignore[arg-type]  # classes are hashable
    for each in fields(instance):
        if each.init:
            value = getattr(instance, each.name)
            found = check_value(value, hints.get(each.name, Any), each.name)
            if found is not value:
                object.__setattr__(instance, each.name, found)


def check_least(instance: Any, least: Mapping[str, int]) -> None:
    """Refuse a field below its least value, by name; None is no number and passes."""
    for name, lowest in least.items():
        value = getattr(instance, name)
        if value is not None and value < lowest:
            raise GradveilError(f"{name.replace('_', ' ')} {value}: it must be at least {lowest}")


@lru_cache(maxsize=256)
def _hints(annotated: Any) -> dict[str, Any]:
    try:
        return get_type_hints(annotated)
    except NameError:  # a subclass of a user's may name types that only a type checker imports
        return {}


def check_value(value: object, hint: Any, name: str) -> Any:
    """Return the value where it is what the annotation says, else refuse it in one line.

    Annotations that say nothing (Any, object) and containers of objects allow everything.
    """
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for option in options:
        fits, found = _fitted(value, option)
        if fits:
            if Path in options and isinstance(found, str):
                _check_path(found, name)
            return found
    expected = " or ".join(
        _in_words(option, options) for option in options if option is not NoneType
    )
    label = name.replace("_", " ")
    if isinstance(value, bool | int | float | str) and set(options) <= {*SCALARS, NoneType}:
        raise GradveilError(f"{label} {_short(value)}: expected {expected}")
    raise GradveilError(f"{label}: {kind_of(value)}; expected {expected}")


def _fitted(value: object, option: Any) -> tuple[bool, Any]:
    """Say whether a value is what one part of an annotation says, and return it."""
    if option is Any or option is object:
        return True, value
    if option in SCALARS:
        return _scalar(value, option)
    origin = get_origin(option)
    if origin is Literal:
        return isinstance(value, str | int) and value in get_args(option), value
    if origin is Callable:  # a class given by mistake would be made, not called
        return callable(value) and not isinstance(value, type), value
    if origin in (tuple, Sequence, Iterable) and _of_scalars(option):
        return _members(value, option)
    if origin is Mapping or (origin is tuple and Ellipsis in get_args(option)):
        return _of_objects(value, option), value
    if origin is None and isinstance(option, type):
        return isinstance(value, option), value
    return True, value


def _scalar(value: object, kind: type) -> tuple[bool, Any]:
    if kind in (bool, str):
        return isinstance(value, kind), value
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        return False, value
    if kind is int:
        whole = operator.index(value)  # type: ignore[arg-type]  # an Integral has one
        return -LARGEST < whole < LARGEST, whole
    try:
        number = float(value)
    except OverflowError:
        return False, value
    return True, value if isinstance(value, int | float) else number


def _of_objects(value: object, option: Any) -> bool:
    """Say whether a value is a mapping or tuple of what the annotation says."""
    if get_origin(option) is Mapping:
        key, kind = get_args(option)
        return isinstance(value, Mapping) and all(
            _fitted(each, key)[0] and _fitted(value[each], kind)[0] for each in value
        )
    return isinstance(value, tuple) and all(_fitted(v, get_args(option)[0])[0] for v in value)


def _of_scalars(option: Any) -> bool:
    return all(part in SCALARS or part is Ellipsis for part in get_args(option))


def _members(value: object, option: Any) -> tuple[bool, Any]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        return False, value
    if get_origin(option) is not Iterable and not isinstance(value, list | tuple):
        return False, value
    try:
        parts = tuple(value)
    except RAISED:  # such as a tensor without dimensions
        return False, value
    kinds = [kind for kind in get_args(option) if kind is not Ellipsis]
    if get_origin(option) is tuple and Ellipsis not in get_args(option):
        if len(parts) != len(kinds):
            return False, value
    else:
        kinds = kinds[:1] * len(parts)
    found = [_scalar(part, kind) for part, kind in zip(parts, kinds, strict=True)]
    return all(fits for fits, _ in found), tuple(part for _, part in found)


def _in_words(option: Any, options: Sequence[Any]) -> str:
    if option is str and Path in options:
        return "a text"
    if option is str and any(other not in SCALARS and other is not NoneType for other in options):
        return "its name"
    if option in SCALARS:
        return SCALARS[option]
    origin, parts = get_origin(option), get_args(option)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is Mapping:
        return f"a dict of names and {_in_words(parts[1], parts[1:])}"
    if origin is tuple and parts[0] not in SCALARS:
        return f"a tuple, each {_in_words(parts[0], parts[:1])}"
    if origin in (tuple, Sequence, Iterable):
        kinds = [SCALARS[part] for part in parts if part in SCALARS]
        return f"a list of {len(kinds)} numbers" if len(kinds) > 1 else f"a list, each {kinds[0]}"
    if origin is Callable:
        return "a function"
    name = f"{option.__module__}.{option.__qualname__}"
    return WORDS.get(name, with_article(option.__name__))


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= LARGEST:
        return f"of {value.bit_length():,} bits, more than 63"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _check_path(text: str, name: str) -> None:
    if not text.strip() or "\0" in text or len(text) > LONGEST_PATH:
        raise GradveilError(f"{name.replace('_', ' ')} {_short(text)}: expected a path")


def check_shown(value: object, method: Literal["__str__", "__repr__"], kind: str) -> str:
    """Return the text of a user's defense or attack by this method; it must tell all settings.

    Results are told apart by that text: with settings that it does not show, another setting in
    the same folder would read back the old result.
    """
    name, found = type(value).__name__, None
    try:
        found = getattr(value, method)()
        problem = _hidden(value, found, method)
    except RAISED as error:
        problem = f"its text cannot be made: {one_line(error, 200)}"
    if problem is not None:
        raise GradveilError(
            f"{kind} {name}: {problem}; make {name} a frozen dataclass whose fields are its "
            "settings: numbers, texts, or lists of these"
        )
    return str(found)


def _hidden(value: object, text: object, method: str) -> str | None:
    """Say which settings of a value its text does not show; None where it shows all."""
    if not isinstance(text, str) or not text.strip():
        return f"its text is {kind_of(text)}"
    if re.search(r" at 0x[0-9a-fA-F]+", text):
        return "its text holds an address in memory"
    declared = fields(value) if is_dataclass(value) and not isinstance(value, type) else ()
    for each in declared:
        shown = each.repr or method == "__str__"  # a defense writes all its fields
        if each.compare and not (shown and _tells(getattr(value, each.name))):
            return f"its text does not tell all of {each.name!r}"
    for kind in type(value).__mro__:
        if "__dataclass_fields__" in vars(kind):
            break
        if method in vars(kind):
            return None  # a text of the class's own
    if kind is type(value):
        return None
    known = {each.name for each in declared}
    for name in getattr(value, "__dict__", {}):
        if name not in known and not isinstance(getattr(kind, name, None), cached_property):
            return f"its text does not tell {name!r}"
    return None


def _tells(setting: object) -> bool:
    """Tell whether the text of a setting is all of it: that of a tensor is cut and rounded."""
    if setting is None or isinstance(setting, str | bytes | Real | complex | Path | Enum | type):
        return True
    if isinstance(setting, list | tuple | set | frozenset):
        return all(map(_tells, setting))
    if isinstance(setting, Mapping):
        return all(map(_tells, setting.keys())) and all(map(_tells, setting.values()))
    if is_dataclass(setting):
        return all(_tells(getattr(setting, each.name)) for each in fields(setting) if each.compare)
    return not hasattr(setting, "__array__") and not hasattr(setting, "state_dict")
