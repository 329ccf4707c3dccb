"""The Triton kernels: which tensors they can take, and loading them when they are needed."""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor


def suits(tensor: Tensor) -> bool:
    """Tell whether the kernels can take it: on a GPU, with Triton, in at most 32 bits a number.

    They add up in float32.
    """
    return (
        tensor.is_cuda
        and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and _has_triton()
    )


def suits_short(tensor: Tensor) -> bool:
    """Tell whether the kernels that multiply maps where they lie can take it: in bf16 alone."""
    return tensor.dtype == torch.bfloat16 and suits(tensor)


def load_kernels() -> ModuleType:
    """Import the Triton kernels, which a machine without a GPU may lack."""
    from gradveil.engine import kernels as kernels

    return kernels


def load_convolution_kernels() -> ModuleType:
    """Import the Triton kernels of convolutions."""
    from gradveil.engine import convolution_kernels as kernels

    return kernels


def load_norm_kernels() -> ModuleType:
    """Import the Triton kernels of normalization by the statistics of each victim."""
    from gradveil.engine import norm_kernels as kernels

    return kernels


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
