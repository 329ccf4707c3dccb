"""Outcomes of an attack on a chunk of victims, and the records and pictures made of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

from gradveil.audits.records import Key, Record, finite
from gradveil.audits.stage import Victim
from gradveil.core.seeds import generator
from gradveil.core.types import Reconstruction
from gradveil.scores import mse, over_blind, psnr, psnr_affine, ssim
from gradveil.scores.lineup import FAR, Shown

MOVING = 8  # images whose frames are kept
CEILING = 200.0
"""In dB: an exact copy would be infinite, which JSON cannot hold and a mean cannot bear."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A victim's reconstruction, in the order of the victim's images; black where it failed.

    `images` are (N, C, H, W) in [0, 1]; `labels` are those that the attack named, None where it
    named none. `frames` are (N, frames, C, H, W), taken after `frame_steps` iterations.
    """

    victim: Victim
    status: str
    images: Tensor
    labels: list[int | None]
    distance: float | None = None
    frames: Tensor | None = None
    frame_steps: tuple[int, ...] = ()
    ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Ranks of the true images in their line-ups, by truth; empty where there is none."""
    far_ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The same where reconstructions may be moved by up to `FAR` pixels, where that was asked."""
    certain: Sequence[bool] | None = None
    """Whether the attack knows that each is exact; None where it makes no such claim."""


def outcomes(victims: Sequence[Victim], found: Sequence[Reconstruction]) -> list[Outcome]:
    """Return each victim's outcome; `found` are of the victims that shared something, in order."""
    left = iter(found)
    return [
        lost(victim, victim.status) if victim.seen is None else _outcome(victim, next(left))
        for victim in victims
    ]


def _outcome(victim: Victim, found: Reconstruction) -> Outcome:
    if found.status != "ok":
        return lost(victim, found.status)
    if not bool(found.images.isfinite().all()):
        return lost(victim, "failed: the reconstruction holds values that are not finite")
    images, labels, order = victim.aligned(found)
    frames = None
    if found.frames is not None:
        frames = found.frames.detach().cpu()[:, order].transpose(0, 1).nan_to_num(0.5).clamp(0, 1)
    named: list[int | None] = [None] * len(images) if labels is None else labels.tolist()
    certain = None if found.certain is None else found.certain[order.to(found.certain.device)]
    return Outcome(
        victim,
        "ok",
        images,
        named,
        finite(found.distance),
        frames,
        found.frame_steps,
        certain=None if certain is None else certain.tolist(),
    )


def lost(victim: Victim, status: str) -> Outcome:
    """Return the outcome of a victim of whom nothing was found, for this reason."""
    status = status if status.startswith("failed") else f"failed: {status}"
    black = torch.zeros_like(victim.used)
    return Outcome(victim, " ".join(status.split()), black, [None] * len(victim.indices))


def ranked(made: Sequence[Outcome], rng: Generator, *, far: bool = False) -> list[Outcome]:
    """Return the outcomes with the ranks of the true images; `rng` decides ties.

    `far` adds the ranks with up to `FAR` pixels of room, which take ten times as long.
    """
    found = [replace(each, ranks=_by_truth(each, rng, Shown.ranks)) for each in made]
    if far:
        rng = generator(rng.initial_seed(), "far")  # so that ranks do not depend on `far`
        found = [replace(each, far_ranks=_by_truth(each, rng, Shown.far_ranks)) for each in found]
    return found


def _by_truth(
    outcome: Outcome, rng: Generator, rank: Callable[[Shown, Tensor, Generator], list[int]]
) -> dict[str, list[int]]:
    """Rank the true images among the candidates as used and as they were before."""
    shown = outcome.victim.shown
    if outcome.status != "ok" or not shown:
        return {}
    used = rank(shown["used"], outcome.images, rng)
    if shown["original"] is shown["used"]:
        return {"used": used, "original": used}
    return {"used": used, "original": rank(shown["original"], outcome.images, rng)}


def blind_guesses(victims: Sequence[Victim], found: Sequence[Reconstruction]) -> Tensor:
    """Return a control's guesses, (images, 1, C, H, W), aligned with the true images.

    Images whose victim shared nothing are left out.
    """
    alive = [victim for victim in victims if victim.seen is not None]
    if not alive:
        return torch.empty(0, 1, *victims[0].used.shape[1:])
    pairs = zip(alive, found, strict=True)
    return torch.cat([victim.aligned(guess)[0] for victim, guess in pairs])[:, None]


def make_records(
    made: Sequence[Outcome],
    guesses: Mapping[str, Tensor],
    candidates: int,
    experiment: str,
    key: Key,
    seconds: float,
) -> list[Record]:
    """Return a record for each image. `guesses` are by truth, as `blind_guesses` has them.

    `candidates` is the number of each line-up's, 0 where there is none. `seconds` is the time of
    the whole chunk, which the records divide among them.
    """
    good = [outcome for outcome in made if outcome.status == "ok"]
    rows = _rows(made)
    scores = iter(_scores(good, {truth: some[rows] for truth, some in guesses.items()}))
    kind, name, chunk = key
    images = sum(len(outcome.images) for outcome in made)
    return [
        Record(
            experiment,
            kind,
            name,
            chunk,
            image=int(outcome.victim.indices[i]),
            status=outcome.status,
            label=int(outcome.victim.original.labels[i]),
            label_found=outcome.labels[i],
            distance=outcome.distance,
            candidates=candidates,
            update=int(outcome.victim.indices[0]),
            scores=next(scores) if outcome.status == "ok" else {},
            seconds=seconds / images,
            certain=None if outcome.certain is None else bool(outcome.certain[i]),
        )
        for outcome in made
        for i in range(len(outcome.images))
    ]


def _rows(made: Sequence[Outcome]) -> Tensor:
    """Return True for the images that did not fail, of those whose victim shared something."""
    shared = [outcome for outcome in made if outcome.victim.seen is not None]
    flags = [outcome.status == "ok" for outcome in shared for _ in outcome.images]
    return torch.tensor(flags, dtype=torch.bool)


def _scores(
    good: Sequence[Outcome], guesses: Mapping[str, Tensor]
) -> list[dict[str, dict[str, float]]]:
    """Return five numbers for each image and each truth, and its ranks where it has a line-up."""
    if not good:
        return []
    found = torch.cat([outcome.images for outcome in good])
    truths = {
        "used": torch.cat([outcome.victim.used for outcome in good]),
        "original": torch.cat([outcome.victim.original.images for outcome in good]),
    }
    tables = {
        truth: {
            "mse": mse(found, true),
            "psnr": psnr(found, true),
            "ssim": ssim(found, true),
            "psnr_affine": psnr_affine(found, true),
            "over_blind": over_blind(found, true, guesses[truth]),
        }
        for truth, true in truths.items()
    }
    plain = {
        truth: {name: values.clamp(-CEILING, CEILING).tolist() for name, values in table.items()}
        for truth, table in tables.items()
    }
    if all(outcome.ranks for outcome in good):
        for truth, table in plain.items():
            table["rank"] = [rank for outcome in good for rank in outcome.ranks[truth]]
    if all(outcome.far_ranks.get("used") for outcome in good):
        for truth, table in plain.items():
            far = (outcome.far_ranks[truth] for outcome in good)
            table[f"rank_{FAR}"] = [rank for ranks in far for rank in ranks]
    return [
        {
            truth: {name: values[number] for name, values in table.items()}
            for truth, table in plain.items()
        }
        for number in range(len(found))
    ]


def make_pictures(
    made: Sequence[Outcome], with_frames: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the images as uint8 and facts about them, to be saved."""
    tensors = {
        "original": torch.cat([outcome.victim.original.images for outcome in made]),
        "used": torch.cat([outcome.victim.used for outcome in made]),
        "found": torch.cat([outcome.images for outcome in made]),
    }
    facts: dict[str, Any] = {"images": _numbers(made)}
    moving = [outcome for outcome in made if outcome.frames is not None] if with_frames else []
    if moving:
        frames = [outcome.frames for outcome in moving if outcome.frames is not None]
        tensors["frames"] = torch.cat(frames)[:MOVING]
        facts["frame_images"] = _numbers(moving)[:MOVING]
        facts["frame_steps"] = list(moving[0].frame_steps)
    return {name: (tensor * 255).round().to(torch.uint8) for name, tensor in tensors.items()}, facts


def _numbers(made: Sequence[Outcome]) -> list[int]:
    """Return the numbers of the images in the split."""
    return [int(image) for outcome in made for image in outcome.victim.indices]
