"""Invert a first linear layer in closed form: its gradient contains the image."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.distances import cosine
from gradveil.attacks.hidden_draws import FreshDraws
from gradveil.attacks.labels import Known, SingleLabel
from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation, Reconstruction
from gradveil.engine.gradients import pixel_frame
from gradveil.engine.shares import Shares

GRAY = 0.5
DEAD = "failed: no unit of the first layer has a bias gradient that is finite and not zero"


@dataclass(frozen=True)
class LinearInversion(Attack):
    """Solve dW_i = db_i x for the input x of a first linear layer y = W x + b.

    All units with db_i != 0 are used, x = sum_i db_i dW_i / sum_i db_i^2. This is the least-squares
    solution: it averages rounding and noise, and trusts a unit by the square of its db_i. An entry
    of dW that pruning set to zero gives no equation, so each input has a sum of db_i^2 over the
    entries left. Works for one image and one local step; more would mix images.
    """

    easy_model: ClassVar[str] = "mlp"

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        first = seen[0]
        _check_one_image(first)
        weight, bias = find_first_layer(first, "linear inversion")
        mean, std = pixel_frame(first.model, first.image_shape)
        fresh = FreshDraws(first, (), rng)
        shares = Shares(first.model, first.loss, first.protocol, told=fresh.shapes)
        found = []
        for done, victim in enumerate(seen, 1):
            z = solve(victim.gradients[weight], victim.gradients[bias])
            images = z.view(1, *victim.image_shape) * std + mean
            found.append(measured(victim, images, shares, fresh, rng, DEAD))
            progress(done, len(seen))
        return found

    def __str__(self) -> str:
        return "linear inversion"


def solve(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the least-squares x of weight = bias x^T over the entries of weight that are not zero.

    Zeros are taken as cut off, whoever made them. A zero that was not cut off belongs to an input
    that is zero; then its whole column is zero, and so is the x returned. x is not finite where no
    entry of bias is usable.
    """
    largest = bias.abs().max()
    scaled = bias / largest  # squares of tiny entries would vanish
    cut = scaled.square() @ (weight == 0).to(weight)
    kept = torch.where(cut == 0, scaled @ scaled, scaled.square() @ (weight != 0).to(weight))
    return torch.where(kept == 0, 0.0, (scaled @ weight) / kept / largest)


def measured(
    victim: Observation,
    images: Tensor,
    shares: Shares,
    fresh: FreshDraws,
    rng: Generator,
    failed: str,
) -> Reconstruction:
    """Return images with their gradient's distance, which takes labels: known or inferred ones.

    Images that are not finite were not found; `failed` says why.
    """
    if not bool(images.isfinite().all()):
        gray = torch.full_like(images, GRAY).cpu()
        return Reconstruction(gray, victim.knowledge.labels, math.inf, failed)
    images = images.clamp(0, 1)
    finder = SingleLabel() if victim.knowledge.labels is None else Known()
    labels = finder.bind([victim], rng)
    shared = shares(images[None], labels.to(images.device), draws=fresh(1))
    distance = float(cosine.bind([victim])(shared))
    return Reconstruction(
        images.cpu(), labels[0].cpu(), distance if math.isfinite(distance) else math.inf
    )


def _check_one_image(victim: Observation) -> None:
    if victim.size != 1:
        raise GradveilError(
            f"batch of {victim.size}: linear inversion finds one image; choose a matching attack"
        )
    if victim.protocol.moves(victim.size):
        raise GradveilError(
            f"{victim.protocol.in_words(victim.size)}: linear inversion needs the gradient of 1; "
            "choose a matching attack"
        )


def find_first_layer(victim: Observation, attack: str) -> tuple[str, str]:
    """Return the names of weight and bias of the first layer; it must take the whole image.

    `attack` is who asks, for the message where it does not.
    """
    width = math.prod(victim.image_shape)
    name, layer = next(
        (name, module)
        for name, module in victim.model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    )
    if not isinstance(layer, nn.Linear) or layer.in_features != width:
        raise GradveilError(
            f"the first layer, {name!r}, is of type {type(layer).__name__}: "
            f"{attack} needs nn.Linear with {width} inputs there"
        )
    prefix = f"{name}." if name else ""
    weight, bias = f"{prefix}weight", f"{prefix}bias"
    absent = [parameter for parameter in (weight, bias) if parameter not in victim.gradients]
    if absent:
        raise GradveilError(
            f"{' and '.join(absent)} has no gradient: {attack} needs the first layer's weight "
            "and bias"
        )
    return weight, bias
