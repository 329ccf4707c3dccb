"""The model that a client received: does it have weights that no honest training gives?"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.clients import check_weights
from gradveil.core.errors import GradveilError

ALIKE = 0.9999  # cosine of the weights of two units that are copies of each other
COPIES = 0.25  # share of a layer's units that may be copies, or dead
FEW = 8  # units of a layer that is too small to judge
ENOUGH = 64  # units of a layer whose sums are compared
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

    `images` (N, C, H, W) in [0, 1] show which layers get inputs that are never negative.
    """
    try:
        check_weights(model)
    except GradveilError as error:
        return str(error)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            rows = module.weight.detach().flatten(1).double()
            if len(rows) >= FEW and (found := _dead_or_copied(rows)) is not None:
                return f"{found[0]} of {len(rows)} units of layer {name!r} are {found[1]}"
    for name, module in _without_negative_inputs(model, images):
        rows = module.weight.detach().double()
        if (share := _crowded(rows)) is not None:
            return (
                f"the weights of at least {share:.0%} of the {len(rows)} units of layer {name!r} "
                "have nearly the same sum, as trap weights do"
            )
    return None


def _dead_or_copied(rows: Tensor) -> tuple[int, str] | None:
    """Count the units, by their rows of weights, that are dead or copies where these are many."""
    norms = rows.norm(dim=1)
    dead = norms <= 1e-6 * norms.max()
    if int(dead.sum()) > COPIES * len(rows):
        return int(dead.sum()), "dead"
    if rows.shape[1] < 2:
        return None  # units of one weight all point the same way
    unit = rows[~dead] / norms[~dead, None]
    likeness = (unit @ unit.T).fill_diagonal_(0).amax(1)
    copies = int((likeness > ALIKE).sum())
    return (copies, "copies of others") if copies > COPIES * len(rows) else None


def _crowded(rows: Tensor) -> float | None:
    """Return the share of units whose weights have nearly the same sum, where that is no chance.

    A sum is measured in the norm of the weights, so that independent ones give about a normal law.
    """
    norms = rows.norm(dim=1)
    alive = norms > 1e-6 * norms.max()
    sums = (rows[alive].sum(1) / norms[alive]).sort().values
    if len(sums) < ENOUGH:
        return None
    for share, width in CROWDED.items():
        count = int(share * len(sums))
        if float((sums[count:] - sums[:-count]).min()) < width:
            return share
    return None


def _without_negative_inputs(model: nn.Module, images: Tensor) -> Iterator[tuple[str, nn.Linear]]:
    """Give the larger linear layers that get no negative number from these images, by name."""
    lowest: dict[str, float] = {}
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features >= ENOUGH
    }
    if not layers:
        return
    example = next(model.parameters())
    with ExitStack() as hooks, torch.no_grad():
        for name, layer in layers.items():

            def look(_: nn.Module, given: tuple[Any, ...], name: str = name) -> None:
                lowest[name] = min(lowest.get(name, 0.0), float(given[0].min()))

            hooks.callback(layer.register_forward_pre_hook(look).remove)
        model.eval()(images.to(example))
    yield from ((name, layer) for name, layer in layers.items() if lowest.get(name) == 0)
