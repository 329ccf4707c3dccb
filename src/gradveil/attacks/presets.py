"""The published attacks by name, each a composition of parts (settings: the papers' and their code's, side by side in the docs)."""

from dataclasses import replace

from gradveil.attacks.analytic import LinearInversion
from gradveil.attacks.base import Attack
from gradveil.attacks.distances import cosine, l1, l2
from gradveil.attacks.initial import Patterned
from gradveil.attacks.lbfgs import LBFGS
from gradveil.attacks.matching import GradientMatching
from gradveil.attacks.optimizers import SGD, Adam
from gradveil.attacks.priors import LabelTerm, TotalVariation
from gradveil.core.errors import unknown

TV = TotalVariation(1e-4)
# A line search needs full precision: with a GPU's shorter formats it stopped at a median of 14 dB (32 images), in float32 on a CPU at 38.
SECOND_ORDER = GradientMatching(l2, LBFGS(1.0), steps=300, boxed=False, decay=False, fast=False)

PRESETS: dict[str, Attack] = {
    # Geiping et al. 2020 ("inversed") as Gao et al. 2021 use it, and with the defaults of their code.
    "adam-cosine": GradientMatching(cosine, Adam(0.1), TV, steps=4_800, signed=True),
    "ig-default": GradientMatching(cosine, Adam(0.1), TotalVariation(1e-1), steps=4_800),
    # As published, at a learning rate that hardly moves ("zhu"): kept to show it.
    "lbfgs-l2": GradientMatching(l2, LBFGS(1e-4, line_search=False), TotalVariation(1e-3), steps=50, restarts=2, boxed=False, decay=False),
    "lbfgs-cosine": GradientMatching(cosine, LBFGS(1e-4, line_search=False), TV, steps=300, restarts=16, signed=True, decay=False),
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


def names() -> tuple[str, ...]:
    return tuple(PRESETS)


def find(name: str) -> Attack:
    if name not in PRESETS:
        raise unknown("attack", name, PRESETS)
    return PRESETS[name]
