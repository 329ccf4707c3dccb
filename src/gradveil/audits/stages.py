"""Stages: one model with its victims and attacks. The audit proper is one; each positive control is another."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from gradveil.attacks import Attack
from gradveil.attacks.linear import LinearInversion
from gradveil.audits.attackers import AUTO, PUBLIC, automatic, check_told, granted, in_words, rounds
from gradveil.audits.chunks import attacked
from gradveil.audits.guesses import blind_attacks, class_means
from gradveil.audits.jobs import AuditJob, shortened
from gradveil.audits.pools import Pool, make_pool
from gradveil.audits.records import Key
from gradveil.audits.victims import Victim, share
from gradveil.audits.weights import find_model, untrained
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation
from gradveil.data import Images

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
    means: Tensor
    labels: str
    seed: int
    extra: frozenset[str] = (
        frozenset()
    )  # attacks that `auto` has for this model, beside those that the job names

    def rows(self, chunk: int) -> Iterator[tuple[Key, Attack]]:
        """What is run on this chunk, the controls first."""
        if self.kind == "attack":
            yield from ((("blind", name, chunk), attack) for name, attack in self.blinds.items())
        yield from (((self.kind, name, chunk), attack) for name, attack in self.attacks.items())

    def sizes(self) -> dict[Key, int]:
        """How many images each part of the work has."""
        return {
            key: sum(map(len, chunk))
            for number, chunk in enumerate(self.chunks)
            for key, _ in self.rows(number)
        }

    def batches(self, chunk: int) -> list[Batch]:
        """What the victims of this chunk have, before any defence."""
        return [
            Batch(self.split.images[indices].float() / 255, self.split.labels[indices])
            for indices in self.chunks[chunk]
        ]

    def share(self, victims: tuple[Tensor, ...]) -> list[Victim]:
        several = rounds(self.client.acting, self.attacks.values())
        return share(self.client, self.split, victims, self.seed, self.labels, several)

    def seen_by(self, attack: Attack, victims: list[Victim]) -> list[Observation]:
        return [
            granted(victim.seen, attack, self.means)
            for victim in victims
            if victim.seen is not None
        ]

    def knows(self) -> dict[str, str]:
        """What each attack is given, in words."""
        seen = self.sample[0].seen
        assert seen is not None
        return {
            name: in_words(attack, self.client.acting, seen.model, seen.size, self.labels)
            for name, attack in self.attacks.items()
        }

    @cached_property
    def sample(self) -> list[Victim]:
        """One victim that shares something; an error where none of the first chunk's does."""
        for victims in (self.chunks[0][:1], self.chunks[0]):
            tried = self.share(victims)
            alive = [victim for victim in tried if victim.seen is not None]
            if alive:
                return alive[:1]
        raise GradveilError(tried[0].status.removeprefix("failed: "))

    def try_out(self, name: str) -> None:
        """An error if the attack does not suit the model, or what is known of the defence."""
        attack = self.attacks[name]
        seen = self.seen_by(attack, self.sample)
        check_told(name, attack, seen)
        attacked(shortened(attack), seen, generator(self.seed, "trial", name), None)

    def fitted(self, optional: set[str]) -> tuple["Stage", dict[str, str]]:
        """Without those of the optional attacks that do not suit, and why each was left out."""
        left_out: dict[str, str] = {}
        _ = self.sample  # where nothing can be shared, that is said once, and not of each attack
        for name in self.attacks:
            try:
                self.try_out(name)
            except GradveilError as error:
                if name not in optional | self.extra:
                    raise
                left_out[name] = str(error)
        if len(left_out) == len(self.attacks):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise GradveilError(f"defense {self.client.defense}: no attack suits it: {reasons}")
        return replace(
            self,
            attacks={name: attack for name, attack in self.attacks.items() if name not in left_out},
        ), left_out


def make_stage(job: AuditJob, split: Images, train: Images, device: torch.device) -> Stage:
    """The audit proper, with every attack that the job names."""
    if job.first + job.images > len(split):
        raise GradveilError(
            f"images {job.first} to {job.first + job.images - 1}: {split.name} {split.split} has {len(split)}, from 0"
        )
    victims = torch.arange(job.first, job.first + job.images)
    means, color = class_means(train)
    pool = make_pool(split, victims, job.preparation(), means, job.batch_size, job.seed)
    assert job.victims_at_once is not None
    parts = tuple(victims.split(job.batch_size))
    chunks = tuple(
        parts[start : start + job.victims_at_once]
        for start in range(0, len(parts), job.victims_at_once)
    )
    model, protected = find_model(job, split)
    client = Client(
        model.to(device),
        classes=len(split.classes),
        protocol=job.protocol,
        defense=job.protection,
        clean=job.clean,
        protected=protected,
    )
    attacks, extra = _attacks(job, client.model)
    return Stage(
        "attack",
        client,
        split,
        pool,
        chunks,
        attacks,
        blind_attacks(means, color),
        means,
        job.labels,
        job.seed,
        extra,
    )


def _attacks(job: AuditJob, model: nn.Module) -> tuple[dict[str, Attack], frozenset[str]]:
    """With those that undo what the model draws by itself, where the job has `auto`; and the names of these."""
    named = job.find_attacks()
    if AUTO not in job.attacks:
        return named, frozenset()
    more = [
        name for name in automatic(job.acting, model, job.protocol.train_mode) if name not in named
    ]
    return replace(job, attacks=(*job.attacks, *more)).find_attacks(), frozenset(more)


def positive_stages(job: AuditJob, proper: Stage) -> list[Stage]:
    """The attacks that need no defence, on models without one where they are known to work."""
    split, victims = proper.split, proper.pool.indices[: job.images]
    plain = make_pool(split, victims, None, proper.means, 1, job.seed)
    few = (tuple(proper.pool.indices[:POSITIVES].split(1)),)
    stages = []
    for name in ("lenet", "mlp"):
        chosen = {
            key: attack
            for key, attack in proper.attacks.items()
            if positive_model(attack) == name and set(attack.needs) <= {*PUBLIC}
        }
        if chosen:
            device = next(proper.client.model.parameters()).device
            easy = Client(untrained(name, split, job.seed).to(device), classes=len(split.classes))
            stages.append(
                replace(
                    proper, kind="positive", client=easy, pool=plain, chunks=few, attacks=chosen
                )
            )
    return stages


def positive_model(attack: Attack) -> str:
    """The model on which this attack is known to work, untrained."""
    return "mlp" if isinstance(attack, LinearInversion) else "lenet"
