"""Several defenses in a row, and the orders that cannot be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.types import Batch, Gradients, ImageShape, Knowledge, Loss
from gradveil.defenses.applied import (
    check_defense,
    protected_batch,
    protected_gradients,
    protected_model,
    told_knowledge,
)
from gradveil.defenses.base import Defense, Moment, Seam, State

THEN = ",then,"
MOST = 20  # parts of a chain


@dataclass(frozen=True)
class Chain(Defense):
    """Several defenses, each of which acts on what the one before it left."""

    name: ClassVar[str] = "chain"
    line: ClassVar[str] = "several defenses, one after the other"
    acts_on: ClassVar[Seam] = "nothing"  # its parts do

    members: tuple[Defense, ...] = field(default=())

    def __post_init__(self) -> None:
        for member in self.members:
            if not isinstance(member, Defense):
                raise GradveilError(f"a chain with {kind_of(member)}: expected defenses")
            check_defense(member)
        opened = tuple(part for member in self.members for part in member.parts())
        object.__setattr__(self, "members", opened)
        check_length(len(self.members))
        for earlier, later in combinations(self.members, 2):
            if (problem := later.conflict(earlier)) is not None:
                raise GradveilError(f"defense {str(self)!r}: {problem}")

    @property
    def random(self) -> bool:
        return any(member.random for member in self.members)

    @property
    def scored_on(self) -> tuple[str, ...]:
        return tuple(digest for member in self.members for digest in member.scored_on)

    @property
    def control(self) -> Defense | None:
        controls = [member.control for member in self.members]
        if not any(controls):
            return None
        pairs = zip(self.members, controls, strict=True)
        return Chain(tuple(member if control is None else control for member, control in pairs))

    def protect_model(self, model: nn.Module, image_shape: ImageShape | None = None) -> nn.Module:
        for member in self.members:
            model = protected_model(member, model, image_shape)
        return model

    def protect_loss(self, loss: Loss) -> Loss:
        for member in self.members:
            loss = member.protect_loss(loss)
        return loss

    def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
        for member in self.members:
            batch = protected_batch(member, batch, rng)
        return batch

    def start(self) -> State:
        return tuple(member.start() for member in self.members)

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        kept: list[State] = []
        for member, before in self._states(state):
            gradients, after = protected_gradients(
                member, gradients, moment, before, rng, finite=False
            )
            kept.append(after)
        return gradients, tuple(kept)

    def pack_state(self, state: State) -> object:
        return [member.pack_state(kept) for member, kept in self._states(state)]

    def unpack_state(self, packed: Any, device: torch.device) -> State:
        return tuple(member.unpack_state(kept, device) for member, kept in self._states(packed))

    def _states(self, state: Any) -> list[tuple[Defense, Any]]:
        return list(zip(self.members, state, strict=True))

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        """Add what each part tells, in turn.

        The rounds of a pruning that feeds back cannot be added up where they are scaled, cut or
        covered after it.
        """
        added_up = True
        for member in self.members:
            fed_back = knowledge.momentum is not None
            knowledge = told_knowledge(member, knowledge, model)
            covers = member.clips or member.prunes or (member.noisy and member.random)
            added_up = added_up and not (fed_back and covers)
        return knowledge if added_up else replace(knowledge, earlier=None, momentum=None)

    def reveal(self, images: Tensor, rng: Generator) -> Callable[[Tensor], Tensor] | None:
        steps = [
            step for member in self.members if (step := member.reveal(images, rng)) is not None
        ]
        if len(steps) < 2:
            return steps[0] if steps else None
        return partial(_in_turn, steps)

    def parts(self) -> tuple[Defense, ...]:
        return self.members

    def without_gradients(self) -> Defense:
        return chain([member for member in self.members if member.acts_on != "gradients"])

    def without_augmentation(self) -> Defense:
        return Chain(tuple(member.without_augmentation() for member in self.members))

    def __str__(self) -> str:
        return THEN.join(map(str, self.members))


def chain(defenses: Sequence[Defense]) -> Defense:
    """Return one defense for a list: chains in it are opened, and a single one stays itself."""
    made = Chain(tuple(defenses))
    if len(made.members) < 2:
        return made.members[0] if made.members else Defense()
    return made


def check_length(parts: int) -> None:
    """Refuse a chain that is too long."""
    if parts > MOST:
        raise GradveilError(f"a chain of {parts} defenses: at most {MOST} can be joined")


def _in_turn(steps: Sequence[Callable[[Tensor], Tensor]], images: Tensor) -> Tensor:
    for step in steps:
        images = step(images)
    return images
