"""The line-up: does a reconstruction resemble the true picture more than others of its kind?

All candidates of a line-up are of the victim's class and went through the victim's own draws of
crop, flip and policy, so nothing but the picture can win it: the label, a class mean, or the black
border that a policy leaves are the same for every candidate. Whatever does not depend on the
picture is picked out in 1 of N line-ups, N being the number of candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.scores.identification import TIE, local_contrast, luminance, signatures

SIZES = (100, 50, 20)
"""Numbers of candidates, the best first: the largest that the smallest class allows is taken."""

SMALL_SIZES = (20, 10, 5, 2)
"""Numbers of candidates where few images are at hand, or each goes through many policies."""

REPLAYED = 1e-4  # difference at most of a picture that the same draws made twice
SPARE = 10  # images of each class that stand in no line-up, for shams
SHIFT = 2  # pixels that a reconstruction may be moved by
FAR = 8  # pixels that it may be moved by in a second ranking, which records keep and no test counts
INNER = 12  # pixels a side that are left to compare there, at least
SAME = 0.98  # likeness from which two pictures count as the same


@dataclass(frozen=True, eq=False)
class Lineups:
    """Who stands beside each victim: `candidates` (images, N), numbers in the split.

    The true image is candidate `true[i]` of line-up i. `spare` are images by class that stand in
    no line-up, and are no victims.
    """

    candidates: Tensor
    true: Tensor
    spare: dict[int, Tensor]

    @property
    def size(self) -> int:
        """N, the number of candidates of every line-up."""
        return self.candidates.shape[1]


def distinct(images: Tensor, labels: Tensor) -> Tensor:
    """Return True for images (uint8, NCHW) that nearly equal no earlier image of their class.

    They are compared as they lie, though a line-up moves and mirrors: docs/method.md says why.
    """
    kept = torch.ones(len(images), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        kept[members[_alike(images[members]).tril(-1).any(dim=1)]] = False
    return kept


def copies_of(images: Tensor, labels: Tensor, numbers: Tensor) -> dict[int, Tensor]:
    """Return the other images of its class that nearly equal each of these, all by their numbers.

    `images` are uint8, NCHW.
    """
    found = {}
    for label in labels[numbers].unique().tolist():
        members = (labels == label).nonzero().flatten()
        alike = _alike(images[members]).fill_diagonal_(False)
        for image in numbers[labels[numbers] == label].tolist():
            found[image] = members[alike[members == image].flatten()]
    return found


def _alike(images: Tensor) -> Tensor:
    """Return which images (uint8, NCHW) nearly equal each other, (N, N)."""
    known = signatures(images.float() / 255)
    alike = known @ known.T > SAME
    flat = ~known.any(dim=1)
    if bool(flat.any()):  # flat pictures have no signature: they are compared by their pixels
        pixels = images[flat].flatten(1).float()
        rows = flat.nonzero().flatten()
        alike[rows[:, None], rows] = torch.cdist(pixels, pixels) == 0
    return alike


def draw_victims(labels: Tensor, count: int, allowed: Tensor, seed: int) -> Tensor:
    """Draw images by their numbers, as many of each class as can be, in a random order.

    `allowed` says which images of the split may be drawn; there must be `count` of them.
    """
    rng = generator(seed, "victims")
    members: list[list[int]] = []
    for label in labels[allowed].unique().tolist():
        there = ((labels == label) & allowed).nonzero().flatten()
        members.append(there[torch.randperm(len(there), generator=rng)].tolist())
    order = torch.randperm(len(members), generator=rng).tolist()
    deepest = max(map(len, members), default=0)
    rounds = (members[k][r] for r in range(deepest) for k in order if r < len(members[k]))
    found = torch.tensor(list(islice(rounds, count)))
    if len(found) < count:
        raise GradveilError(f"{count} images to attack: there are {len(found)}")
    return found[torch.randperm(count, generator=rng)]


def choose(
    labels: Tensor,
    victims: Sequence[Tensor],
    allowed: Tensor,
    seed: int,
    *,
    copies: Mapping[int, Tensor] | None = None,
    sizes: Sequence[int] = SIZES,
    spare: int = SPARE,
) -> Lineups | None:
    """Draw the line-ups of the victims; None where a victim's class has too few images.

    `victims` are the images of each update by their numbers, in order; images of one update stand
    in no line-up of each other. `allowed` says which images of the split may stand in line-ups;
    `copies` are those that may not stand in a victim's, by its number. The number of candidates is
    the largest of `sizes` that leaves `spare` images of each class outside; where none does it is
    the smallest, and fewer are spare.
    """
    everyone = torch.cat(list(victims))
    classes = sorted(set(labels[everyone].tolist()))
    rng = generator(seed, "line-up")
    members: dict[int, Tensor] = {}
    for label in classes:
        there = ((labels == label) & allowed).nonzero().flatten()
        members[label] = there[torch.randperm(len(there), generator=rng)]
    barred = _barred(labels, victims, copies or {})
    beside = dict.fromkeys(classes, 0)  # the most of a class that a victim's line-up is without
    for image, kept_out in barred.items():
        label = int(labels[image])
        without = int(torch.isin(members[label], kept_out).sum()) - 1  # the victim is a candidate
        beside[label] = max(beside[label], without)
    room = min(len(there) - beside[label] for label, there in members.items())
    size = next((n for n in sizes if n + spare <= room), sizes[-1])
    if size > room:
        return None
    outside = {}
    for label, there in members.items():
        others = there[~torch.isin(there, everyone)]
        outside[label] = others[: max(0, min(spare, len(there) - size - beside[label]))]
        members[label] = there[~torch.isin(there, outside[label])]
    rows, true = [], []
    for image in everyone.tolist():
        there = members[int(labels[image])]
        others = there[~torch.isin(there, barred[image])]
        order = torch.randperm(len(others), generator=rng)[: size - 1]
        row = torch.cat([others[order], torch.tensor([image])])
        order = torch.randperm(size, generator=rng)
        rows.append(row[order])
        true.append(int((order == size - 1).nonzero()[0, 0]))
    return Lineups(torch.stack(rows), torch.tensor(true), outside)


def _barred(
    labels: Tensor, victims: Sequence[Tensor], copies: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Return who is no other candidate of a victim's line-up, itself included, by its number."""
    barred = {}
    for batch in victims:
        for image in batch.tolist():
            alike = batch[labels[batch] == labels[image]]
            barred[image] = torch.cat([alike, copies[image]]) if image in copies else alike
    return barred


def replay(
    transform: Callable[[Tensor], Tensor] | None, batch: Tensor, row: int, candidates: Tensor
) -> Tensor:
    """Put every candidate (N, C, H, W) in the place of image `row` of the victim's batch.

    `transform` is what the defense did to the batch (B, C, H, W), its draws included; None where
    it changes no images. Returns what it makes of the candidates there, (N, C, H, W). One that can
    repeat the draws of a row (`again`) changes each image by itself, and takes all of them at once.
    """
    if transform is None:
        return candidates
    again = getattr(transform, "again", None)
    if again is not None:
        together: Tensor = again(row, len(candidates))(candidates)
        return together
    made = []
    for candidate in candidates:
        changed = batch.clone()
        changed[row] = candidate
        made.append(transform(changed)[row])
    return torch.stack(made)


def is_replayed(made: Tensor, used: Tensor) -> bool:
    """Tell whether the same draws made the same pictures again."""
    return float((made.cpu() - used.cpu()).abs().max()) <= REPLAYED


def seen_from_everywhere(found: Tensor, shift: int = SHIFT) -> Tensor:
    """Return unit vectors (R, 50, pixels) of reconstructions (R, C, H, W), moved and mirrored.

    They are moved by up to `shift` pixels each way (2 make 5 x 5 places and their mirror images),
    and an edge of as many is left out; see `local_contrast`.
    """
    _check_side(found, shift)
    height, width = (side - 2 * shift for side in found.shape[2:])
    windows = luminance(found).unfold(1, height, 1).unfold(2, width, 1)  # (R, 5, 5, h, w)
    contrast = local_contrast(windows.flatten(0, 2))
    both = torch.stack([contrast, contrast.flip(2)], dim=1)  # mirroring commutes with contrast
    return F.normalize(both.view(len(found), -1, height * width), dim=2)


def seen_in_place(candidates: Tensor, shift: int = SHIFT) -> Tensor:
    """Return unit vectors (N, pixels) of candidates (N, C, H, W), an edge of `shift` left out."""
    _check_side(candidates, shift)
    inner = local_contrast(luminance(candidates[:, :, shift:-shift, shift:-shift]))
    return F.normalize(inner.flatten(1), dim=1)


def _check_side(images: Tensor, shift: int) -> None:
    if min(images.shape[2:]) <= 2 * shift:
        raise GradveilError(
            f"images of {images.shape[2]} x {images.shape[3]} pixels: a line-up needs at "
            f"least {2 * shift + 1} a side"
        )


def likeness_each(found: Tensor, candidates: Tensor, shift: int = SHIFT) -> Tensor:
    """How much each candidate (N, C, H, W) resembles each reconstruction (R, C, H, W), (R, N).

    The best over shifts of up to `shift` pixels and the mirror image, for every candidate alike.
    Pictures are compared by their locally normalized luminance; an edge of `shift` is left out.
    """
    alike: Tensor = seen_from_everywhere(found, shift) @ seen_in_place(candidates, shift).T
    return alike.amax(dim=1)


def likeness(found: Tensor, candidates: Tensor, shift: int = SHIFT) -> Tensor:
    """How much each candidate (N, C, H, W) resembles the best of the reconstructions, (N,)."""
    return likeness_each(found, candidates, shift).amax(dim=0)


@dataclass(frozen=True, eq=False)
class Shown:
    """The line-ups of an update's images, ready to be compared with reconstructions.

    `known` are the candidates as `seen_in_place` has them, (images, N, pixels); the true image is
    candidate `true[i]` of line-up i. `far` are the candidates for reconstructions that are moved by
    up to `FAR` pixels; None where too little of the pictures would be left to compare.
    """

    known: Tensor
    true: Tensor
    far: Tensor | None = None

    @classmethod
    def of(cls, candidates: Tensor, true: Tensor) -> "Shown":
        """Make the line-ups of candidates (images, N, C, H, W)."""
        flat, shape = candidates.flatten(0, 1), candidates.shape[:2]
        wide = min(candidates.shape[3:]) - 2 * FAR >= INNER
        far = seen_in_place(flat, FAR).view(*shape, -1) if wide else None
        return cls(seen_in_place(flat).view(*shape, -1), true, far)

    def ranks(self, found: Tensor, rng: Generator) -> list[int]:
        """Rank each true image by its likeness to the update's reconstructions (R, C, H, W).

        1 is the nearest. A candidate's likeness is its best over all reconstructions.
        """
        return self._ranks(self.known, found, SHIFT, rng)

    def far_ranks(self, found: Tensor, rng: Generator) -> list[int]:
        """Rank each true image where reconstructions may be moved by up to `FAR` pixels."""
        return [] if self.far is None else self._ranks(self.far, found, FAR, rng)

    def _ranks(self, known: Tensor, found: Tensor, shift: int, rng: Generator) -> list[int]:
        moved = seen_from_everywhere(found.to(known.device), shift).flatten(0, 1)
        alike = (known @ moved.T).amax(dim=2).cpu()
        return [
            rank_among(row, true, rng) for row, true in zip(alike, self.true.tolist(), strict=True)
        ]


def rank_among(alike: Tensor, true: int, rng: Generator) -> int:
    """The rank of candidate `true` by its likeness (N,), 1 for the nearest; a lot decides ties.

    So a picture that resembles no candidate more than another has rank 1 in 1 of N line-ups.
    """
    alike = alike.nan_to_num(0.0)
    nearer = int((alike > alike[true] + TIE).sum())
    equal = int(((alike - alike[true]).abs() <= TIE).sum())
    return nearer + 1 + int(torch.randint(equal, (), generator=rng))


def rank(found: Tensor, candidates: Tensor, true: int, rng: Generator, shift: int = SHIFT) -> int:
    """The rank of the true candidate by likeness to the reconstructions (R, C, H, W)."""
    return rank_among(likeness(found.float(), candidates.float(), shift), true, rng)
