"""Image transformations: 50 batched functions, policies made of them, and crop and flip."""

from gradveil.transforms.library import LIBRARY, OPERATIONS
from gradveil.transforms.policy import Policy, Transform
from gradveil.transforms.preparation import Preparation

__all__ = ["LIBRARY", "OPERATIONS", "Policy", "Preparation", "Transform"]
