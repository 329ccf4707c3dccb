"""What a GPU may do: gradveil's own kernels, imported only where they can be used, and shorter number formats."""

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """TF32 for products and convolutions, or not, for a while."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if not torch.cuda.is_available():
        yield
        return
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags
