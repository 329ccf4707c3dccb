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
from gradveil.attacks.blind import Blind, stack_guesses
from gradveil.attacks.labels import Joint
from gradveil.attacks.starts import Start
from gradveil.audits.outcomes import CEILING
from gradveil.clients import Client, check_batch
from gradveil.controls import Controls
from gradveil.core.boundary import check_least
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation
from gradveil.data import Images
from gradveil.defenses import PolicyDefense
from gradveil.scores import over_blind, ssim
from gradveil.scores.lineup import (
    SMALL_SIZES,
    choose,
    distinct,
    draw_victims,
    rank_among,
    seen_from_everywhere,
    seen_in_place,
)
from gradveil.scores.scorer import Scorer, image_blocks, prepared
from gradveil.transforms import Policy

STEPS = 200
PUBLIC = 1_000  # images at most that go through every policy for the blind guesses
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
                self.start.bind([victim], generator(self.seed, "start", number), restarts, rows)
                for victim, number, rows in victims
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
    """Score policies by a short attack: dB over a blind guess, SSIM, and rank 1 in a line-up.

    All three compare the reconstruction with the image that was used. Images are prepared with the
    same crop and flip for every policy (`augment`), then by the policy, and attacked one by one
    with known labels, from a start that is the same for every policy. In the line-up of an image
    stand its `candidates` (images, N, C, H, W), of its class, the true one at `true` (images,);
    each goes through the same draws as the image.

    The guess knows labels and policy: of those that the `public` images give after the policy, it
    is the best on them. Noise stands in for a reconstruction where the attack diverged or a
    gradient cannot be shared, so that every image counts. `sizes` are the numbers of images in
    each block; None takes those of a race.
    """

    names: ClassVar[tuple[str, ...]] = ("over_blind", "ssim", "lineup")

    model: nn.Module = field(repr=False)
    classes: int
    images: Tensor = field(repr=False)  # uint8 NCHW
    labels: Tensor = field(repr=False)
    candidates: Tensor = field(repr=False)  # uint8
    true: Tensor = field(repr=False)
    public: Images = field(repr=False)
    attack: Attack
    augment: bool = True
    seed: int = 0
    unit: int = 1
    victims_at_once: int = 16
    sizes: tuple[int, ...] | None = None
    _guesses: dict[Policy, Blind] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_pixels("images", self.images, self.images.shape[1:])
        check_batch(Batch(self.images.float() / 255, self.labels), self.classes, "the probe")
        self._check_candidates()
        check_least(self, {"unit": 1, "victims_at_once": 1})
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
        found = self._strike(policies, rows, used)
        ranks = self._ranks(policies, rows, block, found)
        guesses = torch.cat([self._guess(policy, rows).to(used) for policy in policies])
        measured = self.measure(
            found.flatten(0, 1),
            used.flatten(0, 1),
            guesses,
            [rank for some in ranks for rank in some],
        )
        shape = len(policies), len(rows)
        return {name: measured[name].double().cpu().view(shape) for name in self.names}

    def measure(
        self, found: Tensor, truth: Tensor, guess: Tensor, ranks: Sequence[int]
    ) -> dict[str, Tensor]:
        """Return the value of each image by each name, for images (images, C, H, W) in [0, 1]."""
        over = over_blind(found, truth, guess[:, None]).clamp(-CEILING, CEILING)
        first = torch.tensor([float(rank == 1) for rank in ranks])
        return {"over_blind": over, "ssim": ssim(found, truth), "lineup": first}

    def _strike(self, policies: Sequence[Policy], rows: Tensor, used: Tensor) -> Tensor:
        """Attack `used` (policies, images, C, H, W); noise where there is nothing to find."""
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
        shape = self.images.shape[1:]
        noise = torch.stack(
            [
                torch.rand(shape, generator=generator(self.seed, "noise", row))
                for row in rows.tolist()
            ]
        )
        noise = noise.to(found).repeat(count, 1, 1, 1)
        return torch.where(exist.view(-1, 1, 1, 1), found, noise).view_as(used)

    def _ranks(
        self, policies: Sequence[Policy], rows: Tensor, block: int, found: Tensor
    ) -> list[list[int]]:
        """Rank each true image in its line-up, by policy and image."""
        candidates = self.candidates[rows].to(self.device)  # (images, N, C, H, W)
        count = candidates.shape[1]
        shown = self._pixels(
            prepared(
                candidates.flatten(0, 1), policies, self.seed, block, self.augment, alike=count
            )
        )
        alike = torch.stack(
            [
                (
                    seen_from_everywhere(theirs)
                    @ seen_in_place(beside).unflatten(0, (len(rows), count)).transpose(1, 2)
                ).amax(dim=1)
                for theirs, beside in zip(found, shown, strict=True)
            ]
        ).cpu()
        ranks = []
        for policy, theirs in zip(policies, alike, strict=True):
            rng = generator(self.seed, "lot", str(policy), block)
            pairs = zip(theirs, self.true[rows].tolist(), strict=True)
            ranks.append([rank_among(likeness, true, rng) for likeness, true in pairs])
        return ranks

    def _guess(self, policy: Policy, rows: Tensor) -> Tensor:
        """Return the guess of these images, (images, C, H, W), by somebody who knows the policy."""
        channels, height, width = self.images.shape[1:]
        rngs = [generator(self.seed, "noise", row) for row in rows.tolist()]
        shape = channels, height, width
        return stack_guesses([self._chosen_guess(policy)], shape, self.labels[rows], rngs)[:, 0]

    def _chosen_guess(self, policy: Policy) -> Blind:
        """Return the kind of guess to beat; kept for the next blocks of the same policies."""
        if policy not in self._guesses:
            public = replace(self.public, images=self.public.images.to(self.device))
            controls = Controls.of(public, PolicyDefense(policy, self.augment), 1, self.seed)
            while len(self._guesses) >= self.unit:
                del self._guesses[next(iter(self._guesses))]
            self._guesses[policy] = controls.attacks[controls.chosen["used"]]
        return self._guesses[policy]

    def _pixels(self, images: Tensor) -> Tensor:
        return images.to(next(self.model.parameters()).dtype) / 255

    def _check_candidates(self) -> None:
        shape, count = self.candidates.shape, len(self.images)
        fits = self.candidates.ndim == 5 and shape[2:] == self.images.shape[1:]
        if not fits or shape[0] != count or self.true.shape != (count,):
            wanted = ", ".join(map(str, self.images.shape[1:]))
            raise GradveilError(
                f"candidates of shape {tuple(shape)} with {len(self.true)} true ones: expected "
                f"({count}, N, {wanted}) and {count}"
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
    """Return the sizes of the blocks of images after which a race looks at its policies."""
    return image_blocks(images, FIRST_BLOCKS)


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
    """Return the attack with `steps` iterations and no frames; one without them as it is."""
    return (
        replace(attack, steps=steps, frames=0) if isinstance(attack, GradientMatching) else attack
    )


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
    apart: Sequence[int] = (),
) -> ProbeScorer:
    """Make a probe on these images of the split, with blind guesses from the training images.

    Candidates of the line-ups are other images of the split, of the same class; those `apart`, by
    their numbers, are left for audits. `device` None leaves the model where it is; `attack` None is
    `short_attack()`.
    """
    numbers = torch.as_tensor(list(indices))
    chosen = split.select(indices)
    if not len(chosen):
        raise GradveilError("no images to probe: give at least one index")
    allowed = distinct(split.images, split.labels)
    allowed[list(apart)] = False
    allowed[numbers] = True
    lineups = choose(split.labels, numbers.split(1), allowed, seed, sizes=SMALL_SIZES, spare=0)
    if lineups is None:
        raise GradveilError(
            f"{split.name} {split.split} has {len(split)} images: in a class that is probed none "
            "is left to tell the probed ones from"
        )
    every = torch.ones(len(train), dtype=torch.bool)
    public = train.select(draw_victims(train.labels, min(PUBLIC, len(train)), every, seed).tolist())
    model = model if device is None else model.to(device)
    at_once = victims_at_once or _at_once(model)
    smallest = min(race_blocks(len(chosen)) if sizes is None else sizes)
    on_gpu = next(model.parameters()).is_cuda
    return ProbeScorer(
        model,
        len(split.classes),
        chosen.images,
        chosen.labels,
        split.images[lineups.candidates],
        lineups.true,
        public,
        attack or short_attack(),
        augment,
        seed,
        unit=max(1, at_once // smallest) if on_gpu else 1,
        victims_at_once=at_once,
        sizes=sizes,
    )


def _at_once(model: nn.Module) -> int:
    return AT_ONCE.get(next(model.parameters()).device.type, AT_ONCE["cpu"])
