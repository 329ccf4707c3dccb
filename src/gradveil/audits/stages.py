"""Stages: one model with its victims and attacks. The audit proper is one; each positive control is another."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks import Attack
from gradveil.attacks.analytic import LinearInversion
from gradveil.audits.guesses import blind_attacks, class_means
from gradveil.audits.jobs import AuditJob
from gradveil.audits.pools import Pool, make_pool
from gradveil.audits.records import Key
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.data import Images
from gradveil.models import build
from gradveil.models.checkpoints import load_checkpoint

POSITIVES = 4  # images of a positive control


@dataclass(frozen=True, eq=False)
class Stage:
    """`kind` is attack or positive; the controls are rows of their own in the first alone, and the measure in both."""

    kind: str
    client: Client
    split: Images
    pool: Pool
    chunks: tuple[tuple[Tensor, ...], ...]  # the images of each victim, by their place in the split
    attacks: Mapping[str, Attack]
    blinds: Mapping[str, Attack]
    labels: str
    seed: int

    def rows(self, chunk: int) -> Iterator[tuple[Key, Attack]]:
        """What is run on this chunk, the controls first."""
        if self.kind == "attack":
            yield from ((("blind", name, chunk), attack) for name, attack in self.blinds.items())
        yield from (((self.kind, name, chunk), attack) for name, attack in self.attacks.items())

    def sizes(self) -> dict[Key, int]:
        """How many images each part of the work has."""
        return {key: sum(map(len, chunk)) for number, chunk in enumerate(self.chunks) for key, _ in self.rows(number)}


def make_stages(job: AuditJob, split: Images, train: Images, device: torch.device) -> list[Stage]:
    """The positive controls first: when they fail, the rest says nothing."""
    if job.first + job.images > len(split):
        raise GradveilError(f"images {job.first} to {job.first + job.images - 1}: {split.name} {split.split} has {len(split)}, from 0")
    victims = torch.arange(job.first, job.first + job.images)
    means, color = class_means(train)
    blinds = blind_attacks(means, color)
    pool = make_pool(split, victims, job.preparation(), means, job.batch_size, job.seed)
    assert job.victims_at_once is not None
    parts = tuple(victims.split(job.batch_size))
    chunks = tuple(parts[start : start + job.victims_at_once] for start in range(0, len(parts), job.victims_at_once))
    client = Client(find_model(job, split).to(device), classes=len(split.classes), protocol=job.protocol, prepare=job.preparation())
    attacks = job.find_attacks()
    proper = Stage("attack", client, split, pool, chunks, attacks, blinds, job.labels, job.seed)
    plain = make_pool(split, victims, None, means, 1, job.seed)
    few = (tuple(pool.indices[:POSITIVES].split(1)),)
    stages = []
    for name in ("lenet", "mlp") if job.positive else ():
        chosen = {key: attack for key, attack in attacks.items() if positive_model(attack) == name}
        if chosen:
            easy = Client(_untrained(name, split, job.seed).to(device), classes=len(split.classes))
            stages.append(Stage("positive", easy, split, plain, few, chosen, blinds, job.labels, job.seed))
    return [*stages, proper]


def positive_model(attack: Attack) -> str:
    """The model on which this attack is known to work, untrained."""
    return "mlp" if isinstance(attack, LinearInversion) else "lenet"


def find_model(job: AuditJob, split: Images) -> torch.nn.Module:
    """The one to be audited: with the checkpoint's weights, or untrained."""
    model = _untrained(job.model, split, job.seed)
    return load_checkpoint(job.checkpoint, model) if job.checkpoint else model


def _untrained(name: str, split: Images, seed: int) -> torch.nn.Module:
    facts = {"channels": split.channels, "size": split.size, "classes": len(split.classes)}
    return build(name, **facts, mean=split.mean, std=split.std, seed=seed)
