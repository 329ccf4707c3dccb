"""PRECODE: a variational bottleneck in the model, whose random draw the gradients of the client depend on."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.types import Knowledge, Loss
from gradveil.defenses.base import Defense, ImageShape
from gradveil.defenses.dpsgd import check_positive
from gradveil.defenses.insertion import FEATURES, from_first_draw, layers_before, place
from gradveil.models.bottleneck import Bottleneck, Penalized


@dataclass(frozen=True)
class Precode(Defense):
    """`position`: features (before the head), a module's name or the number of a layer, or several joined by |.

    `modules`: with 2 or more, further ones are spread evenly over the layers before the position. `bits` divides the penalty by ln 2
    as the authors' code does; their paper does not. The bottlenecks' weights are drawn from `seed`.
    """

    name: ClassVar[str] = "precode"
    line: ClassVar[str] = "a variational bottleneck in the model makes its gradients random"
    paper: ClassVar[str] = (
        "Scheliga et al. 2022, PRECODE - A Generic Model Extension to Prevent Deep Gradient Leakage"
    )
    example: ClassVar[str] = "precode:k=256,beta=1e-3"
    acts_on: ClassVar[Literal["nothing", "model", "batch", "gradients"]] = "model"

    k: int = 256
    beta: float = 1e-3
    position: str = FEATURES
    modules: int = 1
    bits: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.k < 1:
            raise GradveilError(
                f"defense precode: k {self.k}; the bottleneck needs at least 1 value"
            )
        if self.beta:
            check_positive(self.name, "beta", self.beta)
        object.__setattr__(self, "position", str(self.position))
        if self.modules < 1 or (self.modules > 1 and len(self.positions) > 1):
            raise GradveilError(
                f"defense precode: modules {self.modules} at {self.position!r}; give 1 or more at one position, or positions a|b"
            )
        if len(set(self.positions)) < len(self.positions) or not all(self.positions):
            raise GradveilError(
                f"defense precode: position {self.position!r}; each bottleneck needs a position of its own"
            )

    @property
    def random(self) -> bool:
        return True

    @property
    def positions(self) -> tuple[str, ...]:
        return tuple(self.position.split("|"))

    def protect_model(self, model: nn.Module, image_shape: ImageShape | None = None) -> nn.Module:
        for number, position in enumerate((*self._spread(model), *self.positions)):
            seed = self.seed + number

            def make(width: int, seed: int = seed) -> Bottleneck:
                return Bottleneck(width, self.k, self.beta, bits=self.bits, seed=seed)

            model = place(model, position, make, image_shape, str(self))
        return model

    def protect_loss(self, loss: Loss) -> Loss:
        return PenalizedLoss(loss, max(self.modules, len(self.positions)))

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        return replace(knowledge, random_layers=from_first_draw(model))

    def _spread(self, model: nn.Module) -> list[str]:
        if self.modules == 1:
            return []
        inner = model.inner if isinstance(model, Penalized) else model
        layers = layers_before(inner, self.position, str(self))
        if len(layers) < self.modules - 1:
            raise GradveilError(
                f"defense {self}: modules {self.modules}; the model has {len(layers)} layer(s) before {self.position!r}"
            )
        return [layers[len(layers) * number // self.modules] for number in range(1, self.modules)]


@dataclass(frozen=True)
class PenalizedLoss:
    """The loss of the answers without the last `columns`, which are penalties and are added to it."""

    loss: Loss
    columns: int

    def __call__(self, answers: Tensor, labels: Tensor) -> Tensor:
        logits, penalties = answers.split((answers.shape[1] - self.columns, self.columns), dim=1)
        losses: Tensor = self.loss(logits, labels) + penalties.sum(1)
        return losses
