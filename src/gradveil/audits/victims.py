"""The victims of one chunk: their images, what they shared, and the blind guesses to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from gradveil.attacks.labels import Counted, SingleLabel
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Gradients, Knowledge, Observation, Reconstruction
from gradveil.data import Images
from gradveil.scores import assign


@dataclass(frozen=True, eq=False)
class Victim:
    """One client's batch. `seen` is None where nothing could be shared, and `status` says why."""

    indices: Tensor
    original: Batch
    used: Tensor  # the images the gradient was computed from; black where there is none
    seen: Observation | None
    status: str = "ok"

    def told(self) -> Observation:
        """What a control sees, which may always know the labels."""
        assert self.seen is not None
        return replace(self.seen, knowledge=Knowledge(labels=self.original.labels))

    def aligned(self, found: Reconstruction) -> tuple[Tensor, Tensor | None, Tensor]:
        """Its images in the order of the victim's, clamped to [0, 1], their labels, and the order itself."""
        images = found.images.detach().cpu().float()
        order = assign(images, self.used) if len(images) > 1 else torch.zeros(1, dtype=torch.long)
        labels = None if found.labels is None else found.labels.cpu()[order]
        return images[order].clamp(0, 1), labels, order


def share(
    client: Client, split: Images, chunk: Sequence[Tensor], seed: int, labels: str, rounds: int = 1
) -> list[Victim]:
    """Each victim draws from its own generator, so what it uses depends on nothing but the seed and its first image.

    All that can be known of the defence is told; `attackers.granted` leaves each attack what it may know.
    """
    victims = [
        _share_one(client, split, indices, generator(seed, "share", int(indices[0])), rounds)
        for indices in chunk
    ]
    alive = [victim for victim in victims if victim.seen is not None]
    if labels == "known" or not alive:
        return victims
    finder = SingleLabel() if len(alive[0].indices) == 1 else Counted()
    seen = [victim.seen for victim in alive if victim.seen is not None]
    bare = [replace(one, gradients=_first(one), knowledge=Knowledge()) for one in seen]
    inferred = finder.infer(bare, generator(seed, "labels", int(chunk[0][0]))).cpu()
    knows = {
        id(one): replace(one.knowledge, labels=found)
        for one, found in zip(seen, inferred, strict=True)
    }
    return [
        replace(v, seen=replace(v.seen, knowledge=knows[id(v.seen)])) if v.seen else v
        for v in victims
    ]


def blind_guesses(victims: Sequence[Victim], found: Sequence[Sequence[Reconstruction]]) -> Tensor:
    """(images, controls, C, H, W), for the images whose victim shared something; `found` has one sequence for each control."""
    alive = [victim for victim in victims if victim.seen is not None]
    if not alive:
        return torch.empty(0, len(found), *victims[0].used.shape[1:])
    aligned = [
        [victim.aligned(one)[0] for victim, one in zip(alive, guesses, strict=True)]
        for guesses in found
    ]
    return torch.stack([torch.cat(images) for images in aligned], dim=1)


def _first(one: Observation) -> Gradients:
    """What was shared in the first round."""
    return one.knowledge.earlier[0] if one.knowledge.earlier else one.gradients


def _share_one(
    client: Client, split: Images, indices: Tensor, rng: Generator, rounds: int
) -> Victim:
    batch = Batch(split.images[indices].float() / 255, split.labels[indices])
    try:
        ((seen, used),) = client.share_batches(
            [batch], rng, tell_defense=True, tell_draws=True, rounds=rounds
        )
    except GradveilError as error:
        reason = str(error).removeprefix("victim 0: ")  # it was shared alone
        return Victim(indices, batch, torch.zeros_like(batch.images), None, f"failed: {reason}")
    return Victim(indices, batch, used.images.detach().cpu().float(), seen)
