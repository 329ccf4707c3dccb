"""One attack on one chunk of victims: from what they shared to records and pictures."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from gradveil.attacks import Attack
from gradveil.attacks.base import Progress
from gradveil.audits.pools import Pool
from gradveil.audits.records import Key, Record, finite
from gradveil.audits.scoring import score
from gradveil.audits.victims import Victim
from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation, Reconstruction

SHOWN = 4  # images whose frames are kept


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one victim's reconstruction came to, in the order of the victim's images."""

    victim: Victim
    status: str
    images: Tensor
    labels: list[int | None]
    distance: float | None = None
    frames: Tensor | None = None  # (images, frames, C, H, W)
    frame_steps: tuple[int, ...] = ()


def attacked(
    attack: Attack, seen: Sequence[Observation], rng: Generator, progress: Progress | None
) -> tuple[list[Reconstruction], float]:
    """What it found, and the seconds that took."""
    started = time.perf_counter()
    try:
        found = attack(seen, rng, progress)
    except torch.OutOfMemoryError as error:
        raise GradveilError(
            f"the GPU's memory is too small for {len(seen)} victims at once: lower --victims-at-once"
        ) from error
    return found, time.perf_counter() - started


def outcomes(victims: Sequence[Victim], found: Sequence[Reconstruction]) -> list[Outcome]:
    """`found` are of those victims that shared something, in order."""
    left = iter(found)
    return [
        _outcome(victim, next(left)) if victim.seen is not None else _lost(victim, victim.status)
        for victim in victims
    ]


def records(
    made: Sequence[Outcome], guesses: Tensor, pool: Pool, experiment: str, key: Key, seconds: float
) -> list[Record]:
    """One for each image. `guesses` are (images, controls, C, H, W), for those images whose victim shared something."""
    good = [one for one in made if one.status == "ok"]
    scores = iter(_scores(good, guesses[_rows(made)], pool))
    kind, name, chunk = key
    return [
        Record(
            experiment,
            kind,
            name,
            chunk,
            image=int(one.victim.indices[i]),
            status=one.status,
            label=int(one.victim.original.labels[i]),
            label_found=one.labels[i],
            distance=one.distance,
            candidates=len(pool),
            chance=pool.chance,
            scores=next(scores) if one.status == "ok" else {},
            seconds=seconds / sum(len(other.images) for other in made),
        )
        for one in made
        for i in range(len(one.images))
    ]


def pictures(
    made: Sequence[Outcome], with_frames: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The images as uint8 and facts about them, to be saved."""
    tensors = {
        "original": torch.cat([one.victim.original.images for one in made]),
        "used": torch.cat([one.victim.used for one in made]),
        "found": torch.cat([one.images for one in made]),
    }
    facts: dict[str, Any] = {"images": [int(i) for one in made for i in one.victim.indices]}
    moving = [one for one in made if one.frames is not None] if with_frames else []
    if moving:
        tensors["frames"] = torch.cat([one.frames for one in moving if one.frames is not None])[
            :SHOWN
        ]
        facts["frame_images"] = [int(i) for one in moving for i in one.victim.indices][:SHOWN]
        facts["frame_steps"] = list(moving[0].frame_steps)
    return {name: (tensor * 255).round().to(torch.uint8) for name, tensor in tensors.items()}, facts


def _outcome(victim: Victim, found: Reconstruction) -> Outcome:
    if found.status != "ok":
        return _lost(victim, found.status)
    if not bool(found.images.isfinite().all()):
        return _lost(victim, "failed: the reconstruction holds values that are not finite")
    images, labels, order = victim.aligned(found)
    frames = (
        None
        if found.frames is None
        else found.frames.detach().cpu()[:, order].transpose(0, 1).nan_to_num(0.5).clamp(0, 1)
    )
    named: list[int | None] = [None] * len(images) if labels is None else labels.tolist()
    return Outcome(victim, "ok", images, named, finite(found.distance), frames, found.frame_steps)


def _lost(victim: Victim, status: str) -> Outcome:
    status = status if status.startswith("failed") else f"failed: {status}"
    return Outcome(
        victim,
        " ".join(status.split()),
        torch.zeros_like(victim.used),
        [None] * len(victim.indices),
    )


def _rows(made: Sequence[Outcome]) -> Tensor:
    """Where the good images stand among those whose victim shared something."""
    flags = [one.status == "ok" for one in made if one.victim.seen is not None for _ in one.images]
    return torch.tensor(flags, dtype=torch.bool)


def _scores(
    good: Sequence[Outcome], guesses: Tensor, pool: Pool
) -> list[dict[str, dict[str, float]]]:
    if not good:
        return []
    truths = {
        "used": torch.cat([one.victim.used for one in good]),
        "original": torch.cat([one.victim.original.images for one in good]),
    }
    indices = torch.cat([one.victim.indices for one in good])
    return score(torch.cat([one.images for one in good]), truths, guesses, indices, pool)
