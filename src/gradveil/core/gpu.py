"""Whether gradveil's own GPU kernels can be used, and the module that holds them, imported only then."""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor


def suits(tensor: Tensor) -> bool:
    """On a GPU, with Triton, in a format of at most 32 bits: the kernels add up in float32."""
    return tensor.is_cuda and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and _has_triton()


def kernels() -> ModuleType:
    from gradveil.core import kernels

    return kernels


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
