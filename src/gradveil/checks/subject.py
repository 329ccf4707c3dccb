"""What a check looks at (a client, some batches and what is known around them) and what it says."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.attacks import Attack
from gradveil.clients import Client, Shared
from gradveil.core.errors import GradveilError, GradveilWarning, unknown
from gradveil.core.seeds import forked, generator
from gradveil.core.text import on_one_line
from gradveil.core.types import Batch, Gradients, Loss, Observation
from gradveil.engine.gradients import gradient, in_mode, trainable

Level = Literal["note", "warning", "error"]
"""A note is good to know; after a warning figures may mislead, after an error there are none."""


@dataclass(frozen=True)
class Finding:
    """What a check found: what it means and what to do about it, in one line each."""

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
        return on_one_line(f"{self.name}: {self.means}; {self.do}")

    def plain(self) -> dict[str, str]:
        """Return the fields as plain values, for JSON."""
        return asdict(self)


LEVELS = ("error", "warning", "note")  # the worst first


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What the checks found, those that found nothing, and those that could not be made.

    `machine` is what the self-check of this machine found, where it was made. It prints as text,
    and `plain` gives the same for programs.
    """

    findings: tuple[Finding, ...]
    silent: tuple[str, ...]
    skipped: tuple[str, ...]
    machine: Finding | None = None

    @property
    def everything(self) -> tuple[Finding, ...]:
        """All findings, that of the self-check last."""
        return self.findings if self.machine is None else (*self.findings, self.machine)

    @property
    def errors(self) -> int:
        """The number of findings that are errors."""
        return sum(found.level == "error" for found in self.everything)

    def plain(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "findings": [found.plain() for found in self.everything],
            "silent": list(self.silent),
            "skipped": list(self.skipped),
            "errors": self.errors,
        }

    def __str__(self) -> str:
        """Two lines for each finding, the worst first, then the silent and the skipped checks.

        What was skipped has a line of its own where it is more than a name.
        """
        ordered = sorted(self.findings, key=lambda found: LEVELS.index(found.level))
        lines = [line for found in ordered for line in _in_words(found)]
        reasons = [each for each in self.skipped if {",", ":"} & {*each}]
        skipped = [each for each in self.skipped if each not in reasons]
        for word, names in (("well", self.silent), ("skipped", skipped)):
            if names:
                checks = "check" if len(names) == 1 else "checks"
                lines.append(f"{word:<8}{len(names)} {checks}: {', '.join(names)}")
        lines += [f"{'skipped':<8}{each}" for each in reasons]
        if self.machine is not None:
            lines += _in_words(self.machine)
        return "\n".join(map(on_one_line, lines))

    __repr__ = __str__


def _in_words(found: Finding) -> tuple[str, str]:
    return f"{found.level:<8}{found.name}: {found.means}", f"{'':<8}{found.do}"


VICTIMS = 8  # batches that are shared at most: enough for a first look


@dataclass(frozen=True, eq=False)
class Subject:
    """A client, its private batches, and what is known around them. Costly facts are found once.

    `attack` is tried where it is given. `attacker_loss` is what the attacker differentiates, where
    that is not the client's loss. `public` are images of the same kind that anyone may have, for
    blind guesses. `test` are images that the model was not trained on: its accuracy is measured on
    them, and reconstructions are identified among them. `trained` says that the weights are meant
    to be those of a trained model.
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
        """The first batches, which most checks look at."""
        return list(islice(self.batches, VICTIMS))

    @cached_property
    def classes(self) -> int:
        """The number of classes, found by a pass of the model where the client does not say it."""
        return self.client.count_classes(self.few[0].images)

    @cached_property
    def model(self) -> nn.Module:
        """The model that gradients are of: the client's, as its defense protects it."""
        return self.client.protected_model(self.few[0].images.to(self.example))

    @property
    def loss(self) -> Loss:
        """The loss that gradients are of: the client's, as its defense protects it."""
        return self.client.acting.protect_loss(self.client.loss)

    @property
    def example(self) -> Tensor:
        """A parameter of the model, which has its device and its type of numbers."""
        return next(iter(trainable(self.client.model).values()))

    @cached_property
    def shared(self) -> list[Shared]:
        """What the client shares of the first batches."""
        return self.share(0)

    @cached_property
    def changes(self) -> list[Callable[[Tensor], Tensor] | None]:
        """What the defense did to the images of each of the first batches, its draws included.

        None where it changes none, or cannot tell.
        """
        return [shared.seen.knowledge.transform for shared in self.share(0, tell_draws=True)]

    def share(self, draw: int, *, tell_draws: bool = False) -> list[Shared]:
        """Share the first batches, with other random numbers for each `draw`."""
        with quiet():
            return self.client.share_batches(
                self.few,
                generator(self.seed, "checks", draw),
                tell_labels=self.labels == "known",
                tell_defense=True,
                tell_draws=tell_draws,
            )

    @cached_property
    def plain(self) -> list[Gradients]:
        """The gradients of the first batches before any defense; none where the model fails."""
        try:
            with self.passes():
                return [gradient(self.model, self.loss, *self.placed(batch)) for batch in self.few]
        except GradveilError:
            return []

    def answers(self, images: Tensor, model: nn.Module | None = None) -> Tensor:
        """What a model answers, by default the protected one, in its present mode.

        Running statistics stay as they are.
        """
        asked = self.model if model is None else model
        with torch.no_grad():
            found: Tensor = functional_call(
                asked, {name: buffer.clone() for name, buffer in asked.named_buffers()}, (images,)
            )
        return found

    def placed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a batch's images and labels, on the model's device."""
        return batch.images.to(self.example), batch.labels.to(self.example.device, torch.long)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Put the model into the client's mode; then it and torch's generators are as before."""
        with in_mode(self.model, self.client.protocol.train_mode), forked():
            yield

    def attacked(self, seen: Observation) -> Observation:
        """Return what is seen with the attacker's loss, where that is another than the client's."""
        if self.attacker_loss is None:
            return seen
        return replace(seen, loss=self.client.acting.protect_loss(self.attacker_loss))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence gradveil's warnings: a finding says the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradveilWarning)
        yield
