"""The probe: what a short real attack recovers of a few images that a policy has changed.

A search should rank by it. Published scores stand in for an attack, and on some models they fall
where the attack's gain over blind guesses rises; a short attack foretells the long one.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks import PRESETS, Attack, GradientMatching
from gradveil.attacks.blind import (
    Blind,
    BlindClassMean,
    BlindGray,
    BlindImage,
    BlindNoise,
    find_means,
    stack_guesses,
)
from gradveil.attacks.labels import Joint
from gradveil.attacks.starts import Start
from gradveil.audits.outcomes import CEILING
from gradveil.clients import Client, check_batch
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation
from gradveil.data import Images
from gradveil.scores import over_blind, signatures, ssim
from gradveil.scores.identification import TIE
from gradveil.scores.scorer import Estimate, Scorer, image_blocks, prepared
from gradveil.transforms import Policy, Preparation

STEPS = 200
CANDIDATES = 300
RESERVED = 100  # the first images of a split, which audits attack: no score may have seen them
FIRST_BLOCKS = (5, 5, 10, 20)
"""An image costs hundreds of iterations, so a race looks as soon as it may: in a simulation that
saved a fifth of the work, compared with the blocks of other scores."""

AT_ONCE = {"cpu": 16, "cuda": 256}
"""Victims in one run: as many as a processor's cache holds, and as keep a GPU busy."""


@dataclass(frozen=True, eq=False)
class SeededStarts(Start):
    """Draw each victim's start from the seed and the victim's number alone."""

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


@dataclass(frozen=True, eq=False)
class Strike:
    """Attack the gradients that a client shares of single images, `at_once` of them in one run."""

    client: Client
    attack: Attack
    seed: int
    at_once: int

    def __call__(
        self, images: Tensor, labels: Tensor, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return reconstructions (images, C, H, W) in [0, 1], and (images) booleans: which exist.

        `images` are floats in [0, 1]; an image's number decides its start. A run that does not fit
        into the memory is made in halves.
        """
        parts = torch.arange(len(images)).tensor_split(-(-len(images) // self.at_once))
        each = [
            self._run(images[rows], labels[rows], [numbers[row] for row in rows.tolist()])
            for rows in parts
        ]
        found, exist = zip(*each, strict=True)
        return torch.cat(found), torch.cat(exist)

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
        shared = self._share(batches)
        rows = [row for row, seen in enumerate(shared) if seen is not None]
        results = self._seeded([numbers[row] for row in rows])(
            [seen for seen in shared if seen is not None], generator(self.seed, "strike")
        )
        found = torch.zeros_like(images)
        exist = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        for row, result in zip(rows, results, strict=True):
            found[row] = result.images[0].to(found)
            exist[row] = result.status == "ok"
        exist &= found.flatten(1).isfinite().all(1)
        return found.clamp(0, 1), exist

    def _seeded(self, numbers: Sequence[int]) -> Attack:
        if not isinstance(self.attack, GradientMatching):
            return self.attack
        return replace(
            self.attack, start=SeededStarts(self.attack.start, self.seed, tuple(numbers))
        )

    def _share(self, batches: Sequence[Batch]) -> list[Observation | None]:
        """Share every batch; None where its gradient is zero or not finite: clients refuse that."""
        try:
            shared = self.client.share_batches(batches, generator(self.seed, "share"))
            return [seen for seen, _ in shared]
        except GradveilError:
            if len(batches) == 1:
                return [None]
            return [seen for batch in batches for seen in self._share([batch])]


@dataclass(frozen=True, eq=False)
class ProbeScorer(Scorer):
    """Score policies by a short attack: dB over the best blind guess, SSIM, and identification.

    All three compare the reconstruction with the image that was used. Images are prepared with the
    same crop and flip for every policy (`augment`), then by the policy, and attacked one by one
    with known labels, from a start that is the same for every policy. An image counts as identified
    when it is nearer to its reconstruction than any of the `candidates`, which are other images
    prepared in the same way.

    `guesses` are (images, guesses, C, H, W) in [0, 1]. The last must be noise: it stands in for a
    reconstruction where the attack diverged or a gradient cannot be shared, so that every image
    counts. `sizes` are the numbers of images in each block; None takes those of a race.
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
        self._check_guesses()
        for name in ("unit", "victims_at_once"):
            if getattr(self, name) < 1:
                raise GradveilError(
                    f"{name.replace('_', ' ')} {getattr(self, name)}: it must be at least 1"
                )
        if min(self.blocks) < 1 or sum(self.blocks) != len(self.images):
            raise GradveilError(
                f"blocks of {self.blocks}: expected sizes that add up to {len(self.images)} images"
            )
        if isinstance(self.attack, GradientMatching) and isinstance(self.attack.labels, Joint):
            raise GradveilError(
                f"attack {self.attack} looks for labels too: a probe tells them, choose an attack "
                "that takes them as known"
            )
        self._check_model()

    @property
    def blocks(self) -> tuple[int, ...]:
        return race_blocks(len(self.images)) if self.sizes is None else self.sizes

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def score(self, policies: Sequence[Policy], block: int) -> dict[str, Tensor]:
        start = sum(self.blocks[:block])
        rows = torch.arange(start, start + self.blocks[block])
        used = self._pixels(
            prepared(self.images[rows].to(self.device), policies, self.seed, block, self.augment)
        )
        guesses = self.guesses[rows].to(self.device)
        found = self._strike(policies, rows, used, guesses[:, -1])
        each = [
            self._scores(policy, theirs, truth, guesses)
            for policy, theirs, truth in zip(policies, found, used, strict=True)
        ]
        return {
            name: torch.stack([scores[i] for scores in each]).cpu()
            for i, name in enumerate(self.names)
        }

    def _strike(
        self, policies: Sequence[Policy], rows: Tensor, used: Tensor, stand_in: Tensor
    ) -> Tensor:
        """Attack `used` (policies, images, C, H, W); `stand_in` where there is nothing to find."""
        client, count = Client(self.model, self.classes), len(policies)
        found, exist = Strike(client, self.attack, self.seed, self.victims_at_once)(
            used.flatten(0, 1), self.labels[rows].repeat(count), rows.tolist() * count
        )
        if not bool(exist.all()):
            names = ", ".join(map(str, policies))
            warnings.warn(
                f"{int((~exist).sum())} of {len(exist)} images under {names} gave an attack "
                "nothing to find: they score as a guess of noise",
                GradveilWarning,
                stacklevel=3,
            )
        noise_like = stand_in.to(found).repeat(count, 1, 1, 1)
        return torch.where(exist.view(-1, 1, 1, 1), found, noise_like).view_as(used)

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

    def _check_guesses(self) -> None:
        shape = self.guesses.shape
        if (
            self.guesses.ndim != 5
            or shape[2:] != self.images.shape[1:]
            or len(self.guesses) != len(self.images)
        ):
            wanted = ", ".join(map(str, self.images.shape[1:]))
            raise GradveilError(
                f"guesses of shape {tuple(shape)}: expected ({len(self.images)}, guesses, {wanted})"
            )

    def _check_model(self) -> None:
        """Refuse a model that can share the gradient of no image: it does not fit, or is dead."""
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
    """Sizes of the blocks of images after which a race looks at its policies."""
    return image_blocks(images, FIRST_BLOCKS)


def nearest(found: Tensor, used: Tensor, others: Tensor) -> Tensor:
    """1 where `found[i]` is nearer to `used[i]` than to any of `others`, else 0.

    The rule is that of `scores.identify`.
    """
    made = signatures(found)
    likeness = (made * signatures(used)).sum(1, keepdim=True)
    nearer = made @ signatures(others).T > likeness + TIE
    return (made.any(1) & ~nearer.any(1)).double()


def check_pixels(name: str, images: Tensor, shape: Sequence[int]) -> None:
    """Refuse images that are not uint8 of this shape (C, H, W), or none at all."""
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


def short_attack(attack: Attack = PRESETS["adam-cosine"], steps: int = STEPS) -> Attack:
    """The attack with `steps` iterations and no frames; one without iterations as it is."""
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
    """Score one policy by a short attack on uint8 images: `over_blind` in dB, `ssim`, `identified`.

    `candidates` are other images of the same kind, uint8. Without `guesses` the blind ones are
    gray, the candidates' mean color and noise; class means, if known, are harder to beat.
    """
    if guesses is None:
        for name, some in (("images", images), ("candidates", candidates)):
            check_pixels(name, some, images.shape[1:])
        alike = torch.zeros(len(candidates), dtype=torch.long)  # their classes are not known
        color = BlindImage("mean color", find_means(candidates, alike, classes).color)
        guesses = blind_guesses([BlindGray(), color], images, labels, seed)
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
        victims_at_once=_at_once(model),
        sizes=(len(images),),
    )
    return scorer.estimates([policy])[0]


def make_probe(
    train: Images,
    split: Images,
    model: nn.Module,
    indices: Tensor | Sequence[int],
    *,
    attack: Attack | None = None,
    seed: int = 0,
    augment: bool = True,
    device: torch.device | None = None,
    victims_at_once: int | None = None,
    sizes: tuple[int, ...] | None = None,
) -> ProbeScorer:
    """Make a probe on these images of the split, with blind guesses from the training images.

    Candidates are drawn among the other images, without the first 100 of the split, which are for
    audits. `device` None leaves the model where it is; `attack` None is `short_attack()`.
    """
    chosen = split.select(indices)
    if not len(chosen):
        raise GradveilError("no images to probe: give at least one index")
    order = torch.randperm(len(split), generator=generator(seed, "candidates", "order"))
    others = order[(order >= RESERVED) & ~torch.isin(order, torch.as_tensor(indices))][:CANDIDATES]
    if not len(others):
        raise GradveilError(
            f"{split.name} {split.split} has {len(split)} images: none is left to tell the probed "
            "ones from"
        )
    found = find_means(train.images, train.labels, len(train.classes))
    blind = [
        BlindGray(),
        BlindImage("mean color", found.color),
        BlindClassMean(found.classes),
    ]
    model = model if device is None else model.to(device)
    at_once = victims_at_once or _at_once(model)
    smallest = min(race_blocks(len(chosen)) if sizes is None else sizes)
    on_gpu = next(model.parameters()).is_cuda
    return ProbeScorer(
        model,
        len(split.classes),
        chosen.images,
        chosen.labels,
        split.images[others],
        blind_guesses(blind, chosen.images, chosen.labels, seed),
        attack or short_attack(),
        augment,
        seed,
        unit=max(1, at_once // smallest) if on_gpu else 1,
        victims_at_once=at_once,
        sizes=sizes,
    )


def _at_once(model: nn.Module) -> int:
    return AT_ONCE.get(next(model.parameters()).device.type, AT_ONCE["cpu"])


def blind_guesses(attacks: Sequence[Blind], images: Tensor, labels: Tensor, seed: int) -> Tensor:
    """Return every attack's guess of each image (N, C, H, W), and noise last.

    That is (N, attacks + 1, C, H, W). The noise of an image depends on the seed and the image's
    number alone.
    """
    channels, height, width = images.shape[1:]
    rngs = [generator(seed, "noise", number) for number in range(len(images))]
    return stack_guesses([*attacks, BlindNoise()], (channels, height, width), labels, rngs)
