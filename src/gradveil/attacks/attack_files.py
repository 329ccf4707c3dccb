"""Attacks written to files and read back, part by part.

A file names the classes of gradveil by their names, and those of a user `module:Class`. No text of
a file is ever imported: a user's class must have been imported before its file is read.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from hashlib import sha256
from inspect import isabstract
from pathlib import Path
from typing import Any, get_type_hints

from torch import Tensor

from gradveil.attacks.distances import Distance
from gradveil.attacks.hidden_draws import HiddenDraws
from gradveil.attacks.labels import LabelFinder
from gradveil.attacks.matching import GradientMatching
from gradveil.attacks.optimizers import Optimizer
from gradveil.attacks.policy_views import PolicyView
from gradveil.attacks.priors import Prior
from gradveil.attacks.races import Race
from gradveil.attacks.starts import Start
from gradveil.core.boundary import check_value
from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.files import shown
from gradveil.core.formats import AttackFile
from gradveil.core.importing import RAISED
from gradveil.core.reading import check_format, convert, read_toml, written_by

FORMAT = "gradveil attack 1"
SUFFIX = ".toml"
KIND = "kind"
MOST = 16 << 20  # bytes of a file: it has 70 for each image
SHORT = 16  # letters of a short digest: among a million images two agree in one case of 30 million
BASES = (
    *(Distance, HiddenDraws, LabelFinder, GradientMatching),
    *(Optimizer, PolicyView, Prior, Race, Start),
)
"""What a file may hold: these classes and those made from them."""


def image_digest(image: Tensor) -> str:
    """Return the SHA-256 of a picture's shape and pixels, uint8 (C, H, W), in hexadecimal."""
    shape = " ".join(map(str, image.shape))
    return sha256(shape.encode() + image.contiguous().cpu().numpy().tobytes()).hexdigest()


def short_digest(image: Tensor) -> str:
    """Return the first letters of a picture's `image_digest`, for lists of many."""
    return image_digest(image)[:SHORT]


def attack_table(attack: GradientMatching) -> dict[str, Any]:
    """Return the settings of an attack as the plain values of a file."""
    return _table(attack, "attack")


def _table(value: Any, name: str) -> dict[str, Any]:
    if not any(isinstance(value, base) for base in BASES):
        raise GradveilError(f"{name}: {kind_of(value)} cannot be written into an attack file")
    table: dict[str, Any] = {KIND: _kind(type(value))}
    for each in fields(value):
        if each.init and each.compare:
            setting = _plain(getattr(value, each.name), f"{name}.{each.name}")
            if setting is None and each.default is not None:
                raise GradveilError(f"{name}.{each.name}: None cannot be written into a file")
            table[each.name] = setting
    return table


def _plain(value: object, name: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each, name) for each in value]
    if is_dataclass(value):
        return _table(value, name)
    raise GradveilError(f"{name}: {kind_of(value)} cannot be written into an attack file")


def read_attack(path: Path) -> GradientMatching:
    """Return the attack of a file that a tuning wrote, with the digests of its images."""
    found = read_attack_file(path)
    attack = _read(found.attack, GradientMatching, f"{shown(path)}: attack")
    assert isinstance(attack, GradientMatching)
    object.__setattr__(attack, "tuned_on", tuple(found.images.tuned_on))
    return attack


def read_attack_file(path: Path) -> AttackFile:
    """Return the tables of the file; one that is damaged or of another version is refused."""
    plain = read_toml(path, dict[str, Any], most=MOST)
    try:
        check_format(plain.get("format"), FORMAT, path)
    except GradveilError as error:
        raise GradveilError(f"{error}{written_by(plain)}; tune the attack again") from None
    return convert(plain, AttackFile, path)


def _read(table: Any, base: type, where: str) -> Any:
    """Return the part that a table describes, which must be of this class."""
    if not isinstance(table, Mapping) or not isinstance(table.get(KIND), str):
        raise GradveilError(f"{where}: expected a table with the name of a class, `{KIND}`")
    kind = _find(table[KIND], base, where)
    hints = get_type_hints(kind)
    known = {each.name: each for each in fields(kind) if each.init and each.compare}
    settings = {}
    for name, plain in table.items():
        if name == KIND:
            continue
        if name not in known:
            raise GradveilError(
                f"{where}: {shown(name)}: {kind.__name__} has no such setting; it has "
                f"{', '.join(known)}"
            )
        value = _value(plain, f"{where}.{shown(name)}")
        try:
            settings[name] = check_value(value, hints.get(name, Any), name)
        except GradveilError as error:
            raise GradveilError(f"{where}: {error}") from None
    for name, each in known.items():
        if name not in settings and each.default is MISSING and each.default_factory is MISSING:
            raise GradveilError(f"{where}.{name}: missing")
    try:
        return kind(**settings)
    except RAISED as error:  # the class may be anyone's
        raise GradveilError(f"{where}: {error}") from None


def _value(plain: Any, where: str) -> Any:
    if isinstance(plain, Mapping):
        return _read(plain, object, where)
    if isinstance(plain, list):
        return tuple(_value(each, where) for each in plain)
    if isinstance(plain, bool | int | str) or (isinstance(plain, float) and math.isfinite(plain)):
        return plain
    raise GradveilError(f"{where}: {shown(str(plain))} is no setting of an attack")


def _find(name: str, base: type, where: str) -> Any:
    kinds = {_kind(kind): kind for kind in _known() if issubclass(kind, base)}
    if name in kinds:
        return kinds[name]
    if ":" in name:
        raise GradveilError(
            f"{where}: it is of {shown(name)}, which has not been imported: import it before "
            "the file is read, such as in a module that is named `--attack module:NAME`"
        )
    raise GradveilError(f"{where}: there is no {shown(name)}; there are {', '.join(sorted(kinds))}")


def _known() -> Iterator[type]:
    """Yield the classes that a file may name, as far as they have been imported."""
    left: list[type] = list(BASES)
    seen = set[type]()
    while left:
        kind = left.pop()
        if kind in seen:
            continue
        seen.add(kind)
        left += kind.__subclasses__()
        if is_dataclass(kind) and not isabstract(kind):
            yield kind


def _kind(kind: type) -> str:
    """Return the name of a class in files."""
    ours = kind.__module__.startswith("gradveil.attacks.")
    return kind.__name__ if ours else f"{kind.__module__}:{kind.__qualname__}"
