"""A fingerprint of tensors: the same for the same names, types, shapes and values."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hexadecimal digits."""
    hashed = hashlib.sha256()
    for name, value in tensors.items():
        hashed.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hashed.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
