"""Attackers: the attacks that a defense meets, and what each is told, also in words.

Nothing here knows a defense by its type: each declares its breakers, and an attack declares what it
needs to know.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from gradveil.attacks import Attack, GradientMatching, find
from gradveil.core.errors import GradveilError
from gradveil.core.importing import RAISED
from gradveil.core.types import MEANINGS, Knowledge, Observation
from gradveil.defenses import REGISTRY, Defense, DropoutDefense, Precode, chain
from gradveil.defenses.applied import told_knowledge
from gradveil.engine.draws import DROPOUTS, Draw, drawing
from gradveil.engine.gradients import in_mode

AUTO = "auto"
STANDARD = "adam-cosine"
RACED = "raced"
EXACT = "closed-form"
EXACT_BATCH = "peeling"  # of several images
FEATURES = "features", "raced+features"  # of several images
DENSE = "dense-inversion"  # of several images
MATCHED = "dense-matching"  # of several images
MOST_SOLVED = 16  # images of a batch whose features are solved for in seconds
LONGEST = 128  # letters of an attack's name
MOST_RESTARTS = 4  # of an attack of `auto`: four of 4,800 steps are about the work of a race
SEARCHED = ("steps", "restarts")
EQUAL = "-equal"  # behind the name of a user's attack, of the same with as many restarts and steps
ROUNDS = 4  # that a client shares of one batch, where rounds add up and an attack looks at several

PUBLIC = ("labels", "means")
"""Knowledge that no defense has to give away."""


def automatic(
    defense: Defense,
    model: nn.Module | None = None,
    train_mode: bool = False,
    batch_size: int = 1,
) -> tuple[str, ...]:
    """Name the attacks of `auto`, each once.

    These are the standard attack and the raced one, the breakers that each part of the defense
    declares, all parts' strongest ones in one search, plain and raced, and the exact ones; of
    several images also those that match what dense layers tell of each, of a few exactly. What the
    model draws by itself in this mode is attacked as the defense that draws alike is.
    """
    parts: list[Defense | type[Defense]] = [*defense.parts()]
    parts += [] if model is None else _drawing_like(model, train_mode)
    breakers = [name for part in parts for name in part.breakers]
    for part in parts:
        _check_breakers(part)
    solved = (*FEATURES, DENSE) if batch_size <= MOST_SOLVED else ()
    exact = (EXACT,) if batch_size == 1 else (MATCHED, *solved, EXACT_BATCH)
    names = (STANDARD, RACED, *breakers, *combinations(defense, parts), *exact)
    return tuple(dict.fromkeys(names))


def find_automatic(names: Iterable[str]) -> dict[str, Attack]:
    """Return the attacks of `auto` by name, without a race of at most `MOST_RESTARTS` restarts."""
    found = {name: find(name) for name in names}
    return {
        name: replace(attack, restarts=min(attack.restarts, MOST_RESTARTS))
        if isinstance(attack, GradientMatching) and not attack.race.heats
        else attack
        for name, attack in found.items()
    }


def on_equal_terms(
    attacks: Mapping[str, Attack],
    own: Collection[str] = (),
    beside: Collection[str] = (),
    usual: Iterable[Attack] = (),
) -> dict[str, Attack]:
    """Return the attacks with equal restarts and steps, the most that any has; a race is one too.

    No attack shall beat another by having searched more. Those that race have the race with the
    most work, and those that match no gradients stay. `own` attacks have settings of a user's, and
    keep them; where these are fewer, the attack stands there once more with `EQUAL` behind its
    name. Attacks `beside` the others take no part. What the `usual` ones have, which own attacks
    replace, counts as well.
    """
    counted = [each for each in usual if isinstance(each, GradientMatching)]
    searches = {
        name: attack
        for name, attack in attacks.items()
        if isinstance(attack, GradientMatching) and name not in beside
    }
    found = dict(attacks)
    for races in (False, True):
        those = {name: each for name, each in searches.items() if bool(each.race.heats) == races}
        others = [other for other in counted if bool(other.race.heats) == races]
        for name, each in those.items():
            equal = _with_most(each, [*those.values(), *others])
            if name in own and equal != each:
                if f"{name}{EQUAL}" in attacks:
                    raise GradveilError(
                        f"attack {name}{EQUAL}: auto gives {name} this name with more restarts or "
                        "steps; choose another"
                    )
                found[f"{name}{EQUAL}"] = equal
            elif name not in own:
                found[name] = equal
    return found


def _with_most(attack: GradientMatching, others: Sequence[GradientMatching]) -> GradientMatching:
    """Return the attack with the most steps and restarts of these, which all race or do not."""
    longest = max(others, key=lambda each: each.race.work(each.restarts, each.steps))
    if longest.race.heats:
        return replace(attack, race=longest.race, steps=longest.steps, restarts=longest.restarts)
    steps, restarts = (max(getattr(each, name) for each in others) for name in SEARCHED)
    return replace(attack, steps=steps, restarts=restarts)


def mildly_defended(
    attack: Attack, defense: Defense, model: nn.Module, train_mode: bool
) -> Defense | None:
    """Return the defense of the attack's positive control: none where it undoes none.

    It is what the attack undoes of this defense, and of what the model draws by itself, at the mild
    settings that are declared. None: something has no such setting.
    """
    needs = {*attack.needs} - {*PUBLIC}
    if not needs:
        return Defense()
    found: list[Defense] = []
    parts: list[Defense | type[Defense]] = [*defense.parts()]
    parts += _drawing_like(model, train_mode)
    for part in parts:
        undone = {need for name in part.breakers for need in find(name).needs}
        if needs & undone:
            mild: object = _mild(part)
            if not isinstance(mild, Defense):
                return None
            found += [] if mild in found else [mild]
    return chain(found) if found else None


def _mild(part: Defense | type[Defense]) -> object:
    """Return the mild setting of a part; None where a user's own class fails to say it."""
    try:
        return part.mild()
    except RAISED:
        return None


def combinations(defense: Defense, parts: Sequence[Defense | type[Defense]]) -> list[str]:
    """Name the attacks that unite a breaker of each part in one search, as `A+B`.

    Each part takes part with its strongest breaker that can be told what it needs, and once more
    with each of those that it has instead. Attacks that cannot be united are left out. The last
    are the same in the raced search.
    """
    told = _Told.of(defense, parts)
    choices: list[list[str | None]] = []
    weaker: set[str] = set()  # than the choice of a part that names them after it
    for part in parts:
        able = [name for name in part.strongest if told.suffices(name, part)]
        weaker.update(able[1:])
        if able and [able[0], *part.instead] not in choices:
            choices.append([able[0], *part.instead])
    choices = [choice for choice in choices if choice[0] not in weaker]
    choices.sort(key=lambda choice: _rank(choice[0] or ""))
    found, raced = [], list[str]()
    for reversed_names in product(*reversed(choices)):  # the first part's choices change fastest
        names = list(dict.fromkeys(name for name in reversed(reversed_names) if name))
        if len(names) > 1 and _can_unite(names):
            found.append(_joined(names))
        if names and _can_unite([RACED, *names]):
            raced.append(_joined([RACED, *names]))
    return list(dict.fromkeys(found + raced))


@dataclass(frozen=True, eq=False)
class _Told:
    """What can be told of a chain before there is a model.

    A part that has to see its model to tell anything is taken at its word: `unsure` holds those.
    Rounds of a model that draws are never alike, so earlier ones are no knowledge there.
    """

    knowledge: Knowledge
    unsure: tuple[Defense | type[Defense], ...]
    alike: bool  # whether each round of one batch has the same gradient

    @classmethod
    def of(cls, defense: Defense, parts: Sequence[Defense | type[Defense]]) -> "_Told":
        telling = [part for part in defense.parts() if _tells(part)]
        unsure = tuple(part for part in parts if part not in telling)
        drawn = any(
            part.acts_on == "model" and (isinstance(part, type) or part.random) for part in parts
        )
        return cls(told_knowledge(chain(telling), Knowledge(), nn.Module()), unsure, not drawn)

    def suffices(self, name: str, part: Defense | type[Defense]) -> bool:
        """Whether the attack can be told all that it needs, under a part that declares it."""
        return all(self._knows(need, part) for need in find(name).needs)

    def _knows(self, need: str, part: Defense | type[Defense]) -> bool:
        if need == "earlier":
            return self.knowledge.momentum is not None and self.alike
        if need in PUBLIC or need == "transform" or part in self.unsure:
            return True
        return getattr(self.knowledge, need) is not None


def _tells(part: Defense) -> bool:
    """Whether the part can tell what it does without a model."""
    try:
        told_knowledge(part, Knowledge(), nn.Module())
    except RAISED:  # by whatever it misses in the model: the class may be anyone's
        return False
    return True


def _check_breakers(part: Defense | type[Defense]) -> None:
    for name in (*part.breakers, *part.strongest, *filter(None, part.instead)):
        try:
            find(name)
        except GradveilError as error:
            raise GradveilError(f"defense {part} declares a breaker: {error}") from None


def _rank(name: str) -> int:
    """Return the position of an attack in a combined name, whatever the order of the chain."""
    needs, order = find(name).needs, list(MEANINGS)
    return min((order.index(need) for need in needs if need in MEANINGS), default=len(order))


def _can_unite(names: Sequence[str]) -> bool:
    try:
        find("+".join(names))
    except GradveilError:
        return False
    return True


def _joined(names: Sequence[str]) -> str:
    """Write the name of a combined attack, without its last parts where it would be too long."""
    found = "+".join(names)
    return found if len(found) <= LONGEST else _joined(names[:-1])


def _drawing_like(model: nn.Module, train_mode: bool) -> list[type[Defense]]:
    """Return the defenses that draw as the model does by itself."""
    with in_mode(model, train_mode):
        drawn = list(drawing(model).values())
    kinds: list[type[Defense]] = []
    if any(isinstance(module, Draw) for module in drawn):
        kinds.append(Precode)
    if any(isinstance(module, DROPOUTS) for module in drawn):
        kinds.append(DropoutDefense)
    return kinds


def without_name(name: str, reason: str) -> str:
    """Return why an attack does not suit, for a line that begins with the attack's name."""
    start = f"attack {name} "
    return f"it {reason.removeprefix(start)}" if reason.startswith(start) else reason


def check_told(name: str, attack: Attack, seen: Sequence[Observation]) -> None:
    """Refuse an attack, by its name, that needs what is not known under this defense."""
    for need in attack.needs:
        known = all(getattr(victim.knowledge, need) is not None for victim in seen)
        if known or need in PUBLIC or need not in MEANINGS:
            continue
        under = [
            kind.name
            for kind in REGISTRY.values()
            if any(need in find(breaker).needs for breaker in kind.breakers)
        ]
        meaning = MEANINGS[need]
        places = [f"under {' or '.join(under)}"] if under else []
        places += [meaning.where] if meaning.where else []
        raise GradveilError(
            f"attack {name} needs to know the {need} ({meaning.long}), which is known only "
            f"{', '.join(places)}"
        )


def rounds(defense: Defense, attacks: Iterable[Attack]) -> int:
    """Count how often each victim shares its batch.

    That is several times only where residuals are fed back, rounds add up and an attack looks at
    them.
    """
    told = _Told.of(defense, defense.parts()).knowledge
    several = told.momentum is not None and any("earlier" in attack.needs for attack in attacks)
    return ROUNDS if several else 1


def granted(seen: Observation, attack: Attack, means: Tensor | None) -> Observation:
    """Return the observation with the labels and the knowledge that the attack needs, no more.

    Of several rounds it sees the first, unless it needs the earlier ones.
    """
    full = replace(seen.knowledge, means=means)
    told = Knowledge(
        full.labels, **{name: getattr(full, name) for name in attack.needs if name != "labels"}
    )
    if "earlier" in attack.needs:
        return replace(seen, knowledge=replace(told, momentum=full.momentum))
    first = full.earlier[0] if full.earlier else seen.gradients
    return replace(seen, gradients=first, knowledge=told)


def in_words(attack: Attack, defense: Defense, model: nn.Module, size: int, labels: str) -> str:
    """Say what the attack is told of a victim of `size` images, as `labels, what is pruned`."""
    told = told_knowledge(defense, Knowledge(torch.zeros(size, dtype=torch.long)), model)
    words = ["labels" if labels == "known" else "labels it inferred"]
    for name in dict.fromkeys(attack.needs):
        if name == "noise" and told.noise is not None:
            kind, scale = told.noise
            words.append(f"{kind} noise {scale:g}")
        elif name == "earlier":
            words.append(f"{ROUNDS} rounds")
        elif name in MEANINGS:
            words.append(MEANINGS[name].short)
    return ", ".join(words)
