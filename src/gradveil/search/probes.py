"""The probe: what a short real attack recovers of a few images that a policy has changed. It is what a search should rank by.

Published scores stand in for an attack; on some models they fall where its gain over blind guesses rises. A short attack foretells
the long one.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gradveil.attacks import Attack, GradientMatching, find
from gradveil.audits.guesses import class_means
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.data import Images
from gradveil.scores import gray, mean_color, noise
from gradveil.scores.estimates import Estimate
from gradveil.search.probe_scorers import ProbeScorer, check_pixels, race_blocks
from gradveil.transforms import Policy

__all__ = ["ProbeScorer", "blind_guesses", "make_probe", "probe_score", "short_attack"]

STEPS = 200
CANDIDATES = 300
RESERVED = 100  # the first images of a split, which audits attack: no score may have seen them
AT_ONCE = {"cpu": 16, "cuda": 256}  # victims in one run: what a processor's cache takes, and what keeps a GPU busy


def short_attack(steps: int = STEPS, name: str = "adam-cosine") -> Attack:
    """A preset with so many iterations."""
    attack = find(name)
    return replace(attack, steps=steps, frames=0) if isinstance(attack, GradientMatching) else attack


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
        raise GradveilError(f"{split.name} {split.split} has {len(split)} images: none is left to tell the probed ones from")
    means, color = class_means(train)
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
    drawn = torch.cat([noise(shape, 1, generator(seed, "noise", number)) for number in range(count)])
    return torch.stack([*same, *([] if means is None else [means]), drawn], dim=1)
