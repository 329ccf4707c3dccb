"""What a curious server does with what clients share: one optimizer attack with many presets, a closed form, blind guesses."""

from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.matching import GradientMatching
from gradveil.attacks.presets import PRESETS, find, names

__all__ = ["PRESETS", "Attack", "GradientMatching", "Progress", "find", "names"]
