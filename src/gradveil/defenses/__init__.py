"""Defenses: what a client does to its model, images and gradients before it shares them."""

from gradveil.defenses.base import Defense, Moment, Seam, State
from gradveil.defenses.chain import Chain, chain
from gradveil.defenses.dpsgd import DPSGD, Clipping
from gradveil.defenses.dropout import DropoutDefense
from gradveil.defenses.noise import GaussianNoise, LaplacianNoise
from gradveil.defenses.policies import PolicyDefense, RandomPolicies
from gradveil.defenses.precode import Precode
from gradveil.defenses.pruning import FeedbackPruning, Pruning
from gradveil.defenses.registry import REGISTRY, as_defense, assessed_defenses, parse
from gradveil.defenses.soteria import Soteria

__all__ = [
    "DPSGD",
    "REGISTRY",
    "Chain",
    "Clipping",
    "Defense",
    "DropoutDefense",
    "FeedbackPruning",
    "GaussianNoise",
    "LaplacianNoise",
    "Moment",
    "PolicyDefense",
    "Precode",
    "Pruning",
    "RandomPolicies",
    "Seam",
    "Soteria",
    "State",
    "as_defense",
    "assessed_defenses",
    "chain",
    "parse",
]
