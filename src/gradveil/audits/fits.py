"""Attacks on one update whose images nobody knows: how near each came, and what can be compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import isfinite

from torch import nn

from gradveil.attacks import Attack, GradientMatching
from gradveil.attacks.dense_inversion import DenseInversion
from gradveil.attacks.distances import Distance, cosine
from gradveil.attacks.linear import LinearInversion
from gradveil.attacks.policy_views import Itself
from gradveil.audits.attackers import automatic, find_automatic, on_equal_terms
from gradveil.core.errors import GradveilError
from gradveil.core.types import Reconstruction
from gradveil.defenses import Defense


def automatic_attacks(
    defense: Defense, model: nn.Module, size: int, train_mode: bool
) -> dict[str, Attack]:
    """Return the attacks that `auto` means for an update of so many images, on equal terms."""
    return on_equal_terms(find_automatic(automatic(defense, model, train_mode, size)))


@dataclass(frozen=True, eq=False)
class Tried:
    """What each attack found in an update, by its name, and why others found nothing.

    Those in `left_out` do not suit the update, or failed. Distances can be compared only where they
    are measured alike: `nearest` names the attack with the smallest, and all that it was compared
    with, by how they measure.
    """

    found: Mapping[str, Reconstruction]
    left_out: Mapping[str, str]
    nearest: Mapping[str, tuple[str, tuple[str, ...]]]


def try_each(attacks: Mapping[str, Attack], run: Callable[[str, Attack], Reconstruction]) -> Tried:
    """Run every attack that suits; where none found anything, the first one's reason is raised."""
    found: dict[str, Reconstruction] = {}
    left_out: dict[str, GradveilError] = {}
    for name, attack in attacks.items():
        try:
            made = run(name, attack)
        except GradveilError as error:
            left_out[name] = error
            continue
        if made.status == "ok":
            found[name] = made
        else:
            left_out[name] = GradveilError(made.status)
    if not found:
        raise next(iter(left_out.values()))
    return Tried(
        found,
        {name: str(reason) for name, reason in left_out.items()},
        nearest({name: made.distance for name, made in found.items()}, attacks),
    )


def measured_by(attack: Attack) -> str:
    """Say how the attack measures the distance of an update: only equal ones can be compared."""
    if isinstance(attack, LinearInversion | DenseInversion):
        return _short(cosine)
    if not isinstance(attack, GradientMatching):
        return type(attack).__name__
    parts = [_short(attack.distance)]
    parts += [] if isinstance(attack.view, Itself) else [repr(attack.view)]
    parts += [] if attack.hidden is None else [repr(attack.hidden)]
    return ", ".join([*parts, *(["mean of restarts"] if attack.averaged else [])])


def _short(distance: Distance) -> str:
    """Write a distance with the settings that are not the usual ones, such as `Cosine()`."""
    settings = [(each.name, getattr(distance, each.name)) for each in fields(distance)]
    usual = {each.name: each.default for each in fields(distance)}
    said = [f"{name}={value!r}" for name, value in settings if value != usual[name]]
    return f"{type(distance).__name__}({', '.join(said)})"


def nearest(
    distances: Mapping[str, float], attacks: Mapping[str, Attack]
) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name the attack with the smallest distance of each kind, and those it was compared with."""
    kinds: dict[str, list[str]] = {}
    for name, distance in distances.items():
        if isfinite(distance):
            kinds.setdefault(measured_by(attacks[name]), []).append(name)
    return {
        kind: (min(names, key=distances.__getitem__), tuple(names)) for kind, names in kinds.items()
    }
