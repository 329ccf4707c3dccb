"""The settings of gradient matching that a tuning tries, as values.

A setting is a choice among values of a field of the attack, or a number that a part is made with.
A user's own part is one more option: `Choice("prior", {"mine": MyPrior(0.1), "none": none})`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from gradveil.attacks import GradientMatching, Race, adam_cosine, find
from gradveil.attacks.distances import cosine, l1, l2
from gradveil.attacks.labels import Joint, Known
from gradveil.attacks.optimizers import Adam
from gradveil.attacks.priors import (
    BatchNorm,
    LabelTerm,
    NormStatistics,
    Prior,
    SentStatistics,
    Sum,
    TotalVariation,
    none,
)
from gradveil.attacks.starts import ClassMean, Normal, Patterned
from gradveil.core.boundary import check_fields, check_shown
from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.importing import import_named
from gradveil.core.reading import parse_json
from gradveil.defenses import Defense
from gradveil.search.space import Dimension, Drawn, Scale, Space

SEARCHES = "searches"  # names of dimensions
BASE = "against"
FIXED = ("steps", "restarts", "race", "tuned_on", "frames", "averaged")
"""Fields of the attack that no setting may have: work and starts decide on them."""


@dataclass(frozen=True)
class Choice:
    """A choice among values of a field of the attack, by their names."""

    field: str
    options: Mapping[str, Any]
    name: str = ""

    @property
    def title(self) -> str:
        """The name of the dimension: by default that of the field."""
        return self.name or self.field

    @property
    def dimension(self) -> Dimension:
        """The names of the options."""
        return tuple(self.options)

    def value(self, drawn: str | float) -> Any:
        """Return the value of the field."""
        return self.options[str(drawn)]

    def tried_out(self) -> list[tuple[str, Any]]:
        """Return every value with its name."""
        return list(self.options.items())

    def plain(self) -> Any:
        """Return the options as JSON has them."""
        return {name: repr(value) for name, value in self.options.items()}


@dataclass(frozen=True)
class Amount:
    """A number from `low` to `high`, drawn by its logarithm; `part` makes the field's value of it.

    Such as `Amount("prior", TotalVariation, 1e-5, 1.0)`.
    """

    field: str
    part: Callable[[float], Any]
    low: float
    high: float
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise GradveilError(
                f"amount {self.title}: from {self.low} to {self.high}; expected 0 < low < high"
            )

    @property
    def title(self) -> str:
        """The name of the dimension: by default that of the field."""
        return self.name or self.field

    @property
    def dimension(self) -> Dimension:
        """The numbers."""
        return Scale(self.low, self.high)

    def value(self, drawn: str | float) -> Any:
        """Return the value of the field."""
        return self.part(float(drawn))

    def tried_out(self) -> list[tuple[str, Any]]:
        """Return the value in the middle of the scale with its name."""
        middle = math.sqrt(self.low * self.high)
        return [(f"{middle:.2g}", self.value(middle))]

    def plain(self) -> Any:
        """Return part and limits as JSON has them."""
        return [self.part.__name__, self.low, self.high]


@dataclass(frozen=True)
class Searches:
    """How an attack spends its work: the restarts of the search proper, and a race before it."""

    restarts: int = 1
    race: Race = field(default_factory=Race)

    def steps(self, work: int) -> int:
        """Return the most steps with which all rows together make at most `work` steps."""
        low, high = 0, work
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.race.work(self.restarts, middle) <= work
            low, high = (middle, high) if fits else (low, middle - 1)
        if not low:
            raise GradveilError(
                f"work {work}: too small for one iteration of {self.restarts} restarts and race "
                f"{self.race}; give at least {self.race.work(self.restarts, 1)}"
            )
        return low


@dataclass(frozen=True)
class AttackSpace(Space[Mapping[str, str | float]]):
    """All attacks that a tuning may try.

    `bases` are attacks by name that settings are put into; a field in which a base differs from
    the standard attack stays the base's. Of the settings, several of the field `prior` add up.
    `searches` are the ways to spend the work, by name. Trials begin with those of `known`.
    """

    attribute = "settings"
    job = "tuning"

    settings: tuple[Choice | Amount, ...]
    searches: Mapping[str, Searches]
    bases: Mapping[str, GradientMatching] = field(
        default_factory=lambda: {"adam-cosine": adam_cosine}
    )
    known: tuple[Mapping[str, str | float], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        known = [each.name for each in fields(GradientMatching) if each.name not in FIXED]
        titles = Counter([SEARCHES, BASE, *(setting.title for setting in self.settings)])
        for setting in self.settings:
            if setting.field not in known:
                raise GradveilError(
                    f"setting {setting.title!r}: no field {setting.field!r} can be tuned; choose "
                    f"from {', '.join(known)}"
                )
            if titles[setting.title] > 1:
                raise GradveilError(f"setting {setting.title!r} is there twice: give it a name")
        for name, options in (
            *((setting.title, dict(setting.tried_out())) for setting in self.settings),
            (SEARCHES, self.searches),
            (BASE, self.bases),
        ):
            if not options:
                raise GradveilError(f"setting {name!r} has no options: give at least one")
        for setting in self.settings:
            for _, value in setting.tried_out():
                check_shown(replace(adam_cosine, **{setting.field: value}), "__repr__", "attack")

    @property
    def least_work(self) -> int:
        """The work with which every way to spend it makes an iteration."""
        return max(plan.race.work(plan.restarts, 1) for plan in self.searches.values())

    @property
    def first(self) -> tuple[Drawn, ...]:
        return tuple(map(self.make, self.known))

    @property
    def dimensions(self) -> Mapping[str, Dimension]:
        dimensions: dict[str, Dimension] = {SEARCHES: tuple(self.searches)}
        if len(self.bases) > 1:
            dimensions[BASE] = tuple(self.bases)
        return dimensions | {setting.title: setting.dimension for setting in self.settings}

    def draw(self, seed: int, number: int) -> dict[str, str]:
        raise AssertionError("a tuning learns from its trials")

    def make(self, drawn: Drawn) -> Mapping[str, str | float]:
        return {name: drawn[name] for name in self.dimensions}

    def text(self, value: Mapping[str, str | float]) -> str:
        return json.dumps(dict(value))

    def read(self, text: str) -> Mapping[str, str | float]:
        drawn = parse_json(text.encode(), dict[str, str | float], "the settings of a trial")
        for name, dimension in self.dimensions.items():
            value = drawn.get(name)
            if isinstance(dimension, Scale):
                fits = isinstance(value, float | int) and dimension.low <= value <= dimension.high
            else:
                fits = value in dimension
            if not fits:
                raise GradveilError(f"{name} {value!r} is not in the space of this tuning")
        return self.make(drawn)

    def attack(self, drawn: Drawn, work: int) -> GradientMatching:
        """Return the attack that was drawn, with as many steps as the work allows."""
        base = self.bases[str(drawn[BASE])] if BASE in drawn else next(iter(self.bases.values()))
        values: dict[str, list[Any]] = {}
        for setting in self.settings:
            values.setdefault(setting.field, []).append(setting.value(drawn[setting.title]))
        changes = {name: _joined(name, found) for name, found in values.items()}
        standard = {name: getattr(adam_cosine, name) for name in changes}
        changes = {
            name: value for name, value in changes.items() if getattr(base, name) == standard[name]
        }
        chosen = self.searches[str(drawn[SEARCHES])]
        return replace(
            base,
            **changes,
            restarts=chosen.restarts,
            race=chosen.race,
            steps=chosen.steps(work),
            frames=0,
        )

    def options(self) -> list[tuple[str, GradientMatching]]:
        """Return an attack of one step for every option, to see whether it suits, and its name."""
        found = [(f"{BASE} {name}", base) for name, base in self.bases.items()]
        for setting in self.settings:
            for name, value in setting.tried_out():
                changed = replace(adam_cosine, **{setting.field: value})
                found.append((f"{setting.title} {name}", changed))
        return [
            (name, replace(attack, steps=1, restarts=1, race=Race(), frames=0))
            for name, attack in found
        ]

    def without(self, unfit: Collection[str]) -> "AttackSpace":
        """Return the space without these options of `options`, the first of each kept."""
        settings: list[Choice | Amount] = []
        for setting in self.settings:
            if isinstance(setting, Choice):
                first, *others = setting.options
                left = [name for name in others if f"{setting.title} {name}" not in unfit]
                options = {name: setting.options[name] for name in (first, *left)}
                setting = replace(setting, options=options)
            settings.append(setting)
        first, *others = self.bases
        left = [name for name in others if f"{BASE} {name}" not in unfit]
        bases = {name: self.bases[name] for name in (first, *left)}
        return replace(self, settings=tuple(settings), bases=bases)

    def plain(self) -> dict[str, Any]:
        """Return the space as JSON has it, to tell it from others."""
        return {
            SEARCHES: {name: repr(value) for name, value in self.searches.items()},
            BASE: {name: repr(base) for name, base in self.bases.items()},
        } | {setting.title: setting.plain() for setting in self.settings}


def _joined(name: str, values: list[Any]) -> Any:
    """Return the value of a field; several priors add up, of others the last counts."""
    if name != "prior" or len(values) == 1:
        return values[-1]
    for value in values:
        if not isinstance(value, Prior):
            raise GradveilError(f"prior: {kind_of(value)}; expected a Prior")
    kept = [value for value in values if value != none]
    return kept[0] if len(kept) == 1 else Sum(tuple(kept))


PLANS = {
    "1": Searches(),
    "4": Searches(4),
    "8 raced": Searches(1, Race(((8, 1 / 8), (2, 1 / 2)))),
    "32 raced": Searches(2, Race(((16, 1 / 12), (4, 1 / 3)))),
    "32 raced, fading": Searches(2, Race(((16, 1 / 12), (4, 1 / 3)), fade=0.05)),
}
"""Ways to spend the work, by the number of starts."""


STANDARD: dict[str, str | float] = {
    SEARCHES: "1",
    BASE: "adam-cosine",
    "total variation": 1e-4,
    "rate": 0.1,
    "signed": "yes",
    "distance": "cosine",
    "start": "normal",
    "labels": "told",
    "other prior": "none",
}
"""The attack `adam-cosine` in the usual space."""


def usual_space(model: nn.Module, defense: Defense, train_mode: bool = False) -> AttackSpace:
    """Return the space for a client with this model and defense.

    The breakers that the defense declares are bases beside the standard attack.
    """
    norms = any(
        isinstance(module, BatchNorm) and module.running_mean is not None
        for module in model.modules()
    )
    other: dict[str, Prior] = {"none": none, "label term": LabelTerm(1e-3)}
    if norms:
        other["norm statistics"] = NormStatistics(1e-3)
    if norms and train_mode:
        other["sent statistics"] = SentStatistics(1e-3)
    bases = {"adam-cosine": adam_cosine}
    for name in (name for part in defense.parts() for name in part.breakers):
        breaker = find(name)
        if isinstance(breaker, GradientMatching) and not breaker.averaged:
            bases[name] = breaker
    return AttackSpace(
        (
            Amount("prior", TotalVariation, 1e-5, 1.0, "total variation"),
            Amount("optimizer", Adam, 0.01, 0.3, "rate"),
            Choice("signed", {"yes": True, "no": False}),
            Choice("distance", {"cosine": cosine, "l2": l2, "l1": l1}),
            Choice(
                "start", {"normal": Normal(), "pattern": Patterned(), "class mean": ClassMean()}
            ),
            Choice("labels", {"told": Known(), "optimized": Joint()}),
            Choice("prior", other, "other prior"),
        ),
        PLANS,
        bases,
        (STANDARD, STANDARD | {SEARCHES: "32 raced", "total variation": 5e-2}),
    )


def find_space(reference: str) -> AttackSpace:
    """Return the space `package.module:NAME` of a user, which is imported."""
    found = import_named(reference, "space", lambda value: isinstance(value, AttackSpace))
    if isinstance(found, AttackSpace):
        return found
    raise GradveilError(
        f"space {reference!r} is {kind_of(found)}: expected a gradveil.tuning.AttackSpace"
    )
