"""What a defence is: what it does to the model, the loss, the batch and the gradients before they are shared."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from torch import Generator, Tensor, nn

from gradveil.core.types import Batch, Gradients, Knowledge, Loss
from gradveil.engine.draws import Draws

State = object
"""What one client keeps between rounds; None for most defences."""

ImageShape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Moment:
    """What gradients were computed from: the protected model and loss, and the batch truly used."""

    model: nn.Module
    batch: Batch
    loss: Loss
    draws: Draws = field(
        default_factory=dict
    )  # what the model drew in the pass, by module, a row for each image


@dataclass(frozen=True)
class Defense:
    """Changes nothing: the identity, and the base of all others, whose fields are their settings.

    None of the methods changes what it is given. `str` gives the text that `parse` reads.
    """

    name: ClassVar[str] = "none"
    line: ClassVar[str] = "what is shared is left as it is"
    paper: ClassVar[str] = ""
    example: ClassVar[str] = "none"
    first: ClassVar[str | None] = None  # the setting that a value without a name stands for
    acts_on: ClassVar[Literal["nothing", "model", "batch", "gradients"]] = "nothing"
    clips: ClassVar[bool] = False
    noisy: ClassVar[bool] = False  # adds noise to the gradients
    one_step: ClassVar[bool] = (
        False  # defined for a single gradient, not for the outcome of several local steps
    )

    @property
    def random(self) -> bool:
        """Whether two shares of one batch differ."""
        return False

    def protect_model(self, model: nn.Module, image_shape: ImageShape | None = None) -> nn.Module:
        """A protected copy, or the model itself where nothing is to be done. Some positions need the shape of an image."""
        return model

    def protect_loss(self, loss: Loss) -> Loss:
        """The loss of the protected model, whose answers may have more columns than there are classes."""
        return loss

    def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
        """What the client computes its gradients on, images still in [0, 1]."""
        return batch

    def start(self) -> State:
        """What a client keeps before its first round."""
        return None

    def protect_gradients(
        self,
        gradients: Gradients,
        moment: Moment,
        state: State,
        rng: Generator,
    ) -> tuple[Gradients, State]:
        """What is shared, and what is kept for the next round."""
        return gradients, state

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        """What an attacker knows who also knows the defence and its settings, but none of its draws. The model is the protected one."""
        return knowledge

    def reveal(self, images: Tensor, rng: Generator) -> Callable[[Tensor], Tensor] | None:
        """What `protect_batch` does to such images with this generator, draws included, differentiable; None where it changes none."""
        return None

    def parts(self) -> tuple["Defense", ...]:
        """The defences it is made of, in order; none for one that changes nothing."""
        return () if type(self) is Defense else (self,)

    def without_gradients(self) -> "Defense":
        """What of it acts before gradients are computed: published evaluations attacked the clean gradient."""
        return Defense() if self.acts_on == "gradients" else self

    def __str__(self) -> str:
        shown = [
            (one.name, getattr(self, one.name))
            for one in fields(self)
            if getattr(self, one.name) != one.default
        ]
        settings = ",".join(
            _written(value) if key == self.first else f"{key}={_written(value)}"
            for key, value in shown
        )
        return f"{self.name}:{settings}" if settings else self.name


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
