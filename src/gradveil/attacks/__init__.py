"""Attacks: reconstruct images from what clients share.

Every named attack is a constant here: `gradveil.attacks.dlg(shared.seen, seed=1)`. To change a
setting, `dataclasses.replace(gradveil.attacks.dlg, steps=300)`.
"""

from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.matching import GradientMatching
from gradveil.attacks.presets import (
    PRESETS,
    adam_cosine,
    adam_l1,
    adam_l2,
    averaged,
    class_mean,
    closed_form,
    cpl,
    dlg,
    early_step,
    find,
    ig_default,
    iga,
    joint_masks,
    joint_noise,
    lbfgs_cosine,
    lbfgs_l2,
    likelihood,
    masked,
    masked_rounds,
    names,
    raced,
    sgd_cosine,
    transform_drawn,
    transform_guessed,
    transform_known,
    without_defended_layers,
    without_random_layers,
)
from gradveil.attacks.races import Race

__all__ = [
    "PRESETS",
    "Attack",
    "GradientMatching",
    "Progress",
    "Race",
    "adam_cosine",
    "adam_l1",
    "adam_l2",
    "averaged",
    "class_mean",
    "closed_form",
    "cpl",
    "dlg",
    "early_step",
    "find",
    "ig_default",
    "iga",
    "joint_masks",
    "joint_noise",
    "lbfgs_cosine",
    "lbfgs_l2",
    "likelihood",
    "masked",
    "masked_rounds",
    "names",
    "raced",
    "sgd_cosine",
    "transform_drawn",
    "transform_guessed",
    "transform_known",
    "without_defended_layers",
    "without_random_layers",
]
