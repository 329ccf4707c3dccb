"""The model that a client received: does it have weights that no honest training gives?"""

from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradveil.clients import check_weights
from gradveil.core.errors import GradveilError
from gradveil.engine.calls import after_use

LAYERS = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d
ALIKE = 0.9999  # cosine of the weights of two units that are copies of each other
COPIES = {32: 0.05, 4: 0.25}
"""Weights of a unit, at least, and the share of a layer's units that may be copies.

With few weights some units point the same way by chance; with many, honest trainings gave no
copies. Linear layers of fewer than 32 inputs see no image, and are those of adapters (LoRA).
"""
FEW = 8  # units of a layer that is too small to judge
DEAD = 0.5  # share of the classes whose units may be dead
ENOUGH = 64  # units of a layer whose sums are compared
NEGATIVE = 0.02  # share of a layer's inputs, by their size, that may be negative there
CROWDED = {0.25: 0.15, 0.5: 0.5}
"""Share of a layer's units, and the width of an interval that holds so many of their sums.

Independent weights give widths about 0.64 and 1.35. Of 64 normal numbers they are below 0.21 and
0.64 once in 10,000 draws.
"""


def suspicion(model: nn.Module, images: Tensor) -> str | None:
    """Say what of a model's weights no honest training gives; None where nothing is found.

    A dishonest server needs units that measure the same with different thresholds (imprinting: Fowl
    et al. 2021, Robbing the Fed), or units that few images reach (trap weights: Boenisch et al.
    2021, When the Curious Abandon Honesty). The former are copies of each other. The latter have
    weights whose sums are set, and so nearly equal: on inputs that are never negative, a sum that
    is left to chance decides by itself whether a unit answers to all images or to none. How often
    units answer tells nothing: those of honest trainings often answer to few images too.

    The last layer, whose outputs are the answers, has no thresholds behind it. From zero weights
    honest training makes copies of its units there, one for each class not seen yet. What it does
    not do is to leave most of them at zero and others not, which lets a server ask for one class
    (Wen et al. 2022, Fishing for User Data). Elsewhere dead units come from pruning and from weight
    decay, and separate no images.

    `images` (N, C, H, W) in [0, 1] show which layer is the last, and which layers get inputs that
    are hardly ever negative.
    """
    try:
        check_weights(model)
    except GradveilError as error:
        return str(error)
    seen = _passed(model, images)
    for name, passed in seen.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, LAYERS)
        rows = layer.weight.detach().flatten(1).double()
        linear = isinstance(layer, nn.Linear)
        found = dead(rows) if passed.last else copies(rows, linear)
        if found:
            words = "dead" if passed.last else "copies of others"
            return f"{found} of {len(rows)} units of layer {name!r} are {words}"
        if linear and not passed.last and passed.negative <= NEGATIVE and (share := _crowded(rows)):
            return (
                f"the weights of at least {share:.0%} of the {len(rows)} units of layer {name!r} "
                "have nearly the same sum, as trap weights do"
            )
    return None


def copies(rows: Tensor, linear: bool) -> int:
    """Count the units, by their rows of weights, that are copies; 0 where these are few."""
    alive, weights = _alive(rows), rows.shape[1]
    least = max(COPIES) if linear else min(COPIES)
    if len(alive) < FEW or weights < least:
        return 0
    unit = alive / alive.norm(dim=1, keepdim=True)
    count = int(((unit @ unit.T).fill_diagonal_(0).amax(1) > ALIKE).sum())
    allowed = next(share for given, share in COPIES.items() if weights >= given)
    return count if count > max(2, allowed * len(alive)) else 0


def dead(rows: Tensor) -> int:
    """Count the units, by their rows of weights, that are zero; 0 where these are few, or all."""
    count = len(rows) - len(_alive(rows))
    return count if len(rows) >= FEW and DEAD * len(rows) < count < len(rows) else 0


def _alive(rows: Tensor) -> Tensor:
    norms = rows.norm(dim=1)
    return rows[norms > 1e-6 * norms.max()]


def _crowded(rows: Tensor) -> float | None:
    """Return the share of units whose weights have nearly the same sum, where that is no chance.

    A sum is measured in the norm of the weights, so that independent ones give about a normal law.
    """
    alive = _alive(rows)
    sums = (alive.sum(1) / alive.norm(dim=1)).sort().values
    if len(sums) < ENOUGH:
        return None
    for share, width in CROWDED.items():
        count = int(share * len(sums))
        if float((sums[count:] - sums[:-count]).min()) < width:
            return share
    return None


class Passed(NamedTuple):
    """A pass through a layer: the share of its inputs that is negative, and if it is the last."""

    negative: float
    last: bool


def _passed(model: nn.Module, images: Tensor) -> dict[str, Passed]:
    """Pass the images through the model in eval mode, and look at its layers, by name."""
    negative: dict[str, float] = {}
    shapes: dict[str, torch.Size] = {}
    example = next(model.parameters())
    with ExitStack() as hooks, torch.no_grad():
        for name, layer in model.named_modules():
            if not isinstance(layer, LAYERS):
                continue

            def look(_: nn.Module, given: Tensor, made: Tensor, name: str = name) -> None:
                below, size = given.clamp(max=0).abs().sum(), given.abs().sum()
                share = float(below / size) if size else 0.0
                negative[name] = max(negative.get(name, 0.0), share)
                shapes[name] = made.shape

            hooks.callback(after_use(layer, look).remove)
        answers = model.eval()(images.to(example))
    return {name: Passed(share, shapes[name] == answers.shape) for name, share in negative.items()}
