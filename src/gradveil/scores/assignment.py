"""Which reconstruction of a batch belongs to which image: the gradient of a batch does not say."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.scores.images import pair

WORST = 1e12  # above any error of real images; the solver takes neither NaN nor infinity


def assign(found: Tensor, truth: Tensor) -> Tensor:
    """Indices such that `found[assign(found, truth)]` lines up with `truth`, with the least total squared error.

    Both are one victim's batch, (B, C, H, W). A reconstruction with NaN or infinity is as far as can be from every image.
    """
    moved, fixed = pair(found, truth)
    distance = torch.cdist(fixed.flatten(1), moved.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    cost = distance.square().nan_to_num(nan=WORST, posinf=WORST).clamp(max=WORST)
    _, order = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(order, dtype=torch.long, device=found.device)
