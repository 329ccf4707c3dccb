"""The image in closed form, from the gradient of a first linear layer with a bias: nothing to search for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.distances import cosine
from gradveil.attacks.hidden_draws import FreshDraws
from gradveil.attacks.labels import Known, SingleLabel
from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation, Reconstruction, stacked
from gradveil.engine.gradients import pixel_frame
from gradveil.engine.shares import Shares

GREY = 0.5
DEAD = "failed: no unit of the first layer has a bias gradient that is finite and not zero"


@dataclass(frozen=True)
class LinearInversion(Attack):
    """With y = W x + b, unit i has dW_i = db_i x: any unit with db_i != 0 gives back the input.

    All active units are used, x = sum_i db_i dW_i / sum_i db_i^2. That is the least-squares solution: it averages rounding and
    noise, and trusts a unit by the square of its db_i. An entry of dW that pruning set to zero gives no equation: each input has
    its own sum of db_i^2. For batches of one image and one local step; more would mix images.
    """

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        first = seen[0]
        _check_one_image(first)
        weight, bias = _first_layer(first)
        mean, std = pixel_frame(first.model, first.image_shape)
        fresh = FreshDraws(first, (), rng)
        shares = Shares(first.model, first.loss, first.protocol, told=fresh.shapes)
        found = []
        for done, one in enumerate(seen, 1):
            z = solve(one.gradients[weight], one.gradients[bias])
            found.append(_judged(one, z.view(1, *one.image_shape) * std + mean, shares, fresh, rng))
            progress(done, len(seen))
        return found

    def __str__(self) -> str:
        return "linear inversion"


def solve(weight: Tensor, bias: Tensor) -> Tensor:
    """The x with weight = bias x^T in the sense of least squares over the entries of weight that are not zero.

    Zeros are seen, so nobody has to tell that they were cut off. One that was not is of an input that is zero, and so are all in
    its column: x is zero there. It is not finite where no bias entry is usable.
    """
    largest = bias.abs().max()
    scaled = bias / largest  # squares of tiny entries would vanish
    cut = scaled.square() @ (weight == 0).to(weight)
    kept = torch.where(cut == 0, scaled @ scaled, scaled.square() @ (weight != 0).to(weight))
    return torch.where(kept == 0, 0.0, (scaled @ weight) / kept / largest)


def _judged(
    one: Observation, images: Tensor, shares: Shares, fresh: FreshDraws, rng: Generator
) -> Reconstruction:
    """With its distance, which takes a label: the known one, else the one that the last layer gives away."""
    if not bool(images.isfinite().all()):
        return Reconstruction(
            torch.full_like(images, GREY).cpu(), one.knowledge.labels, math.inf, DEAD
        )
    images = images.clamp(0, 1)
    finder = SingleLabel() if one.knowledge.labels is None else Known()
    labels = finder.infer([one], rng)
    shared = shares(images[None], labels.to(images.device), draws=fresh(1))
    distance = float(cosine.against(stacked([one]))(shared))
    return Reconstruction(
        images.cpu(), labels[0].cpu(), distance if math.isfinite(distance) else math.inf
    )


def _check_one_image(one: Observation) -> None:
    if one.size != 1:
        raise GradveilError(
            f"batch of {one.size}: linear inversion finds one image; choose a matching attack"
        )
    if one.protocol.local_steps != 1:
        raise GradveilError(
            f"{one.protocol.local_steps} local steps: linear inversion needs the gradient of 1; choose a matching attack"
        )


def _first_layer(one: Observation) -> tuple[str, str]:
    """The names of weight and bias of the first module that holds parameters, if it is a linear layer that takes the whole image."""
    width = math.prod(one.image_shape)
    name, layer = next(
        (name, m)
        for name, m in one.model.named_modules()
        if any(True for _ in m.parameters(recurse=False))
    )
    if not isinstance(layer, nn.Linear) or layer.in_features != width:
        raise GradveilError(
            f"the first layer, {name!r}, is of type {type(layer).__name__}: linear inversion needs nn.Linear with {width} inputs there"
        )
    prefix = f"{name}." if name else ""
    weight, bias = f"{prefix}weight", f"{prefix}bias"
    absent = [parameter for parameter in (weight, bias) if parameter not in one.gradients]
    if absent:
        raise GradveilError(
            f"{' and '.join(absent)} has no gradient: linear inversion needs the first layer's weight and bias"
        )
    return weight, bias
