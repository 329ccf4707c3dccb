"""Which attacks are known to undo which defence, what an attacker may know of one, and how that is put in words."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from gradveil.attacks import Attack
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
)

AUTO = "auto"
STANDARD = "adam-cosine"
ROUNDS = 4  # that a client whose residuals are fed back shares of one batch, where an attack looks at several

OF_POLICIES = ("early-step", "transform-known", "transform-drawn", "transform-guessed", "class-mean")
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

WORDS = {
    "transform": "policy and its draws",
    "policy": "policy",
    "means": "class means",
    "random_layers": "random layers",
    "defended_layers": "defended layers",
    "pruned": "what is pruned",
    "train_masks": "dropout is on",
}


def automatic(defense: Defense) -> tuple[str, ...]:
    """The attacks of `auto`: the standard one, the breakers of each part of the defence, and the closed form."""
    breakers = (name for part in defense.parts() for name in BREAKERS[type(part)])
    return tuple(dict.fromkeys((STANDARD, *breakers, "closed-form")))


def rounds(defense: Defense, attacks: Iterable[Attack]) -> int:
    """How often each victim shares: several times only where residuals are fed back and an attack looks at that."""
    fed_back = any(isinstance(part, FeedbackPruning) for part in defense.parts())
    return ROUNDS if fed_back and any("earlier" in attack.needs for attack in attacks) else 1


def granted(one: Observation, attack: Attack, means: Tensor) -> Observation:
    """What this attacker sees: the labels, what the attack needs of the rest, and nothing more.

    Of several rounds it sees the first, unless it needs the earlier ones.
    """
    full = replace(one.knowledge, means=means)
    told = Knowledge(full.labels, **{name: getattr(full, name) for name in attack.needs if name != "labels"})
    if "earlier" in attack.needs:
        return replace(one, knowledge=replace(told, momentum=full.momentum))
    return replace(one, gradients=full.earlier[0] if full.earlier else one.gradients, knowledge=told)


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
