"""Victims of an audit: drawn over all classes, each with a line-up of pictures of its class."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.attacks import Attack, GradientMatching
from gradveil.attacks.attack_files import image_digest
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.data import Images
from gradveil.defenses import Defense
from gradveil.defenses.applied import protected_batch
from gradveil.scores.lineup import SIZES, Lineups, choose, distinct, draw_victims

LEAST_SIDE = 5  # pixels: reconstructions are moved by up to 2 in every direction


@dataclass(frozen=True, eq=False)
class Victims:
    """The images that an audit attacks, by their numbers in the split, and their line-ups.

    `lineups` are None where there can be none, and `reason` says why.
    """

    numbers: Tensor
    lineups: Lineups | None
    reason: str = ""


def find_victims(
    split: Images,
    count: int,
    batch_size: int,
    first: int | None,
    seed: int,
    apart: Sequence[int] = (),
) -> Victims:
    """Draw the victims over all classes, or take `count` from `first` on, and their line-ups.

    Of pictures that nearly equal each other one alone may be drawn or stand in a line-up. Classes
    too small for a line-up are not drawn from where the others suffice. Images `apart` are never
    drawn, and may stand in line-ups.
    """
    if (first or 0) + count > len(split):
        start = first or 0
        last = start + count - 1
        raise GradveilError(
            f"images {start} to {last}: {split.name} {split.split} has {len(split)}, from 0"
        )
    allowed = distinct(split.images, split.labels)
    if first is not None:
        numbers = torch.arange(first, first + count)
    else:
        left = torch.ones(len(split), dtype=torch.bool)
        left[list(apart)] = False
        drawn_from = _drawn_from(split, allowed, left, count)
        numbers = draw_victims(split.labels, count, drawn_from, seed)
    allowed[numbers] = True
    if min(split.images.shape[2:]) < LEAST_SIDE:
        return Victims(numbers, None, f"images are smaller than {LEAST_SIDE} pixels")
    lineups = choose(split.labels, numbers.split(batch_size), allowed, seed)
    if lineups is not None:
        return Victims(numbers, lineups)
    return Victims(numbers, None, _too_few(split, numbers, allowed, batch_size))


def _drawn_from(split: Images, unlike: Tensor, left: Tensor, count: int) -> Tensor:
    """Return which images may be drawn: of large enough classes, of any where these are too few.

    `unlike` are the images that nearly equal no other one, `left` those that may be victims.
    """
    sizes = torch.bincount(split.labels[unlike], minlength=len(split.classes))
    large = unlike & (sizes[split.labels] >= SIZES[-1])
    for some in (large & left, unlike & left):
        if int(some.sum()) >= count:
            return some
    return left


def _too_few(split: Images, numbers: Tensor, allowed: Tensor, batch_size: int) -> str:
    """Say which victim's class has too few images for a line-up."""
    sizes = torch.bincount(split.labels[allowed], minlength=len(split.classes))
    classes = split.labels[numbers].unique()
    smallest = int(classes[sizes[classes].argmin()])
    count, plural = int(sizes[smallest]), "s" if sizes[smallest] != 1 else ""
    beside = f" beside the {batch_size} of a batch" if batch_size > 1 else ""
    return (
        f"class {split.classes[smallest]!r} has {count} distinct image{plural}, and a line-up "
        f"needs {SIZES[-1]}{beside}"
    )


def refuse_tuned_on(
    attacks: Mapping[str, Attack],
    split: Images,
    victims: Tensor,
    advice: str = "audit other images",
) -> None:
    """Refuse an attack whose settings were chosen on one of the victims, by their numbers."""
    tuned = {
        name: frozenset(attack.tuned_on)
        for name, attack in attacks.items()
        if isinstance(attack, GradientMatching) and attack.tuned_on
    }
    for number in victims.tolist() if tuned else ():
        found = image_digest(split.images[number])
        for name, digests in tuned.items():
            if found in digests:
                raise GradveilError(
                    f"attack {name}: image {number} of {split.name} {split.split} is among the "
                    f"{len(digests)} that its settings were chosen on; {advice}"
                )


def mixed_classes(labels: Sequence[int]) -> str:
    """Say how many classes the images are of, such as `10 classes, 3 or 4 images each`."""
    counts = [labels.count(label) for label in dict.fromkeys(labels)]
    low, high = min(counts), max(counts)
    if len(counts) == 1:
        return f"1 class only, {low} image{'s' if low > 1 else ''}"
    each = f"{low}" if low == high else f"{low} to {high}"
    return f"{len(counts)} classes, {each} image{'' if each == '1' else 's'} each"


def drawn_again(defense: Defense, labels: Tensor, rng: Generator) -> Callable[[Tensor], Tensor]:
    """Return what the defense does to a batch with these labels, each time with the same draws.

    `rng` is the victim's generator before it drew. For a defense that cannot tell its draws as a
    function of images.
    """

    def change(images: Tensor) -> Tensor:
        return protected_batch(defense, Batch(images, labels), rng.clone_state()).images

    return change
