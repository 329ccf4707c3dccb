"""PRECODE: a variational bottleneck in the model, on whose random draw the gradients depend."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError
from gradveil.core.types import ImageShape, Knowledge, Loss
from gradveil.defenses.base import Defense, Seam
from gradveil.defenses.dpsgd import check_positive
from gradveil.defenses.insertion import (
    FEATURES,
    as_position,
    from_first_draw,
    insert,
    layers_before,
)
from gradveil.models.bottleneck import Bottleneck, Penalized

WIDEST = 2**20  # values of a bottleneck: its weights are that many times the features


@dataclass(frozen=True)
class Precode(Defense):
    """Put a variational bottleneck of `k` values into the model, with a penalty of weight `beta`.

    `position` is features (before the head), a module's name or the number of a layer, or several
    joined by |. With 2 or more `modules`, further ones are spread evenly over the layers before the
    position. `bits` divides the penalty by ln 2 as the authors' code does; their paper does not.
    The bottlenecks' weights are drawn from `seed`.
    """

    name: ClassVar[str] = "precode"
    line: ClassVar[str] = "a variational bottleneck in the model makes its gradients random"
    paper: ClassVar[str] = (
        "Scheliga et al. 2022, PRECODE - A Generic Model Extension to Prevent Deep Gradient Leakage"
    )
    example: ClassVar[str] = "precode:k=256,beta=1e-3"
    use: ClassVar[str] = "the model may be changed and trained again"
    cost: ClassVar[str] = "little accuracy; two more layers"
    assessed: ClassVar[str | None] = "precode:k=256,beta=1e-3"
    acts_on: ClassVar[Seam] = "model"
    breakers: ClassVar[tuple[str, ...]] = ("without-random-layers", "joint-noise")
    strongest: ClassVar[tuple[str, ...]] = ("without-random-layers",)
    # Which of the two is stronger depends on the model.
    instead: ClassVar[tuple[str | None, ...]] = ("joint-noise",)

    k: int = 256
    beta: float = 1e-3
    position: str = FEATURES
    modules: int = 1
    bits: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "position", as_position(self.position))
        check_fields(self)
        if self.k < 1:
            raise GradveilError(
                f"defense precode: k {self.k}; the bottleneck needs at least 1 value"
            )
        if self.k > WIDEST:
            raise GradveilError(f"defense precode: k {self.k}; it may be at most {WIDEST:,}")
        if self.beta:
            check_positive(self.name, "beta", self.beta)
        if self.modules < 1 or (self.modules > 1 and len(self.positions) > 1):
            raise GradveilError(
                f"defense precode: modules {self.modules} at {self.position!r}; give 1 or more at "
                "one position, or positions a|b"
            )
        if len(set(self.positions)) < len(self.positions) or not all(self.positions):
            raise GradveilError(
                f"defense precode: position {self.position!r}; each bottleneck needs a position of "
                "its own"
            )

    @classmethod
    def mild(cls) -> Defense | None:
        return cls()

    @property
    def random(self) -> bool:
        return True

    @property
    def positions(self) -> tuple[str, ...]:
        """The positions, one by one."""
        return tuple(self.position.split("|"))

    def protect_model(self, model: nn.Module, image_shape: ImageShape | None = None) -> nn.Module:
        for number, position in enumerate((*self._spread(model), *self.positions)):
            seed = self.seed + number

            def make(width: int, seed: int = seed) -> Bottleneck:
                return Bottleneck(width, self.k, self.beta, bits=self.bits, seed=seed)

            model = insert(model, position, make, image_shape, str(self))
        return model

    def protect_loss(self, loss: Loss) -> Loss:
        return PenalizedLoss(loss, max(self.modules, len(self.positions)))

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        return replace(knowledge, random_layers=from_first_draw(model))

    def conflict(self, earlier: Defense) -> str | None:
        taken = set(earlier.positions) if isinstance(earlier, Precode) else set()
        if both := taken & set(self.positions):
            return (
                f"two PRECODE modules at position {sorted(both)[0]!r}; "
                "give each a position of its own"
            )
        return super().conflict(earlier)

    def _spread(self, model: nn.Module) -> list[str]:
        if self.modules == 1:
            return []
        inner = model.inner if isinstance(model, Penalized) else model
        layers = layers_before(inner, self.position, str(self))
        if len(layers) < self.modules - 1:
            raise GradveilError(
                f"defense {self}: modules {self.modules}; the model has {len(layers)} layer(s) "
                f"before {self.position!r}"
            )
        return [layers[len(layers) * number // self.modules] for number in range(1, self.modules)]


@dataclass(frozen=True)
class PenalizedLoss:
    """The loss of the answers but for the last `columns`, penalties, which are added to it."""

    loss: Loss
    columns: int

    def __call__(self, answers: Tensor, labels: Tensor) -> Tensor:
        logits, penalties = answers.split((answers.shape[1] - self.columns, self.columns), dim=1)
        losses: Tensor = self.loss(logits, labels) + penalties.sum(1)
        return losses
