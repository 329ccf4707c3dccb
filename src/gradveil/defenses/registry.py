"""Defences as text: `prune:0.95`, `precode:k=256,beta=1e-3`, a policy, several joined by `,then,`."""

import re
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from gradveil.core.errors import GradveilError, unknown
from gradveil.defenses.base import Defense
from gradveil.defenses.chain import THEN, chain
from gradveil.defenses.dpsgd import DPSGD, Clipping
from gradveil.defenses.dropout import DropoutDefense
from gradveil.defenses.noise import GaussianNoise, LaplacianNoise
from gradveil.defenses.policies import PolicyDefense, RandomPolicies
from gradveil.defenses.precode import Precode
from gradveil.defenses.pruning import FeedbackPruning, Pruning
from gradveil.defenses.soteria import Soteria
from gradveil.transforms import Policy

KINDS: tuple[type[Defense], ...] = (
    Defense, PolicyDefense, RandomPolicies, Pruning, FeedbackPruning, GaussianNoise, LaplacianNoise, Clipping, DPSGD, Soteria, Precode,
    DropoutDefense,
)  # fmt: skip
REGISTRY: dict[str, type[Defense]] = {kind.name: kind for kind in KINDS}
WORDS = {
    bool: "yes or no",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Policy: "a policy",
}


def parse(text: str) -> Defense:
    """From text such as `3-1-7+43-18-18`, `prune:0.95`, `gaussian:1e-2,then,prune:0.9`, or `none`."""
    return chain([_one(part.strip()) for part in text.split(THEN)])


def _one(text: str) -> Defense:
    name, _, settings = text.partition(":")
    if name in REGISTRY:
        return _made(REGISTRY[name], settings, text)
    if ".toml" in text or re.match(r"\d|[a-z_]+\(", text):
        return PolicyDefense(policy=Policy.find(text))
    raise unknown("defense", name, (*REGISTRY, "a policy such as 3-1-7", "PATH.toml"))


def _made(kind: type[Defense], text: str, whole: str) -> Defense:
    types, values = _types(kind), {}
    for number, part in enumerate(text.split(",") if text else ()):
        key, named, value = part.partition("=")
        if not named and kind.first is not None and number == 0:
            key, value = kind.first, part
        if key.strip() not in types or (not named and value != part):
            raise GradveilError(
                f"defense {whole!r}: there is no setting {part.strip()!r}; {kind.name} has {_known(kind)}"
            )
        if key.strip() in values:
            raise GradveilError(f"defense {whole!r}: {key.strip()} is set twice")
        values[key.strip()] = _value(types[key.strip()], value.strip(), key.strip(), whole)
    absent = [
        f.name
        for f in fields(kind)
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values
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
    """Of each setting; for one that may be None, the other type."""
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
        return Policy.find(text) if kind is Policy else kind(text)
    except GradveilError:
        raise
    except (ValueError, KeyError):
        raise GradveilError(
            f"defense {whole!r}: {key} is {text!r}; expected {WORDS[kind]}"
        ) from None


def _known(kind: type[Defense]) -> str:
    return ", ".join(_types(kind)) or "no settings"
