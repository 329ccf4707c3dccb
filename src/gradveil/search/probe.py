"""The probe: what a short real attack recovers of a few images that a policy has changed. It is what a search should rank by.

Published scores stand in for an attack; on some models they fall where its gain over blind guesses rises. A short attack foretells
the long one.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack, GradientMatching, find
from gradveil.attacks.blind import find_means
from gradveil.attacks.labels import Joint
from gradveil.attacks.starts import Start
from gradveil.audits.scoring import CEILING
from gradveil.clients import Client, check_batch
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation
from gradveil.data import Images
from gradveil.scores import gray, mean_color, noise, over_blind, signatures, ssim
from gradveil.scores.identification import TIE
from gradveil.scores.scorer import Estimate, Scorer, image_blocks, prepared
from gradveil.transforms import Policy, Preparation


@dataclass(frozen=True, eq=False)
class OwnStarts(Start):
    """For each victim a start from its own generator, so that it depends on the seed and the victim's number alone."""

    start: Start
    seed: int
    numbers: tuple[int, ...] = field(repr=False)

    @property
    def needs(self) -> tuple[str, ...]:
        return self.start.needs

    def bind(
        self, seen: Sequence[Observation], rng: Generator, restarts: int, labels: Tensor
    ) -> Tensor:
        victims = zip(seen, self.numbers, labels.split(restarts), strict=True)
        return torch.cat(
            [
                self.start.bind([one], generator(self.seed, "start", number), restarts, rows)
                for one, number, rows in victims
            ]
        )


def check_attack(attack: Attack) -> None:
    """Refuse one that draws more than its starts."""
    if isinstance(attack, GradientMatching) and isinstance(attack.labels, Joint):
        raise GradveilError(
            f"attack {attack} looks for labels too: a probe tells them, choose an attack that takes them as known"
        )


@dataclass(frozen=True, eq=False)
class Strike:
    """An attack on the gradients that a client shares of single images, at most `at_once` victims in one run."""

    client: Client
    attack: Attack
    seed: int
    at_once: int

    def __call__(
        self, images: Tensor, labels: Tensor, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """What is found, (images, C, H, W) in [0, 1], and which of it there is.

        `images` are floats in [0, 1]; an image's number decides its start. A run that does not fit the memory is made in halves.
        """
        parts = torch.arange(len(images)).tensor_split(-(-len(images) // self.at_once))
        each = [
            self._run(images[rows], labels[rows], [numbers[row] for row in rows.tolist()])
            for rows in parts
        ]
        found, there = zip(*each, strict=True)
        return torch.cat(found), torch.cat(there)

    def _run(self, images: Tensor, labels: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        try:
            return self._reconstructed(images, labels, numbers)
        except torch.OutOfMemoryError:
            if len(images) == 1:
                raise GradveilError(
                    "the GPU's memory is too small to attack a single image: choose a smaller model"
                ) from None
        torch.cuda.empty_cache()
        return replace(self, at_once=-(-len(images) // 2))(images, labels, numbers)

    def _reconstructed(
        self, images: Tensor, labels: Tensor, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        batches = [
            Batch(image[None], label[None]) for image, label in zip(images, labels, strict=True)
        ]
        shared = self._shared(batches)
        alive = [row for row, one in enumerate(shared) if one is not None]
        seen = [one for one in shared if one is not None]
        results = self._started([numbers[row] for row in alive])(
            seen, generator(self.seed, "strike")
        )
        found, there = (
            torch.zeros_like(images),
            torch.zeros(len(images), dtype=torch.bool, device=images.device),
        )
        for row, result in zip(alive, results, strict=True):
            found[row] = result.images[0].to(found)
            there[row] = result.status == "ok"
        there &= found.flatten(1).isfinite().all(1)
        return found.clamp(0, 1), there

    def _started(self, numbers: Sequence[int]) -> Attack:
        if not isinstance(self.attack, GradientMatching):
            return self.attack
        return replace(self.attack, start=OwnStarts(self.attack.start, self.seed, tuple(numbers)))

    def _shared(self, batches: Sequence[Batch]) -> list[Observation | None]:
        """None for a victim whose gradient is zero or not finite, which the client refuses to share."""
        try:
            return [
                seen
                for seen, _ in self.client.share_batches(batches, generator(self.seed, "share"))
            ]
        except GradveilError:
            return (
                [None]
                if len(batches) == 1
                else [one for batch in batches for one in self._shared([batch])]
            )


FIRST_BLOCKS = (
    5,
    5,
    10,
    20,
)  # an image costs hundreds of iterations: a race looks as soon as it may (simulated: a fifth less work)


@dataclass(frozen=True, eq=False)
class ProbeScorer(Scorer):
    """dB over the best blind guess, SSIM, and whether the used image is nearest to the found one; each against the used image.

    Images are prepared with the same crop and flip for every policy (`augment`), then by the policy, and attacked one to a victim
    with known labels, from a start that is the same for every policy. An image is to be identified among `candidates`, other
    images prepared in the same way. `guesses` are (images, guesses, C, H, W) in [0, 1]. The last guess is noise: it stands in where an
    attack diverged or a gradient cannot be shared, so that every image counts. `sizes` are those of the blocks; None: a race's.
    """

    names: ClassVar[tuple[str, ...]] = ("over_blind", "ssim", "identified")

    model: nn.Module = field(repr=False)
    classes: int
    images: Tensor = field(repr=False)  # uint8 NCHW
    labels: Tensor = field(repr=False)
    candidates: Tensor = field(repr=False)  # uint8 NCHW, none of the images
    guesses: Tensor = field(repr=False)
    attack: Attack
    augment: bool = True
    seed: int = 0
    unit: int = 1
    victims_at_once: int = 16
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("images", "candidates"):
            check_pixels(name, getattr(self, name), self.images.shape[1:])
        check_batch(Batch(self.images.float() / 255, self.labels), self.classes, "the probe")
        if (
            self.guesses.ndim != 5
            or self.guesses.shape[2:] != self.images.shape[1:]
            or len(self.guesses) != len(self.images)
        ):
            expected = (
                f"({len(self.images)}, guesses, {', '.join(map(str, self.images.shape[1:]))})"
            )
            raise GradveilError(
                f"guesses of shape {tuple(self.guesses.shape)}: expected {expected}"
            )
        for name in ("unit", "victims_at_once"):
            if getattr(self, name) < 1:
                raise GradveilError(
                    f"{name.replace('_', ' ')} {getattr(self, name)}: it must be at least 1"
                )
        if min(self.blocks) < 1 or sum(self.blocks) != len(self.images):
            raise GradveilError(
                f"blocks of {self.blocks}: expected sizes that add up to {len(self.images)} images"
            )
        check_attack(self.attack)
        self._check_model()

    @property
    def blocks(self) -> tuple[int, ...]:
        return race_blocks(len(self.images)) if self.sizes is None else self.sizes

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def score(self, policies: Sequence[Policy], block: int) -> dict[str, Tensor]:
        if not policies:
            return {
                name: torch.empty(0, self.blocks[block], dtype=torch.float64) for name in self.names
            }
        start, size = sum(self.blocks[:block]), self.blocks[block]
        rows = torch.arange(start, start + size)
        used = self._pixels(
            prepared(self.images[rows].to(self.device), policies, self.seed, block, self.augment)
        )
        strike = Strike(
            Client(self.model, self.classes), self.attack, self.seed, self.victims_at_once
        )
        found, there = strike(
            used.flatten(0, 1),
            self.labels[rows].repeat(len(policies)),
            rows.tolist() * len(policies),
        )
        guesses = self.guesses[rows].to(self.device)
        found = torch.where(
            there.view(-1, 1, 1, 1), found, guesses[:, -1].to(found).repeat(len(policies), 1, 1, 1)
        ).view_as(used)
        if not bool(there.all()):
            lost = f"{int((~there).sum())} of {len(there)} images under {', '.join(map(str, policies))}"
            warnings.warn(
                f"{lost} gave an attack nothing to find: they score as a guess of noise",
                GradveilWarning,
                stacklevel=2,
            )
        each = [self._scores(*one, guesses) for one in zip(policies, found, used, strict=True)]
        return {
            name: torch.stack([scores[i] for scores in each]).cpu()
            for i, name in enumerate(self.names)
        }

    def _scores(
        self, policy: Policy, found: Tensor, used: Tensor, guesses: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        over = over_blind(found, used, guesses).clamp(-CEILING, CEILING)
        prepare = Preparation(policy=policy) if self.augment else policy
        others = prepare(
            self.candidates.to(self.device), generator(self.seed, "candidates", str(policy))
        )
        return over, ssim(found, used), nearest(found, used, self._pixels(others))

    def _pixels(self, images: Tensor) -> Tensor:
        return images.to(next(self.model.parameters()).dtype) / 255

    def _check_model(self) -> None:
        """Refuse a model that can share the gradient of none of the images: it does not fit them, or it is dead."""
        client, problem = Client(self.model, self.classes), None
        for image, label in zip(self.images, self.labels, strict=True):
            try:
                client.share_batches(
                    [Batch(self._pixels(image[None]), label[None])], generator(self.seed)
                )
                return
            except GradveilError as error:
                problem = error
        raise GradveilError(str(problem).removeprefix("victim 0: "))


def race_blocks(images: int) -> tuple[int, ...]:
    return image_blocks(images, FIRST_BLOCKS)


def nearest(found: Tensor, used: Tensor, others: Tensor) -> Tensor:
    """1 where `found[i]` is nearer to `used[i]` than to any of the others, by the rule of `scores.identify`; else 0."""
    made = signatures(found)
    likeness = (made * signatures(used)).sum(1, keepdim=True)
    nearer = made @ signatures(others).T > likeness + TIE
    return (made.any(1) & ~nearer.any(1)).double()


def check_pixels(name: str, images: Tensor, shape: Sequence[int]) -> None:
    """Refuse what is not uint8 images of this shape."""
    if (
        images.dtype != torch.uint8
        or images.ndim != 4
        or not len(images)
        or images.shape[1:] != tuple(shape)
    ):
        got = f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
        expected = ", ".join(map(str, shape)) if len(shape) == 3 else "channels, height, width"
        raise GradveilError(
            f"{name} are {got}: expected uint8 of shape (images, {expected}), at least one image"
        )


STEPS = 200
CANDIDATES = 300
RESERVED = 100  # the first images of a split, which audits attack: no score may have seen them
AT_ONCE = {
    "cpu": 16,
    "cuda": 256,
}  # victims in one run: what a processor's cache takes, and what keeps a GPU busy


def short_attack(steps: int = STEPS, name: str = "adam-cosine") -> Attack:
    """A preset with so many iterations."""
    attack = find(name)
    return (
        replace(attack, steps=steps, frames=0) if isinstance(attack, GradientMatching) else attack
    )


def probe_score(
    model: nn.Module,
    classes: int,
    images: Tensor,
    labels: Tensor,
    policy: Policy,
    *,
    candidates: Tensor,
    guesses: Tensor | None = None,
    attack: Attack | None = None,
    augment: bool = True,
    seed: int = 0,
) -> dict[str, Estimate]:
    """What a short attack recovers of uint8 images under one policy, by name: `over_blind` in dB, `ssim`, `identified`.

    `candidates` are other images of the same kind, uint8. Without guesses of your own the blind ones are grey, the candidates' mean
    color and noise; class means, where they are known, are harder to beat.
    """
    if guesses is None:
        for name, some in (("images", images), ("candidates", candidates)):
            check_pixels(name, some, images.shape[1:])
        guesses = blind_guesses(len(images), mean_color(candidates.double() / 255)[0].float(), seed)
    at_once = AT_ONCE.get(next(model.parameters()).device.type, AT_ONCE["cpu"])
    scorer = ProbeScorer(
        model,
        classes,
        images,
        labels,
        candidates,
        guesses,
        attack or short_attack(),
        augment,
        seed,
        victims_at_once=at_once,
        sizes=(len(images),),
    )
    return scorer.estimates([policy])[0]


def make_probe(
    train: Images,
    split: Images,
    model: nn.Module,
    indices: Tensor | Sequence[int],
    *,
    attack: str | Attack = "adam-cosine",
    steps: int = STEPS,
    seed: int = 0,
    augment: bool = True,
    device: torch.device | None = None,
    victims_at_once: int | None = None,
    sizes: tuple[int, ...] | None = None,
) -> ProbeScorer:
    """A probe on these images of the split, with the audit's blind guesses from the training images.

    Candidates are drawn among the other images, without the first 100 of the split, which are for audits. `steps` are those of an
    attack named as a preset; `device` None leaves the model where it is.
    """
    chosen = split.select(indices)
    if not len(chosen):
        raise GradveilError("no images to probe: give at least one index")
    order = torch.randperm(len(split), generator=generator(seed, "candidates", "order"))
    others = order[(order >= RESERVED) & ~torch.isin(order, torch.as_tensor(indices))][:CANDIDATES]
    if not len(others):
        raise GradveilError(
            f"{split.name} {split.split} has {len(split)} images: none is left to tell the probed ones from"
        )
    found = find_means(train.images, train.labels, len(train.classes))
    means, color = found.classes, found.color
    model = model if device is None else model.to(device)
    place = next(model.parameters()).device.type
    at_once = victims_at_once or AT_ONCE.get(place, AT_ONCE["cpu"])
    smallest = min(race_blocks(len(chosen)) if sizes is None else sizes)
    return ProbeScorer(
        model,
        len(split.classes),
        chosen.images,
        chosen.labels,
        split.images[others],
        blind_guesses(len(chosen), color, seed, means[chosen.labels]),
        attack if isinstance(attack, Attack) else short_attack(steps, attack),
        augment,
        seed,
        unit=max(1, at_once // smallest) if place == "cuda" else 1,
        victims_at_once=at_once,
        sizes=sizes,
    )


def blind_guesses(count: int, color: Tensor, seed: int, means: Tensor | None = None) -> Tensor:
    """(images, guesses, C, H, W): grey, the mean color, each image's class mean where given, and noise of its own."""
    shape = (color.shape[0], color.shape[1], color.shape[2])
    same = [guess.expand(count, *shape) for guess in (gray(shape)[0], color)]
    drawn = torch.cat(
        [noise(shape, 1, generator(seed, "noise", number)) for number in range(count)]
    )
    return torch.stack([*same, *([] if means is None else [means]), drawn], dim=1)
