"""Several defences in a row, and the orders that cannot be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, dropwhile
from typing import ClassVar

from torch import Generator, Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch, Gradients, Knowledge, Loss
from gradveil.defenses.base import Defense, ImageShape, Moment, State
from gradveil.defenses.policies import Transforming
from gradveil.defenses.precode import Precode
from gradveil.defenses.pruning import FeedbackPruning, Pruning

THEN = ",then,"


@dataclass(frozen=True)
class Chain(Defense):
    """Each acts on what the one before it left."""

    name: ClassVar[str] = "chain"
    line: ClassVar[str] = "several defences, one after the other"

    members: tuple[Defense, ...] = field(default=())

    def __post_init__(self) -> None:
        for earlier, later in combinations(self.members, 2):
            if (problem := _problem(earlier, later)) is not None:
                raise GradveilError(f"defense {str(self)!r}: {problem}")

    @property
    def random(self) -> bool:
        return any(member.random for member in self.members)

    def protect_model(self, model: nn.Module, image_shape: ImageShape | None = None) -> nn.Module:
        for member in self.members:
            model = member.protect_model(model, image_shape)
        return model

    def protect_loss(self, loss: Loss) -> Loss:
        for member in self.members:
            loss = member.protect_loss(loss)
        return loss

    def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
        for member in self.members:
            batch = member.protect_batch(batch, rng)
        return batch

    def start(self) -> State:
        return tuple(member.start() for member in self.members)

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        assert isinstance(state, tuple)
        kept: list[State] = []
        for member, own in zip(self.members, state, strict=True):
            gradients, after = member.protect_gradients(gradients, moment, own, rng)
            kept.append(after)
        return gradients, tuple(kept)

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        for member in self.members:
            knowledge = member.tell(knowledge, model)
        return knowledge if self._adds_up() else replace(knowledge, earlier=None, momentum=None)

    def _adds_up(self) -> bool:
        """Whether the rounds of a pruning that feeds back can be added up: not where they are scaled, cut or covered after it."""
        after = list(
            dropwhile(lambda member: not isinstance(member, FeedbackPruning), self.members)
        )[1:]
        return not any(
            member.clips or isinstance(member, Pruning) or (member.noisy and member.random)
            for member in after
        )

    def reveal(self, images: Tensor, rng: Generator) -> Callable[[Tensor], Tensor] | None:
        steps = [
            step for member in self.members if (step := member.reveal(images, rng)) is not None
        ]
        return steps[0] if len(steps) == 1 else partial(_in_turn, steps) if steps else None

    def parts(self) -> tuple[Defense, ...]:
        return self.members

    def without_gradients(self) -> Defense:
        return chain([member for member in self.members if member.acts_on != "gradients"])

    def __str__(self) -> str:
        return THEN.join(map(str, self.members))


def chain(defenses: Sequence[Defense]) -> Defense:
    """One defence from a list: chains in it are opened, and a single one stays itself."""
    members = tuple(part for defense in defenses for part in defense.parts())
    return Chain(members) if len(members) > 1 else members[0] if members else Defense()


def _in_turn(steps: Sequence[Callable[[Tensor], Tensor]], images: Tensor) -> Tensor:
    for step in steps:
        images = step(images)
    return images


def _problem(earlier: Defense, later: Defense) -> str | None:
    if later.acts_on in ("model", "batch") and earlier.acts_on == "gradients":
        kind = {"model": "model", "batch": "images"}[later.acts_on]
        return f"{later} changes the {kind}, which come{'s' * (kind == 'model')} before the gradients that {earlier} changes; put it first"
    if later.one_step and earlier.acts_on == "gradients":
        return (
            f"{later} starts from the gradients of single samples, so it must come before {earlier}"
        )
    if later.clips and earlier.noisy:
        return f"{later} would clip the noise of {earlier} too; clip first"
    if (
        isinstance(later, Precode)
        and isinstance(earlier, Precode)
        and (shared := set(earlier.positions) & set(later.positions))
    ):
        return f"two PRECODE modules at position {sorted(shared)[0]!r}; give each a position of its own"
    if (
        isinstance(later, Transforming)
        and isinstance(earlier, Transforming)
        and earlier.augments
        and later.augments
    ):
        return f"{earlier} and {later} would crop and flip twice; join policies by + or -, or set augment=no on one"
    return None
