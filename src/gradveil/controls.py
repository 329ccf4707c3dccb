"""Blind controls: guesses with the attacker's knowledge, and the choice of the one to beat.

A guess knows what the strongest attacker knows but the gradient: the labels, public images, the
defense. Which guess an attack has to beat is chosen on public images, never by the truth.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.blind import (
    Blind,
    BlindClassMean,
    BlindImage,
    find_means,
    make_blind_attacks,
)
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.data import Images
from gradveil.defenses import Defense
from gradveil.defenses.applied import protected_batch
from gradveil.scores import psnr
from gradveil.scores.lineup import draw_victims

TRUTHS = ("used", "original")
AFTER = "after the defense"
LOOKED_AT = 5_000  # public images at most that are put through a defense
JUDGES = 500  # public images at most that choose among the guesses
AT_ONCE = 500  # images that a policy changes together
BEST = 200.0  # dB of an exact guess


@dataclass(frozen=True, eq=False)
class Controls:
    """The blind guesses of a case: attacks by their names in the table, and the class means.

    The means (classes, C, H, W) are of public images; None where there are none. `chosen` names,
    by truth, the guess that the gain of an attack is measured from.
    """

    attacks: Mapping[str, Blind]
    means: Tensor | None
    chosen: Mapping[str, str]

    @classmethod
    def of(cls, public: Images | None, defense: Defense, batch_size: int, seed: int) -> "Controls":
        """Make the guesses and choose among them; without public images a guess is gray."""
        attacks = make_blind_attacks()
        if public is None:
            return cls(attacks, None, dict.fromkeys(TRUTHS, "blind: gray"))
        classes = len(public.classes)
        means = find_means(public.images, public.labels.to(public.images.device), classes)
        attacks |= make_blind_attacks(means)
        labels = public.labels.cpu()
        every = torch.ones(len(public), dtype=torch.bool)
        some = draw_victims(labels, min(LOOKED_AT, len(public)), every, seed)
        pixels = public.images[some]
        batch = Batch(pixels.float() / 255, labels[some].to(pixels.device))
        counts = torch.bincount(labels, minlength=classes).to(pixels.device)
        judges = slice(0, JUDGES)
        tried = {
            **_same_for_all(attacks, batch, judges, seed),
            "blind: class mean": _without_itself(means.classes, counts, batch, judges),
        }
        truths = {"used": batch.images, "original": batch.images}
        if any(part.acts_on == "batch" for part in defense.parts()):
            truths["used"] = used = _protected(defense, batch, batch_size, seed)
            after = find_means(used, batch.labels, classes)
            image = BlindImage(f"mean image, {AFTER}", after.image)
            mean = BlindClassMean(after.classes, f"class mean, {AFTER}")
            attacks |= {str(image): image, str(mean): mean}
            tried[str(image)] = after.image.expand_as(batch.images[judges])
            counts = torch.bincount(batch.labels, minlength=classes)
            changed = Batch(used, batch.labels)
            tried[str(mean)] = _without_itself(after.classes, counts, changed, judges)
        chosen = {truth: _best(tried, true[judges]) for truth, true in truths.items()}
        return cls(attacks, means.classes, chosen)


def _same_for_all(
    attacks: Mapping[str, Blind], batch: Batch, judges: slice, seed: int
) -> dict[str, Tensor]:
    """Return what each guess that knows no label makes of the judges."""
    images = batch.images[judges]
    rng = generator(seed, "guess", "noise")
    found = {
        "blind: noise": torch.rand(images.shape, generator=rng).to(images),
        "blind: gray": torch.full_like(images, 0.5),
    }
    for name, attack in attacks.items():
        if isinstance(attack, BlindImage):
            found[name] = attack.image.expand_as(images)
    return found


def _without_itself(means: Tensor, counts: Tensor, batch: Batch, judges: slice) -> Tensor:
    """Return the class mean for each judge, without the judge's own share of it."""
    images, labels = batch.images[judges], batch.labels[judges]
    n = counts[labels].float()[:, None, None, None]
    others = (n * means[labels] - images) / (n - 1).clamp(min=1)
    return torch.where(n > 1, others, torch.full_like(others, 0.5)).clamp(0, 1)


def _protected(defense: Defense, batch: Batch, batch_size: int, seed: int) -> Tensor:
    """Return the images after the defense with new draws, in batches as a client has them."""
    rng = generator(seed, "guess", "draws")
    # What changes each image by itself may change many at once.
    size = batch_size if defense.preparation is None else AT_ONCE
    parts = zip(batch.images.split(size), batch.labels.split(size), strict=True)
    made = torch.cat([protected_batch(defense, Batch(*part), rng).images for part in parts])
    low, high = float(made.min()), float(made.max())
    if not (low >= 0 and high <= 1):
        raise GradveilError(
            f"defense {defense}: it makes images with values from {low:g} to {high:g}; expected "
            "[0, 1]"
        )
    return made


def _best(guesses: Mapping[str, Tensor], truth: Tensor) -> str:
    levels = {name: float(psnr(g, truth).clamp(max=BEST).mean()) for name, g in guesses.items()}
    return max(levels, key=lambda name: levels[name])
