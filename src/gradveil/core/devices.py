"""Where to compute."""

import torch

from gradveil.core.errors import GradveilError, unknown

CHOICES = ("auto", "cpu", "cuda")


def find_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name not in CHOICES:
        raise unknown("device", name, CHOICES)
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise GradveilError("device cuda: this torch sees no GPU; choose cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and there) else "cpu")
