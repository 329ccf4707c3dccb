"""Attacks on many images at once, one to a victim, each from a start of its own that no other image changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from gradveil.attacks import Attack, GradientMatching
from gradveil.attacks.initial import Initial, Shape
from gradveil.attacks.labels import Joint
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.space import Frame
from gradveil.core.types import Batch, Observation


@dataclass(frozen=True, eq=False)
class OwnStarts(Initial):
    """For each victim a start from its own generator, so that it depends on the seed and the victim's number alone."""

    initial: Initial
    seed: int
    numbers: tuple[int, ...] = field(repr=False)

    def __call__(self, rows: int, shape: Shape, rng: Generator, frame: Frame) -> Tensor:  # noqa: ARG002
        restarts = rows // len(self.numbers)
        return torch.cat([self.initial(restarts, shape, generator(self.seed, "start", number), frame) for number in self.numbers])


def check_attack(attack: Attack) -> None:
    """Refuse one that draws more than its starts."""
    if isinstance(attack, GradientMatching) and isinstance(attack.labels, Joint):
        raise GradveilError(f"attack {attack} looks for labels too: a probe tells them, choose an attack that takes them as known")


@dataclass(frozen=True, eq=False)
class Strike:
    """An attack on the gradients that a client shares of single images, at most `at_once` victims in one run."""

    client: Client
    attack: Attack
    seed: int
    at_once: int

    def __call__(self, images: Tensor, labels: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What is found, (images, C, H, W) in [0, 1], and which of it there is.

        `images` are floats in [0, 1]; an image's number decides its start. A run that does not fit the memory is made in halves.
        """
        parts = torch.arange(len(images)).tensor_split(-(-len(images) // self.at_once))
        each = [self._run(images[rows], labels[rows], [numbers[row] for row in rows.tolist()]) for rows in parts]
        found, there = zip(*each, strict=True)
        return torch.cat(found), torch.cat(there)

    def _run(self, images: Tensor, labels: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        try:
            return self._reconstructed(images, labels, numbers)
        except torch.OutOfMemoryError:
            if len(images) == 1:
                raise GradveilError("the GPU's memory is too small to attack a single image: choose a smaller model") from None
        torch.cuda.empty_cache()
        return replace(self, at_once=-(-len(images) // 2))(images, labels, numbers)

    def _reconstructed(self, images: Tensor, labels: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        batches = [Batch(image[None], label[None]) for image, label in zip(images, labels, strict=True)]
        shared = self._shared(batches)
        alive = [row for row, one in enumerate(shared) if one is not None]
        seen = [one for one in shared if one is not None]
        results = self._started([numbers[row] for row in alive])(seen, generator(self.seed, "strike"))
        found, there = torch.zeros_like(images), torch.zeros(len(images), dtype=torch.bool, device=images.device)
        for row, result in zip(alive, results, strict=True):
            found[row] = result.images[0].to(found)
            there[row] = result.status == "ok"
        there &= found.flatten(1).isfinite().all(1)
        return found.clamp(0, 1), there

    def _started(self, numbers: Sequence[int]) -> Attack:
        if not isinstance(self.attack, GradientMatching):
            return self.attack
        return replace(self.attack, initial=OwnStarts(self.attack.initial, self.seed, tuple(numbers)))

    def _shared(self, batches: Sequence[Batch]) -> list[Observation | None]:
        """None for a victim whose gradient is zero or not finite, which the client refuses to share."""
        try:
            return [seen for seen, _ in self.client.share(batches, generator(self.seed, "share"))]
        except GradveilError:
            return [None] if len(batches) == 1 else [one for batch in batches for one in self._shared([batch])]
