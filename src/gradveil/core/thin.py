"""Products of thin matrices, many at once."""

import torch
from torch import Tensor


def thin_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right for each of many pairs: on a CPU torch's batched product takes up to fifty times as long as one after the other."""
    if left.is_cuda:
        return torch.bmm(left, right)
    found = left.new_empty(len(left), left.shape[1], right.shape[2])
    for a, b, out in zip(left, right, found, strict=True):
        torch.mm(a, b, out=out)
    return found
