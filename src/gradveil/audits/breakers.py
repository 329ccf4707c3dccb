"""Which attacks are known to undo which defence, what an attacker may know of one, and how that is put in words."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gradveil.attacks import Attack
from gradveil.core.errors import GradveilError
from gradveil.core.types import WORDS as MEANINGS
from gradveil.core.types import Knowledge, Observation
from gradveil.defenses import (
    DPSGD,
    Clipping,
    Defense,
    DropoutDefense,
    FeedbackPruning,
    GaussianNoise,
    LaplacianNoise,
    PolicyDefense,
    Precode,
    Pruning,
    RandomPolicies,
    Soteria,
    chain,
)
from gradveil.engine.draws import DROPOUTS, Draw, drawing
from gradveil.engine.gradients import in_mode

AUTO = "auto"
STANDARD = "adam-cosine"
LONGEST = 128  # letters of an attack's name
ROUNDS = 4  # that a client whose residuals are fed back shares of one batch, where an attack looks at several

OF_POLICIES = (
    "early-step",
    "transform-known",
    "transform-drawn",
    "transform-guessed",
    "class-mean",
)
OF_NOISE = ("likelihood", "averaged")
BREAKERS: dict[type[Defense], tuple[str, ...]] = {
    Defense: (),
    PolicyDefense: OF_POLICIES,
    RandomPolicies: OF_POLICIES,
    Pruning: ("masked",),
    FeedbackPruning: ("masked", "masked-rounds"),
    GaussianNoise: OF_NOISE,
    LaplacianNoise: OF_NOISE,
    Clipping: (),  # a cosine does not see the length
    DPSGD: OF_NOISE,
    Soteria: ("without-defended-layers",),
    Precode: ("without-random-layers", "joint-noise"),
    DropoutDefense: ("without-random-layers", "joint-masks"),
}

PUBLIC = ("labels", "means")
"""Knowledge that no defence has to give away."""

UNDER = {
    "transform": "a policy",
    "policy": "a policy",
    "random_layers": "a defense or model that draws: precode, dropout, or train mode with dropout layers",
    "defended_layers": "soteria",
    "pruned": "a defense that prunes, and adds no noise after that",
    "noise": "a defense that adds noise: gaussian, laplacian, dp",
    "train_masks": "dropout, as a defense or in train mode",
    "earlier": "prune-feedback, where nothing after it clips, prunes or adds noise",
}
"""Where knowledge comes from."""

WORDS = {
    "transform": "policy and its draws",
    "policy": "policy",
    "means": "class means",
    "random_layers": "random layers",
    "defended_layers": "defended layers",
    "pruned": "what is pruned",
    "train_masks": "dropout is on",
}


def automatic(
    defense: Defense, model: nn.Module | None = None, train_mode: bool = False
) -> tuple[str, ...]:
    """The attacks of `auto`: the standard one, the breakers of each part of the defence and all in one, and the closed form.

    Where the model draws by itself in this mode, that counts as a part.
    """
    kinds = [
        *map(type, defense.parts()),
        *([] if model is None else _drawing_like(model, train_mode)),
    ]
    breakers = (name for kind in kinds for name in BREAKERS.get(kind, ()))
    return tuple(dict.fromkeys((STANDARD, *breakers, *combinations(defense, kinds), "closed-form")))


def combinations(defense: Defense, kinds: Sequence[type[Defense]]) -> list[str]:
    """Of the strongest breakers of several parts, as far as each can be told of its part: all in one search.

    Once more without the policy, for the images as they were used, and with a bottleneck's draws looked for in place of its layers left
    out: which of the two is stronger depends on the model. A round of a model that draws is like no other, so rounds are not
    added up there.
    """
    known = _told_of_gradients(defense)
    several = known.momentum is not None and not {Precode, DropoutDefense} & {*kinds}
    wanted = {
        "transform-known": bool({PolicyDefense, RandomPolicies} & {*kinds}),
        "without-random-layers": Precode in kinds,
        "joint-masks": DropoutDefense in kinds,
        "masked-rounds": several,
        "masked": bool(known.pruned) and not several,
        "likelihood": known.noise is not None,
        "without-defended-layers": Soteria in kinds,
    }
    names = [name for name, there in wanted.items() if there]
    choices = [names, [name for name in names if name != "transform-known"]]
    if Precode in kinds and DropoutDefense not in kinds:  # one search has one kind of draws
        choices += [
            ["joint-noise" if name == "without-random-layers" else name for name in some]
            for some in choices
        ]
    return list(dict.fromkeys(_one_name(some) for some in choices if len(some) > 1))


def _told_of_gradients(defense: Defense) -> Knowledge:
    """Of what is done to gradients, whatever the model; Soteria has to see one."""
    parts = [
        part
        for part in defense.parts()
        if part.acts_on == "gradients" and not isinstance(part, Soteria)
    ]
    return chain(parts).tell(Knowledge(), nn.Module())


def _one_name(names: Sequence[str]) -> str:
    """Without the last ones where the name would be too long for an audit's."""
    found = "+".join(names)
    return found if len(found) <= LONGEST else _one_name(names[:-1])


def _drawing_like(model: nn.Module, train_mode: bool) -> list[type[Defense]]:
    """The defences that draw as the model does by itself."""
    with in_mode(model, train_mode):
        drawn = list(drawing(model).values())
    masks = any(isinstance(module, DROPOUTS) for module in drawn)
    normal = any(isinstance(module, Draw) for module in drawn)
    return [kind for kind, there in ((Precode, normal), (DropoutDefense, masks)) if there]


def check_told(name: str, attack: Attack, seen: Sequence[Observation]) -> None:
    """An error that names the attack, where it needs what is not known under this defence."""
    for need in attack.needs:
        if any(getattr(one.knowledge, need) is None for one in seen) and need in UNDER:
            raise GradveilError(
                f"attack {name} needs to know the {need} ({MEANINGS[need]}), which is known only under {UNDER[need]}"
            )


def rounds(defense: Defense, attacks: Iterable[Attack]) -> int:
    """How often each victim shares: several times only where residuals are fed back, rounds add up and an attack looks at that."""
    return (
        ROUNDS
        if _told_of_gradients(defense).momentum is not None
        and any("earlier" in attack.needs for attack in attacks)
        else 1
    )


def granted(one: Observation, attack: Attack, means: Tensor | None) -> Observation:
    """What this attacker sees: the labels, what the attack needs of the rest, and nothing more.

    Of several rounds it sees the first, unless it needs the earlier ones.
    """
    full = replace(one.knowledge, means=means)
    told = Knowledge(
        full.labels, **{name: getattr(full, name) for name in attack.needs if name != "labels"}
    )
    if "earlier" in attack.needs:
        return replace(one, knowledge=replace(told, momentum=full.momentum))
    return replace(
        one, gradients=full.earlier[0] if full.earlier else one.gradients, knowledge=told
    )


def in_words(attack: Attack, defense: Defense, model: nn.Module, size: int, labels: str) -> str:
    """Such as `labels, gaussian noise 0.01`: what the attack is given of a victim with `size` images."""
    told = defense.tell(Knowledge(torch.zeros(size, dtype=torch.long)), model)
    words = ["labels" if labels == "known" else "labels it inferred"]
    for name in dict.fromkeys(attack.needs):
        if name == "noise" and told.noise is not None:
            kind, scale = told.noise
            words.append(f"{kind} noise {scale:g}")
        elif name == "earlier":
            words.append(f"{ROUNDS} rounds")
        elif name in WORDS:
            words.append(WORDS[name])
    return ", ".join(words)
