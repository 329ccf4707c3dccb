"""Soteria: cuts the gradient behind the representation where that tells most of the image."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.types import Gradients, Knowledge
from gradveil.defenses.base import Defense, Moment, Seam, State
from gradveil.defenses.insertion import last_linear
from gradveil.defenses.pruning import check_share, kept
from gradveil.engine.calls import before_use
from gradveil.engine.draws import given

AT_ONCE = 32  # features whose slopes are taken in one pass
SMALLEST = 1e-10  # for a feature of zero


@dataclass(frozen=True)
class Soteria(Defense):
    """Set columns of the gradient of a linear layer's weight to zero, by default the last layer's.

    r is what `layer` receives. The paper cuts the features with the largest |r_i / (d r_i / dx)|;
    its code takes |d r_i / dx| / |r_i|, summed over the batch, and cuts the smallest, as here.
    Features that are zero for the whole batch go first: their columns are zero anyway.
    """

    name: ClassVar[str] = "soteria"
    line: ClassVar[str] = (
        "columns of the last layer's gradient that tell most of the image are set to zero"
    )
    paper: ClassVar[str] = (
        "Sun et al. 2021, Provable Defense against Privacy Leakage in Federated Learning from "
        "Representation Perspective"
    )
    example: ClassVar[str] = "soteria:0.8"
    use: ClassVar[str] = "only one layer may be changed"
    cost: ClassVar[str] = "little accuracy; one pass for each feature"
    first: ClassVar[str | None] = "share"
    acts_on: ClassVar[Seam] = "gradients"
    repasses: ClassVar[bool] = True
    breakers: ClassVar[tuple[str, ...]] = ("without-defended-layers",)
    strongest: ClassVar[tuple[str, ...]] = ("without-defended-layers",)

    share: float
    layer: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_share(self.share, self.name)

    @classmethod
    def mild(cls) -> Defense | None:
        return cls(0.2)

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        name, layer = self._layer(moment.model)
        weight = f"{name}.weight" if name else "weight"
        if weight not in gradients:
            raise GradveilError(
                f"defense {self}: the weight of layer {name!r} is frozen, so there is nothing to "
                "cut; name another layer"
            )
        kept_columns = kept(sensitivities(moment, layer), self.share)
        return {**gradients, weight: gradients[weight] * kept_columns}, state

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        name, _ = self._layer(model)
        layers = *(knowledge.defended_layers or ()), f"{name}.weight" if name else "weight"
        return replace(knowledge, defended_layers=tuple(dict.fromkeys(layers)))

    def _layer(self, model: nn.Module) -> tuple[str, nn.Linear]:
        linear = {
            name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        found = last_linear(model) if self.layer is None else (self.layer, linear.get(self.layer))
        if found is None:
            raise GradveilError(
                f"defense {self}: the model has no linear layer, whose inputs would be the "
                "representation"
            )
        name, layer = found
        if layer is None:
            raise unknown(f"layer of defense {self}:", self.layer, linear)
        return name, layer


def sensitivities(moment: Moment, layer: nn.Linear) -> Tensor:
    """Return |d r_i / dx| / |r_i|, summed over the batch, of each feature r_i of the layer."""
    images = moment.batch.images.detach().requires_grad_()
    with torch.enable_grad(), given(moment.model, moment.draws), _received(layer) as inputs:
        moment.model(images)
    if not inputs:
        raise GradveilError("Soteria's layer plays no part in the model's answers; name another")
    features = inputs[0].reshape(-1, layer.in_features)
    totals = features.new_zeros(layer.in_features)
    for some in torch.arange(layer.in_features, device=features.device).split(AT_ONCE):
        asked = torch.zeros(
            len(some), *features.shape, dtype=features.dtype, device=features.device
        )
        asked[torch.arange(len(some), device=some.device), :, some] = 1
        (slopes,) = torch.autograd.grad(
            features, images, asked, retain_graph=True, is_grads_batched=True
        )
        norms = slopes.flatten(2).norm(dim=2)  # (features, images)
        sizes = features.detach()[:, some].T.reshape(len(some), len(images), -1).norm(dim=2)
        totals[some] = (norms / sizes.clamp_min(SMALLEST)).sum(1)
    return totals


@contextmanager
def _received(layer: nn.Linear) -> Iterator[list[Tensor]]:
    inputs: list[Tensor] = []
    hook = before_use(layer, lambda _, given: inputs.append(given))
    try:
        yield inputs
    finally:
        hook.remove()
