"""What is looked at: a client, some of its batches, and what is known around them. Costly facts are found once."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.attacks import Attack
from gradveil.clients import Client, Shared
from gradveil.core.errors import GradveilError, GradveilWarning, unknown
from gradveil.core.seeds import forked, generator
from gradveil.core.types import Batch, Gradients, Loss, Observation
from gradveil.engine.gradients import gradient, in_mode, trainable

Level = Literal["note", "warning", "error"]
"""A note is good to know; a warning says that figures may mislead; with an error nothing can be measured."""


@dataclass(frozen=True)
class Finding:
    """`name` is the check's; `means` and `do` are one line each."""

    level: Level
    name: str
    means: str
    do: str

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise unknown("level", self.level, get_args(Level))
        for part in ("means", "do"):
            object.__setattr__(self, part, " ".join(getattr(self, part).split()))

    def __str__(self) -> str:
        return f"{self.name}: {self.means}; {self.do}"

    def plain(self) -> dict[str, str]:
        """As plain values, for JSON."""
        return asdict(self)


VICTIMS = 8  # of the batches given, the most that are shared: enough for a first look


@dataclass(frozen=True, eq=False)
class Subject:
    """`attacker_loss`: what the attacker differentiates, where that is not the client's loss. `public`: images of the same kind that
    anyone may have, for blind guesses. `test`: images that the model was not trained on, for its accuracy and as candidates of an
    identification. `trained`: whether the weights are meant to be.
    """

    client: Client
    batches: Sequence[Batch]
    attack: Attack | None = None
    labels: Literal["known", "inferred"] = "known"
    attacker_loss: Loss | None = None
    public: Batch | None = None
    test: Batch | None = None
    trained: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.batches:
            raise GradveilError("no batches to look at: give at least one")
        if self.labels not in ("known", "inferred"):
            raise unknown("labels", self.labels, ("known", "inferred"))

    @cached_property
    def few(self) -> list[Batch]:
        return list(islice(self.batches, VICTIMS))

    @cached_property
    def classes(self) -> int:
        """The number of classes, asked of the model where the client does not say it."""
        return self.client.count_classes(self.few[0].images)

    @cached_property
    def model(self) -> nn.Module:
        """The protected one, that gradients are of."""
        return self.client.protected_model(self.few[0].images.to(self.example))

    @property
    def loss(self) -> Loss:
        return self.client.acting.protect_loss(self.client.loss)

    @property
    def example(self) -> Tensor:
        """For the device and the type of numbers."""
        return next(iter(trainable(self.client.model).values()))

    @cached_property
    def shared(self) -> list[Shared]:
        """What is seen of the first batches, and what was used."""
        return self.share(0)

    def share(self, draw: int) -> list[Shared]:
        """The same batches with other random numbers for each `draw`."""
        with quiet():
            return self.client.share_batches(
                self.few,
                generator(self.seed, "checks", draw),
                tell_labels=self.labels == "known",
                tell_defense=True,
            )

    @cached_property
    def plain(self) -> list[Gradients]:
        """The gradients of the images as they are, before any defense changes them; none where the model gives none."""
        try:
            with self.passes():
                return [gradient(self.model, self.loss, *self.placed(batch)) for batch in self.few]
        except GradveilError:
            return []

    def answers(self, images: Tensor, model: nn.Module | None = None) -> Tensor:
        """Of the protected model, or of another, in its present mode; statistics that a pass updates are updated on a copy."""
        asked = self.model if model is None else model
        with torch.no_grad():
            found: Tensor = functional_call(
                asked, {name: buffer.clone() for name, buffer in asked.named_buffers()}, (images,)
            )
        return found

    def placed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images and labels where the model is."""
        return batch.images.to(self.example), batch.labels.to(self.example.device, torch.long)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """For passes of the model in the client's mode, which leave it and torch's own generators as they were."""
        with in_mode(self.model, self.client.protocol.train_mode), forked():
            yield

    def attacked(self, one: Observation) -> Observation:
        """As the attacker takes it: with its own loss."""
        return (
            one
            if self.attacker_loss is None
            else replace(one, loss=self.client.acting.protect_loss(self.attacker_loss))
        )


@contextmanager
def quiet() -> Iterator[None]:
    """What our own parts warn of is told as a finding instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradveilWarning)
        yield
