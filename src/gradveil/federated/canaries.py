"""Canary images: planted in copies of a client's batch, and looked for in what came back of them.

A canary stands in for an image of the batch: it takes that image's place and, where there are
canaries of its class, its label, and goes through the same defense.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor

from gradveil.audits.victims import drawn_again
from gradveil.core.types import Batch, Reconstruction
from gradveil.defenses import Defense
from gradveil.scores.identification import TIE
from gradveil.scores.lineup import replay, seen_from_everywhere, seen_in_place

PARTS = (32, 512)  # candidates that are looked at first, and then at a time

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Planted:
    """A copy of the client's batch with canary `number` as its image `row`.

    `rng` is the generator that the copy's defense draws from, before it drew.
    """

    batch: Batch
    row: int
    number: int
    rng: Generator

    def transform(self, defense: Defense) -> Transform | None:
        """Return what the defense does to this batch's images; None where it leaves them alone."""
        if not defense.changes("batch"):
            return None
        revealed = defense.reveal(self.batch.images, self.rng.clone_state())
        return revealed or drawn_again(defense, self.batch.labels, self.rng)


def plant(batch: Batch, canaries: Batch, count: int, rng: Generator) -> list[Planted]:
    """Return `count` copies of the batch, each with another canary in the place of an image.

    The canary is of that image's class as long as there are some: a label that occurs once in a
    batch gives more away than one that several images have.
    """
    left = torch.randperm(len(canaries), generator=rng).tolist()
    found = []
    for _ in range(count):
        row = int(torch.randint(len(batch), (), generator=rng))
        label = int(batch.labels[row])
        alike = (number for number in left if int(canaries.labels[number]) == label)
        number = next(alike, left[0])
        left.remove(number)
        images, labels = batch.images.clone(), batch.labels.clone()
        images[row] = canaries.images[number].to(images)
        labels[row] = canaries.labels[number]
        draws = Generator().manual_seed(int(torch.randint(2**62, (), generator=rng)))
        found.append(Planted(Batch(images, labels), row, number, draws))
    return found


@dataclass(frozen=True, eq=False)
class Lineup:
    """All canaries, with which a reconstruction is compared as in an audit.

    Every candidate goes through the draws of the update's defense, unless the attack aims at the
    images before it. A candidate is as near as the nearest of the update's reconstructions, so that
    luck picks a canary out in 1 of N line-ups, whatever the size of the batch.
    """

    canaries: Tensor  # (N, C, H, W)

    @cached_property
    def known(self) -> Tensor:
        """The canaries themselves, as `seen_in_place` has them."""
        return seen_in_place(self.canaries)

    def picks_out(self, found: Reconstruction, planted: Planted, defense: Defense) -> bool:
        """Tell whether no canary resembles what was found more than the planted one does."""
        images = found.images.detach().cpu().float().clamp(0, 1)
        moved = seen_from_everywhere(images).flatten(0, 1)
        transform = None if found.aims_at == "original" else planted.transform(defense)
        itself = torch.tensor([planted.number])
        (likeness,) = self._likeness(moved, transform, planted, itself).tolist()
        if not likeness > 0:  # a flat image resembles none
            return False
        return not any(
            bool((self._likeness(moved, transform, planted, some) > likeness + TIE).any())
            for some in self._parts()
        )

    def _parts(self) -> Iterator[Tensor]:
        """Give the numbers of all canaries, few at first: where nothing leaks these suffice."""
        numbers = torch.arange(len(self.canaries))
        yield numbers[: PARTS[0]]
        yield from numbers[PARTS[0] :].split(PARTS[1])

    def _likeness(
        self, moved: Tensor, transform: Transform | None, planted: Planted, numbers: Tensor
    ) -> Tensor:
        known = self.known[numbers] if transform is None else None
        if known is None:
            beside = planted.batch.images
            some = self.canaries[numbers].to(beside)
            known = seen_in_place(replay(transform, beside, planted.row, some).cpu().float())
        found: Tensor = (known.to(moved) @ moved.T).amax(1)
        return found
