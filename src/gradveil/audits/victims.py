"""Victims of an audit: drawn over all classes, each with a line-up of pictures of its class."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from gradveil.attacks import Attack, GradientMatching
from gradveil.attacks.attack_files import image_digest, short_digest
from gradveil.core.errors import GradveilError
from gradveil.core.text import shortened
from gradveil.core.types import Batch
from gradveil.data import Images
from gradveil.defenses import Defense
from gradveil.defenses.applied import protected_batch
from gradveil.scores.lineup import SIZES, Lineups, choose, copies_of, distinct, draw_victims

LEAST_SIDE = 5  # pixels: reconstructions are moved by up to 2 in every direction
MOST_NAMED = 3  # classes in a sentence
LONGEST = 30  # letters of a class's name there


@dataclass(frozen=True, eq=False)
class Victims:
    """The images that an audit attacks, by their numbers in the split, and their line-ups.

    `lineups` are None where there can be none, and `reason` says why. `scored` of the images were
    used by the search that chose a defense. `passed_over` are the classes too small for a line-up
    that no image was drawn of, with their distinct images.
    """

    numbers: Tensor
    lineups: Lineups | None
    reason: str = ""
    scored: int = 0
    passed_over: Mapping[str, int] = field(default_factory=dict)


def find_victims(
    split: Images,
    count: int,
    batch_size: int,
    first: int | None,
    seed: int,
    apart: Sequence[int] = (),
) -> Victims:
    """Draw the victims over all classes, or take `count` from `first` on, and their line-ups.

    Of pictures that nearly equal each other one alone may be drawn or stand in a line-up, as long
    as there are enough others; from `first` on, none that nearly equals a victim stands in its
    line-up. Classes too small for a line-up are not drawn from where the others suffice. Images
    `apart` are never drawn, and may stand in line-ups.
    """
    if (first or 0) + count > len(split):
        start = first or 0
        last = start + count - 1
        raise GradveilError(
            f"images {start} to {last}: {split.name} {split.split} has {len(split)}, from 0"
        )
    unlike = distinct(split.images, split.labels)
    passed_over: dict[str, int] = {}
    if first is not None:
        numbers = torch.arange(first, first + count)
    else:
        left = torch.ones(len(split), dtype=torch.bool)
        left[list(apart)] = False
        drawn_from = _drawn_from(split, unlike, left, count)
        passed_over = _passed_over(split, unlike, left, drawn_from)
        numbers = draw_victims(split.labels, count, drawn_from, seed)
    if min(split.images.shape[2:]) < LEAST_SIDE:
        reason = f"images are smaller than {LEAST_SIDE} pixels"
        return Victims(numbers, None, reason, passed_over=passed_over)
    allowed = unlike.clone()
    allowed[numbers] = True
    copies: dict[int, Tensor] = {}
    if first is not None:
        allowed, copies = _without_copies(split, unlike, numbers)
    updates = numbers.split(batch_size)
    lineups = choose(split.labels, updates, allowed, seed, copies=copies)
    reason = "" if lineups is not None else _too_few(split, updates, allowed)
    return Victims(numbers, lineups, reason, passed_over=passed_over)


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


def _passed_over(split: Images, unlike: Tensor, left: Tensor, drawn_from: Tensor) -> dict[str, int]:
    """Return the classes too small for a line-up that are not drawn from, with their sizes."""
    sizes, could, can = (
        torch.bincount(split.labels[some], minlength=len(split.classes)).tolist()
        for some in (unlike, left, drawn_from)
    )
    return {
        name: sizes[label]
        for label, name in enumerate(split.classes)
        if could[label] and not can[label] and sizes[label] < SIZES[-1]
    }


def _without_copies(
    split: Images, unlike: Tensor, numbers: Tensor
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return which images may stand in line-ups, and the copies of victims, by their numbers.

    Images that nearly equal a victim may stand in none, unless they are victims too: these are left
    out of each other's line-ups alone.
    """
    if bool(unlike[numbers].all()):  # then no image of `unlike` nearly equals a victim
        return unlike, {}
    copies = copies_of(split.images, split.labels, numbers)
    allowed = unlike.clone()
    for alike in copies.values():
        allowed[alike] = False
    allowed[numbers] = True
    return allowed, copies


def _too_few(split: Images, updates: Sequence[Tensor], allowed: Tensor) -> str:
    """Say which victim's class has too few images for a line-up."""
    sizes = torch.bincount(split.labels[allowed], minlength=len(split.classes))
    most = torch.stack(
        [torch.bincount(split.labels[some], minlength=len(split.classes)) for some in updates]
    ).amax(dim=0)
    classes = most.nonzero().flatten()
    smallest = int(classes[(sizes - most)[classes].argmin()])
    count = int(sizes[smallest])
    beside = f" beside the {int(most[smallest])} of a batch" if most[smallest] > 1 else ""
    where = " in the test split" if split.split == "test" else ""
    return (
        f"class {split.classes[smallest]!r} has {count}{_distinct_images(count)}{where}, and a "
        f"line-up needs {SIZES[-1]}{beside}"
    )


def passed_over_words(classes: Mapping[str, int]) -> str:
    """Name the classes that no image was drawn of, with their distinct images, and say why.

    Of many classes the first few are named.
    """
    named = [
        f"{shortened(name, LONGEST)!r} with {size}{'' if number else _distinct_images(size)}"
        for number, (name, size) in enumerate(classes.items())
    ][:MOST_NAMED]
    many = f"{len(classes)} classes, {'such as ' if len(classes) > MOST_NAMED else ''}"
    which = many if len(classes) > 1 else "class "
    return f"no image was drawn of {which}{', '.join(named)}: a line-up needs {SIZES[-1]}"


def _distinct_images(count: int) -> str:
    return f" distinct image{'' if count == 1 else 's'}"


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


def count_public(split: Images, victims: Victims, public: Images) -> int:
    """Count the victims among public images, where not all others of their line-ups are.

    A guess made of these images, such as a class mean, could win a line-up without an update.
    """
    lineups = victims.lineups
    if lineups is None:
        return 0
    known = {short_digest(image) for image in public.images}

    def there(numbers: Tensor) -> list[bool]:
        return [short_digest(split.images[number]) in known for number in numbers.tolist()]

    found = sum(there(victims.numbers))
    return found if found and not all(there(lineups.candidates.unique())) else 0


def find_scored(split: Images, digests: Set[str]) -> tuple[int, ...]:
    """Return the numbers of the images that have one of these short digests."""
    if not digests:
        return ()
    found = (short_digest(image) in digests for image in split.images)
    return tuple(number for number, used in enumerate(found) if used)


def refuse_few_unscored(split: Images, count: int, scored: Sequence[int]) -> None:
    """Refuse more victims than there are images that no search has chosen a defense by."""
    left = len(split) - len(scored)
    if not scored or not left < count <= len(split):
        return
    rest = f"choose at most {left}, or other images" if left else "choose other images"
    raise GradveilError(
        f"images {count}: {split.name} {split.split} has {left} that the search of the defense "
        f"has not scored; {rest}; those from `first` on are attacked whatever was scored"
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
