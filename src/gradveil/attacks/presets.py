"""The published attacks and those that undo a defense by name, each a composition of parts (settings: the papers' and their code's)."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gradveil.attacks.base import Attack
from gradveil.attacks.distances import Cosine, Distance, Likelihood, cosine, l1, l2
from gradveil.attacks.hidden_draws import JointMasks, JointNoise
from gradveil.attacks.linear import LinearInversion
from gradveil.attacks.matching import GradientMatching
from gradveil.attacks.optimizers import LBFGS, SGD, Adam
from gradveil.attacks.policy_views import ExpectedTransform, GuessedTransform, KnownTransform
from gradveil.attacks.priors import LabelTerm, Smoothness, TotalVariation
from gradveil.attacks.starts import ClassMean, Patterned
from gradveil.core.errors import GradveilError, unknown

TV = TotalVariation(1e-4)
NATS = Smoothness(1.0)  # a likelihood counts in nats, not from 0 to 2
# A line search needs full precision: with a GPU's shorter formats it stopped at a median of 14 dB (32 images), in float32 on a CPU at 38.
SECOND_ORDER = GradientMatching(l2, LBFGS(1.0), steps=300, boxed=False, decay=False, fast=False)

INVERTING = GradientMatching(cosine, Adam(0.1), TV, steps=4_800, signed=True)

PUBLISHED: dict[str, Attack] = {
    # Geiping et al. 2020 ("inversed") as Gao et al. 2021 use it, and with the defaults of their code.
    "adam-cosine": INVERTING,
    "ig-default": GradientMatching(cosine, Adam(0.1), TotalVariation(1e-1), steps=4_800),
    # As published, at a learning rate that hardly moves ("zhu"): kept to show it.
    "lbfgs-l2": GradientMatching(
        l2,
        LBFGS(1e-4, line_search=False),
        TotalVariation(1e-3),
        steps=50,
        restarts=2,
        boxed=False,
        decay=False,
    ),
    "lbfgs-cosine": GradientMatching(
        cosine, LBFGS(1e-4, line_search=False), TV, steps=300, restarts=16, signed=True, decay=False
    ),
    # Deep Leakage from Gradients, Zhu et al. 2019, as its own paper sets it, with a line search for each victim.
    "dlg": SECOND_ORDER,
    "adam-l1": GradientMatching(l1, Adam(0.1), TV, steps=4_800, signed=True),
    "adam-l2": GradientMatching(l2, Adam(0.1), TV, steps=4_800, signed=True),
    "sgd-cosine": GradientMatching(cosine, SGD(0.01, 0.9), TV, steps=4_800, signed=True),
    # Wei et al. 2020: L2 and a label term, from a pattern. IGA: cosine and total variation.
    "cpl": replace(SECOND_ORDER, prior=LabelTerm(1e-3), initial=Patterned()),
    "iga": GradientMatching(cosine, Adam(0.1), TotalVariation(1e-2), steps=4_800, signed=True),
    # Exact, for one image and a first layer that is linear with a bias.
    "closed-form": LinearInversion(),
}

BREAKERS: dict[str, Attack] = {
    # Policies. Balunovic et al. 2022 showed that they fail early in training; the rest knows the policy, or the classes' looks.
    "early-step": GradientMatching(
        cosine, Adam(0.1), TotalVariation(1e-5), steps=2_000, signed=True
    ),
    "transform-known": replace(INVERTING, through=KnownTransform()),
    "transform-drawn": replace(INVERTING, through=ExpectedTransform(4)),
    "transform-guessed": replace(INVERTING, through=GuessedTransform(), restarts=8),
    "class-mean": replace(INVERTING, initial=ClassMean()),
    # PRECODE: Balunovic et al. 2022 leave out what is random; the noise can be looked for too. Soteria: the same with its layer.
    "without-random-layers": replace(INVERTING, distance=Cosine(leave_out="random")),
    "without-defended-layers": replace(INVERTING, distance=Cosine(leave_out="defended")),
    "joint-noise": replace(INVERTING, joint=JointNoise()),
    # Dropout: Scheliga et al. 2023.
    "joint-masks": replace(INVERTING, joint=JointMasks()),
    # Pruning: match what is left of one round, or of all rounds where the rest is fed back (Lin et al. 2018).
    "masked": replace(INVERTING, distance=Cosine(nonzero=True)),
    "masked-rounds": replace(INVERTING, distance=Cosine(rounds=True)),
    # Noise: what is most likely under it, and the mean of eight such searches (Balunovic et al. 2022, a Bayesian view).
    "likelihood": replace(INVERTING, distance=Likelihood(free=True), prior=NATS),
    "averaged": replace(
        INVERTING, distance=Likelihood(free=True), prior=NATS, restarts=8, averaged=True
    ),
}


class Presets(dict[str, Attack]):
    """By name. `A+B` is there too, though not listed: both in one search."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and all(
            super(Presets, self).__contains__(part) for part in name.split("+")
        )

    def __missing__(self, name: str) -> Attack:
        if name not in self:
            raise KeyError(name)
        return combined({part: self[part] for part in name.split("+")}, name)


PRESETS = Presets({**PUBLISHED, **BREAKERS})


def names() -> tuple[str, ...]:
    return tuple(PRESETS)


def find(name: str) -> Attack:
    if name not in PRESETS:
        raise unknown("attack", name, PRESETS)
    return PRESETS[name]


def combined(attacks: Mapping[str, Attack], name: str) -> GradientMatching:
    """The standard attack with all that sets each of them apart from it."""
    if len(attacks) <= name.count("+"):
        raise GradveilError(f"attack {name!r} names a part twice: name each once")
    apart: dict[str, dict[str, Any]] = {}  # by setting, then by part
    for part, attack in attacks.items():
        if not isinstance(attack, GradientMatching):
            raise GradveilError(
                f"attack {name!r}: {part} matches no gradients, so nothing can be added to it; run it by itself"
            )
        for setting in fields(attack):
            if getattr(attack, setting.name) != getattr(INVERTING, setting.name):
                apart.setdefault(setting.name, {})[part] = getattr(attack, setting.name)
    distance = _joined(apart.pop("distance", {}), name)
    return replace(
        INVERTING,
        distance=distance,
        **{setting: _agreed(setting, values, name) for setting, values in apart.items()},
    )


def _joined(distances: Mapping[str, Distance], name: str) -> Distance:
    kinds = {
        part: type(distance) for part, distance in distances.items() if type(distance) is not Cosine
    }
    kind: type[Distance] = _agreed("distance", kinds, name) if kinds else Cosine
    apart: dict[str, dict[str, Any]] = {}
    for part, distance in distances.items():
        for setting in fields(distance):
            if (value := getattr(distance, setting.name)) != setting.default:
                apart.setdefault(setting.name, {})[part] = value
    if {*apart.get("leave_out", {}).values()} == {"random", "defended"}:
        apart["leave_out"] = {name: "both"}
    return kind(**{setting: _agreed(setting, values, name) for setting, values in apart.items()})


def _agreed(setting: str, values: Mapping[str, Any], name: str) -> Any:
    (first, value), *others = values.items()
    for part, other in others:
        if other != value:
            raise GradveilError(
                f"attack {name!r}: {first} and {part} cannot be combined, each has a {setting} of its own"
            )
    return value
