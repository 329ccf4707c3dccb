"""A stage: a model with its victims, its attacks and its controls.

The case of an audit is attacked on a stage, and so is a positive control.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Generator, Tensor

from gradveil.attacks import Attack
from gradveil.attacks.blind import find_means, make_blind_attacks
from gradveil.attacks.labels import Counted, SingleLabel
from gradveil.attacks.linear import LinearInversion
from gradveil.audits.attackers import PUBLIC, check_told, granted, in_words, rounds
from gradveil.audits.job import AuditJob, Case, shortened
from gradveil.audits.model import find_model, plain_model
from gradveil.audits.records import Key
from gradveil.clients import Client, Shared
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Gradients, Knowledge, Observation, Reconstruction
from gradveil.data import Images
from gradveil.defenses import Defense
from gradveil.defenses.applied import protected_batch
from gradveil.scores import assign, rank_among, signatures

POSITIVES = 4  # images of a positive control
CANDIDATES = 1_000


@dataclass(frozen=True, eq=False)
class Controls:
    """The blind guesses of an audit: attacks by their names in the table, and the class means.

    The means (classes, C, H, W) are of public images; None where there are none.
    """

    attacks: Mapping[str, Attack]
    means: Tensor | None

    @classmethod
    def of(cls, public: Images | None) -> "Controls":
        """Make the controls; without public images a guess is noise or gray."""
        if public is None:
            return cls(make_blind_attacks(), None)
        found = find_means(public.images, public.labels, len(public.classes))
        return cls(make_blind_attacks(found), found.classes)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Images of the split that a reconstruction is to be identified among, the victims' first.

    By truth: `used` are put through the defense with new draws, `original` are as they are.
    `images` are (K, C, H, W) in [0, 1], and `signatures` (K, H x W) are theirs. `chance` is how
    often the class mean, or luck where that is better, identifies an image.
    """

    indices: Tensor
    images: Mapping[str, Tensor]
    signatures: Mapping[str, Tensor]
    chance: Mapping[str, float]

    def __len__(self) -> int:
        return len(self.indices)

    def identified(self, truth: str, found: Tensor, images: Tensor, true: Tensor) -> Tensor:
        """Return 1 where `found` is nearer to its true image than to any other candidate, else 0.

        `images` are the victims' numbers in the split; each true image replaces its candidate.
        """
        rows = torch.stack([(self.indices == image).nonzero()[0, 0] for image in images])
        known = self.signatures[truth].clone()
        known[rows] = signatures(true)
        return (rank_among(found, known, rows) == 1).double()


def make_candidates(
    split: Images,
    victims: Tensor,
    prepare: Callable[[Tensor, Generator], Tensor] | None,
    means: Tensor | None,
    batch_size: int,
    seed: int,
) -> Candidates:
    """Choose 1,000 candidates, all of a smaller split, or the victims alone where they are more."""
    if len(split) < 2:
        raise GradveilError(
            f"{split.name} {split.split} has {len(split)} image: identification needs at least two"
        )
    order = torch.randperm(len(split), generator=generator(seed, "candidates", "order"))
    others = order[~torch.isin(order, victims)]
    indices = torch.cat([victims, others])[: max(CANDIDATES, len(victims))]
    pixels = split.images[indices]
    rng = generator(seed, "candidates", "prepare")
    original = pixels.float() / 255
    used = original if prepare is None else prepare(pixels, rng).float() / 255
    images = {"used": used, "original": original}
    of_original = signatures(original)
    known = {
        "used": of_original if prepare is None else signatures(used),
        "original": of_original,
    }
    rates = dict.fromkeys(images, 0.0)
    if means is not None:
        guesses, rows = means[split.labels[indices]].float(), torch.arange(len(indices))
        rates = {
            truth: float((rank_among(guesses, some, rows) == 1).double().mean())
            for truth, some in known.items()
        }
    # Any reconstruction of a batch may be taken for an image, so luck has as many tries.
    chance = {
        truth: min(1.0, batch_size * max(rate, 1 / len(indices))) for truth, rate in rates.items()
    }
    return Candidates(indices, images, known, chance)


def preparation(defense: Defense) -> Callable[[Tensor, Generator], Tensor]:
    """Return the defense's change of uint8 images, as a function of them and a generator."""

    def prepare(images: Tensor, rng: Generator) -> Tensor:
        batch = Batch(images.float() / 255, torch.zeros(len(images), dtype=torch.long))
        return (protected_batch(defense, batch, rng).images * 255).round().to(torch.uint8)

    return prepare


@dataclass(frozen=True, eq=False)
class Victim:
    """A client's batch. `seen` is None where nothing could be shared, and `status` says why."""

    indices: Tensor
    original: Batch
    used: Tensor  # the images the gradient was computed from; black where there is none
    seen: Observation | None
    status: str = "ok"

    def told(self) -> Observation:
        """Return the observation of a control, which may always know the labels."""
        assert self.seen is not None
        return replace(self.seen, knowledge=Knowledge(labels=self.original.labels))

    def aligned(self, found: Reconstruction) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the images found in the order of the victim's, their labels, and the order."""
        images = found.images.detach().cpu().float()
        order = assign(images, self.used) if len(images) > 1 else torch.zeros(1, dtype=torch.long)
        labels = None if found.labels is None else found.labels.cpu()[order]
        return images[order].clamp(0, 1), labels, order


@dataclass(frozen=True, eq=False)
class Stage:
    """A client's model with victims and attacks; `kind` is attack or positive.

    The controls measure both kinds, and have rows in the first alone. `victims` are the images of
    the whole audit, `chunks` those of each victim of this stage, by their numbers in the split.
    `optional` attacks are left out where they do not suit; any other is then an error.
    """

    kind: str
    client: Client
    split: Images
    victims: Tensor
    chunks: tuple[tuple[Tensor, ...], ...]
    attacks: Mapping[str, Attack]
    controls: Controls
    labels: str
    seed: int
    optional: frozenset[str] = frozenset()
    batch_size: int = 1

    @cached_property
    def candidates(self) -> Candidates:
        """The images that reconstructions are identified among."""
        acting = self.client.acting
        changes = any(part.acts_on == "batch" for part in acting.parts())
        prepare = preparation(acting) if changes else None
        return make_candidates(
            self.split, self.victims, prepare, self.controls.means, self.batch_size, self.seed
        )

    def rows(self, chunk: int) -> Iterator[tuple[Key, Attack]]:
        """Yield the attacks on this chunk with their keys, the controls first."""
        if self.kind == "attack":
            blind = self.controls.attacks.items()
            yield from ((("blind", name, chunk), attack) for name, attack in blind)
        yield from (((self.kind, name, chunk), attack) for name, attack in self.attacks.items())

    def sizes(self) -> dict[Key, int]:
        """Count the images of each key."""
        return {
            key: sum(map(len, chunk))
            for number, chunk in enumerate(self.chunks)
            for key, _ in self.rows(number)
        }

    def batches(self, victims: Sequence[Tensor]) -> list[Batch]:
        """Return the batches of these victims, before any defense."""
        return [
            Batch(self.split.images[indices].float() / 255, self.split.labels[indices])
            for indices in victims
        ]

    def share(self, victims: Sequence[Tensor]) -> list[Victim]:
        """Let the victims share, all of them together.

        Each has a generator, so its draws depend on nothing but the seed and its first image. All
        that can be known of the defense is told; `granted` leaves each attack what it may know.
        """
        several = rounds(self.client.acting, self.attacks.values())
        batches = self.batches(victims)
        updates = self._updates(victims, batches, several)
        found = []
        for indices, batch, update in zip(victims, batches, updates, strict=True):
            if isinstance(update, str):
                black = torch.zeros_like(batch.images)
                found.append(Victim(indices, batch, black, None, f"failed: {update}"))
            else:
                found.append(Victim(indices, batch, update.used.float(), update.seen))
        return found if self.labels == "known" else self._with_inferred_labels(found)

    def _updates(
        self, victims: Sequence[Tensor], batches: Sequence[Batch], several: int
    ) -> list[Shared | str]:
        """Return each victim's update, or the reason for none, tried together and then alone."""
        rngs = [generator(self.seed, "share", int(indices[0])) for indices in victims]
        try:
            return [
                *self.client.share_batches(
                    batches, rngs, tell_defense=True, tell_draws=True, rounds=several
                )
            ]
        except GradveilError as error:
            if len(victims) == 1:
                return [str(error).removeprefix("victim 0: ")]
        pairs = zip(victims, batches, strict=True)
        return [
            update
            for indices, batch in pairs
            for update in self._updates([indices], [batch], several)
        ]

    def _with_inferred_labels(self, victims: list[Victim]) -> list[Victim]:
        seen = [victim.seen for victim in victims if victim.seen is not None]
        if not seen:
            return victims
        finder = SingleLabel() if seen[0].size == 1 else Counted()
        bare = [replace(s, gradients=_first_round(s), knowledge=Knowledge()) for s in seen]
        first = int(victims[0].indices[0])
        inferred = iter(finder.bind(bare, generator(self.seed, "labels", first)).cpu())
        return [
            victim if victim.seen is None else _with_labels(victim, victim.seen, next(inferred))
            for victim in victims
        ]

    def seen_by(self, attack: Attack, victims: list[Victim]) -> list[Observation]:
        """Return the observations that the attack is given of these victims."""
        means = self.controls.means
        return [granted(v.seen, attack, means) for v in victims if v.seen is not None]

    def knows(self) -> dict[str, str]:
        """Say in words what each attack is told."""
        seen = self.sample[0].seen
        assert seen is not None
        acting = self.client.acting
        return {
            name: in_words(attack, acting, seen.model, seen.size, self.labels)
            for name, attack in self.attacks.items()
        }

    @cached_property
    def sample(self) -> list[Victim]:
        """A victim of the first chunk that shares something; an error where none does."""
        for victims in (self.chunks[0][:1], self.chunks[0]):
            tried = self.share(victims)
            alive = [victim for victim in tried if victim.seen is not None]
            if alive:
                return alive[:1]
        raise GradveilError(tried[0].status.removeprefix("failed: "))

    def try_out(self, name: str) -> None:
        """Refuse an attack that does not suit the model, or what is known of the defense."""
        attack = self.attacks[name]
        if "means" in attack.needs and self.controls.means is None:
            raise GradveilError(f"attack {name} needs class means: give public images")
        seen = self.seen_by(attack, self.sample)
        check_told(name, attack, seen)
        run_attack(shortened(attack), seen, generator(self.seed, "trial", name))

    def fitted(self) -> tuple["Stage", dict[str, str]]:
        """Return the stage without the optional attacks that do not suit, and the reasons."""
        left_out: dict[str, str] = {}
        _ = self.sample  # where nothing can be shared, that is said once, and not of each attack
        for name in self.attacks:
            try:
                self.try_out(name)
            except GradveilError as error:
                if name not in self.optional:
                    raise
                left_out[name] = str(error)
        if len(left_out) == len(self.attacks):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise GradveilError(f"defense {self.client.defense}: no attack suits it: {reasons}")
        return self.without(left_out), left_out

    def without(self, left_out: Mapping[str, str]) -> "Stage":
        """Return the stage without these attacks."""
        kept = {name: attack for name, attack in self.attacks.items() if name not in left_out}
        made = replace(self, attacks=kept)
        if "sample" in vars(self):  # what it has shared already need not be shared again
            vars(made)["sample"] = self.sample
        return made


def run_attack(
    attack: Attack,
    seen: Sequence[Observation],
    rng: Generator,
    progress: Callable[[int, int], None] | None = None,
) -> list[Reconstruction]:
    """Run the attack; a GPU that is too small for the victims is a one-line error."""
    try:
        return attack(seen, rng, progress)
    except torch.OutOfMemoryError as error:
        raise GradveilError(
            f"the GPU's memory is too small for {len(seen)} victims at once: lower "
            "--victims-at-once"
        ) from error


def _with_labels(victim: Victim, seen: Observation, labels: Tensor) -> Victim:
    """Return the victim with labels that its attackers are told."""
    told = replace(seen.knowledge, labels=labels)
    return replace(victim, seen=replace(seen, knowledge=told))


def _first_round(seen: Observation) -> Gradients:
    """Return the gradients of the first of several rounds."""
    return seen.knowledge.earlier[0] if seen.knowledge.earlier else seen.gradients


def make_stage(
    job: AuditJob, case: Case, split: Images, controls: Controls, device: torch.device
) -> Stage:
    """Make the stage of a case, with every attack that the job has for it."""
    last = job.first + job.images - 1
    if last >= len(split):
        raise GradveilError(
            f"images {job.first} to {last}: {split.name} {split.split} has {len(split)}, from 0"
        )
    if len(split) < 2:
        raise GradveilError(
            f"{split.name} {split.split} has {len(split)} image: identification needs at least two"
        )
    assert job.victims_at_once is not None
    victims = torch.arange(job.first, last + 1)
    each, step = tuple(victims.split(job.batch_size)), job.victims_at_once
    chunks = tuple(each[start : start + step] for start in range(0, len(each), step))
    model, protected = find_model(job, case, split)
    client = Client(
        model.to(device),
        classes=len(split.classes),
        protocol=job.protocol,
        defense=case.defense,
        clean=case.clean,
        protected=protected,
    )
    attacks = job.attacks_on(case, client.model)
    # Several cases have the same list of attacks, and not every attack suits every defense.
    required = set(job.attacks) if len(job.cases) == 1 else set()
    return Stage(
        "attack",
        client,
        split,
        victims,
        chunks,
        attacks,
        controls,
        job.labels,
        job.seed,
        frozenset(set(attacks) - required),
        job.batch_size,
    )


def positive_stages(job: AuditJob, proper: Stage) -> list[Stage]:
    """Put the attacks that need no defense on untrained models where they are known to work."""
    few = (tuple(proper.victims[:POSITIVES].split(1)),)
    stages = []
    for name in ("lenet", "mlp"):
        chosen = {
            key: attack
            for key, attack in proper.attacks.items()
            if positive_model(attack) == name and set(attack.needs) <= {*PUBLIC}
        }
        if chosen:
            device = next(proper.client.model.parameters()).device
            easy = plain_model(name, proper.split, job.seed).to(device)
            client = Client(easy, classes=len(proper.split.classes))
            stages.append(
                replace(
                    proper, kind="positive", client=client, chunks=few, attacks=chosen, batch_size=1
                )
            )
    return stages


def positive_model(attack: Attack) -> str:
    """Name the model on which this attack is known to work, untrained."""
    return "mlp" if isinstance(attack, LinearInversion) else "lenet"
