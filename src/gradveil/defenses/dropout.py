"""Dropout in the model, on whenever gradients are shared."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError
from gradveil.core.types import ImageShape, Knowledge
from gradveil.defenses.base import Defense, Seam
from gradveil.defenses.insertion import FEATURES, as_position, from_first_draw, insert
from gradveil.models.bottleneck import AlwaysDropout


@dataclass(frozen=True)
class DropoutDefense(Defense):
    """Put dropout before the head or behind a named module, on in training and in eval mode alike.

    `models.bottleneck.at_rest` turns it off.
    """

    name: ClassVar[str] = "dropout"
    line: ClassVar[str] = "dropout before the head, on also when gradients are shared"
    paper: ClassVar[str] = (
        "Scheliga et al. 2023, Dropout Is NOT All You Need to Prevent Gradient Leakage "
        "(which breaks it)"
    )
    example: ClassVar[str] = "dropout:0.5"
    use: ClassVar[str] = "to compare: it is broken"
    cost: ClassVar[str] = "some accuracy"
    first: ClassVar[str | None] = "p"
    acts_on: ClassVar[Seam] = "model"
    breakers: ClassVar[tuple[str, ...]] = ("without-random-layers", "joint-masks")
    strongest: ClassVar[tuple[str, ...]] = ("joint-masks",)

    p: float
    position: str = FEATURES

    def __post_init__(self) -> None:
        object.__setattr__(self, "position", as_position(self.position))
        check_fields(self)
        if not 0 <= self.p < 1:
            raise GradveilError(f"defense dropout: p {self.p:g}; it must be from 0 to below 1")

    @classmethod
    def mild(cls) -> Defense | None:
        return cls(0.1)

    @property
    def random(self) -> bool:
        return self.p > 0

    def protect_model(self, model: nn.Module, image_shape: ImageShape | None = None) -> nn.Module:
        return insert(model, self.position, lambda _: AlwaysDropout(self.p), image_shape, str(self))

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        return replace(knowledge, train_masks=True, random_layers=from_first_draw(model))
