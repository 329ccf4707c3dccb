"""Invert a network of dense layers for a whole batch, layer by layer from the last one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Generator

from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.features import check_model, find_features
from gradveil.attacks.hidden_draws import FreshDraws
from gradveil.attacks.linear import find_first_layer, measured
from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation, Reconstruction
from gradveil.engine.gradients import pixel_frame
from gradveil.engine.shares import Shares


@dataclass(frozen=True)
class DenseInversion(Attack):
    """Solve for the inputs of every dense layer, from the last to the first, which are the images.

    For a network of dense layers alone, with ReLU, sigmoid or tanh between them. The labels are
    known, and the batch has fewer images than the network has classes and each layer units. The
    equations of the last layer start from guesses drawn by `seed`.
    """

    easy_model: ClassVar[str] = "mlp"
    seed: int = field(default=0, kw_only=True)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("labels",)

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        first = seen[0]
        find_first_layer(first, "dense inversion")
        check_model(first)
        mean, std = pixel_frame(first.model, first.image_shape)
        fresh = FreshDraws(first, (), rng)
        shares = Shares(first.model, first.loss, first.protocol, told=fresh.shapes)
        found = []
        for done, victim in enumerate(seen, 1):
            z, failed = self._inputs(victim)
            images = z.to(mean).view(victim.size, *victim.image_shape) * std + mean
            found.append(measured(victim, images, shares, fresh, rng, failed))
            progress(done, len(seen))
        return found

    def _inputs(self, victim: Observation) -> tuple[torch.Tensor, str]:
        """Return the images as the first layer gets them, or NaN and why they were not found."""
        none = torch.full((victim.size, *victim.image_shape), torch.nan)
        weight, _ = find_first_layer(victim, "dense inversion")
        layer = victim.model.get_submodule(weight.rpartition(".")[0])
        try:
            found = find_features(victim, Generator().manual_seed(self.seed))[0]
        except GradveilError as error:
            return none, f"failed: {error}"
        if found.layer is not layer:
            return none, "failed: the gradient of a layer before the last is not explained"
        return found.features, ""

    def __str__(self) -> str:
        return "dense inversion"
