"""A stage: a model with its victims, its attacks and its controls.

The case of an audit is attacked on a stage, and so is a positive control.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Generator, Tensor

from gradveil.attacks import Attack
from gradveil.attacks.labels import Counted, SingleLabel
from gradveil.audits.attackers import (
    PUBLIC,
    check_told,
    granted,
    in_words,
    rounds,
    without_name,
)
from gradveil.audits.job import AuditJob, Case, shortened
from gradveil.audits.model import find_model
from gradveil.audits.records import Key
from gradveil.audits.victims import Victims, drawn_again
from gradveil.clients import Client, Shared
from gradveil.controls import TRUTHS, Controls
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Gradients, Knowledge, Observation, Reconstruction
from gradveil.data import Images
from gradveil.defenses import Defense
from gradveil.models import build_for
from gradveil.scores import assign
from gradveil.scores.lineup import Shown, is_replayed, replay

POSITIVES = 4  # images of a positive control
CLOSING = 32  # images at most of the sham and of the ceilings
SHAM = "sham"
NOISY = "true picture with noise"
GRADIENTS = "gradient line-up"
CLIENTS = "clients"  # the data set's name where images are given for updates that were recorded
UNDER_DRAWS = "class mean, draws known"


@dataclass(frozen=True, eq=False)
class Victim:
    """A client's batch. `seen` is None where nothing could be shared, and `status` says why."""

    indices: Tensor
    original: Batch
    used: Tensor  # the images the gradient was computed from; black where there is none
    seen: Observation | None
    status: str = "ok"
    shown: Mapping[str, Shown] = field(default_factory=dict)  # its line-ups, by truth

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
    `optional` attacks are left out where they do not suit; any other is then an error. With `sham`
    the strongest attack is also run on updates of other images than the victims'. `trials` are the
    seconds of each attack's trial, where it was tried out.
    """

    kind: str
    client: Client
    split: Images
    victims: Victims
    chunks: tuple[tuple[Tensor, ...], ...]
    attacks: Mapping[str, Attack]
    controls: Controls
    labels: str
    seed: int
    optional: frozenset[str] = frozenset()
    batch_size: int = 1
    sham: bool = True
    trials: Mapping[str, float] = field(default_factory=dict)

    @property
    def changes_images(self) -> bool:
        """Whether the images used differ from those that the client has."""
        return self.client.acting.changes("batch")

    def rows(self, chunk: int) -> Iterator[tuple[Key, Attack]]:
        """Yield the attacks on this chunk with their keys, the controls first."""
        if self.kind == "attack":
            blind = self.controls.attacks.items()
            yield from ((("blind", name, chunk), attack) for name, attack in blind)
        yield from (((self.kind, name, chunk), attack) for name, attack in self.attacks.items())

    def bars(self, chunk: int) -> tuple[Key, ...]:
        """Return the keys of guesses that know more than any attacker."""
        if self.kind != "attack" or self.controls.means is None or not self.changes_images:
            return ()
        return (("bar", UNDER_DRAWS, chunk),)

    @cached_property
    def closing(self) -> tuple[Key, ...]:
        """Return the keys of what is made after all attacks: the sham and the ceilings."""
        lineups = self.victims.lineups
        if self.kind != "attack" or lineups is None:
            return ()
        keys: list[Key] = [("ceiling", NOISY, 0), ("ceiling", GRADIENTS, 0)]
        if self.sham and all(len(images) for images in lineups.spare.values()):
            keys.append(("sham", SHAM, 0))
        return tuple(keys)

    @cached_property
    def first_victims(self) -> tuple[Tensor, ...]:
        """The first victims, of 32 images at most, that the sham and the ceilings are made of."""
        every = [victim for chunk in self.chunks for victim in chunk]
        return tuple(every[: max(1, CLOSING // self.batch_size)])

    def sizes(self) -> dict[Key, int]:
        """Count the images of each key."""
        found: dict[Key, int] = {}
        for number, chunk in enumerate(self.chunks):
            keys = [key for key, _ in self.rows(number)]
            found |= dict.fromkeys([*keys, *self.bars(number)], sum(map(len, chunk)))
        return found | dict.fromkeys(self.closing, sum(map(len, self.first_victims)))

    def batches(self, victims: Sequence[Tensor]) -> list[Batch]:
        """Return the batches of these victims, before any defense."""
        return [
            Batch(self.split.images[indices].float() / 255, self.split.labels[indices])
            for indices in victims
        ]

    def share(
        self, victims: Sequence[Tensor], instead: Sequence[Batch] | None = None
    ) -> list[Victim]:
        """Let the victims share, all of them together.

        Each has a generator, so its draws depend on nothing but the seed and its first image. All
        that can be known of the defense is told; `granted` leaves each attack what it may know.
        `instead` are batches to share in place of the victims'.
        """
        several = rounds(self.client.acting, self.attacks.values())
        batches = self.batches(victims) if instead is None else instead
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
        rngs = [self._draws_of(indices) for indices in victims]
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

    def _draws_of(self, indices: Tensor) -> Generator:
        """Return the generator of a victim's draws."""
        return generator(self.seed, "share", int(indices[0]))

    def lined_up(self, victims: Sequence[Victim]) -> list[Victim]:
        """Return the victims with their line-ups, every candidate put through their draws."""
        return [replace(victim, shown=self._shown(victim)) for victim in victims]

    def _shown(self, victim: Victim) -> dict[str, Shown]:
        lineups = self.victims.lineups
        if lineups is None or victim.seen is None:
            return {}
        rows = [self.lineup_rows[int(image)] for image in victim.indices]
        true = lineups.true[rows]
        device = next(self.client.model.parameters()).device
        known: dict[str, list[Tensor]] = {truth: [] for truth in TRUTHS}
        for number, row in enumerate(rows):
            candidates = self.split.images[lineups.candidates[row]].to(device).float() / 255
            known["original"].append(candidates)
            if self.changes_images:
                made = self.under_draws(victim, number, candidates)
                _check_replayed(made[true[number]], victim.used[number], self.client.acting)
                known["used"].append(made)
        original = Shown.of(torch.stack(known["original"]), true)
        used = original
        if self.changes_images:
            used = Shown.of(torch.stack(known["used"]), true)
        return {"used": used, "original": original}

    @cached_property
    def lineup_rows(self) -> dict[int, int]:
        """The line-up of each image, by its number."""
        return {int(image): row for row, image in enumerate(self.victims.numbers)}

    def under_draws(self, victim: Victim, row: int, candidates: Tensor) -> Tensor:
        """Return what the defense would have made of other images in the place of image `row`."""
        assert victim.seen is not None
        images = victim.original.images.to(candidates)
        transform = victim.seen.knowledge.transform
        if transform is None:
            labels = victim.original.labels.to(images.device)
            transform = drawn_again(self.client.acting, labels, self._draws_of(victim.indices))
        return replay(transform, images, row, candidates)

    def shams(self, victims: Sequence[Victim]) -> list[Victim]:
        """Return the victims as they would be seen had they had other images of the same labels.

        These images stand in no line-up. What is found is compared with the victims' own images,
        of which the update holds nothing.
        """
        lineups = self.victims.lineups
        assert lineups is not None
        batches = []
        for victim in victims:
            used = dict.fromkeys(lineups.spare, 0)
            chosen = []
            for label in victim.original.labels.tolist():
                spare = lineups.spare[label]
                chosen.append(int(spare[(int(victim.indices[0]) + used[label]) % len(spare)]))
                used[label] += 1
            batches.append(self.batches([torch.tensor(chosen)])[0])
        shared = self.share([victim.indices for victim in victims], batches)
        return [
            replace(victim, seen=sham.seen, status=sham.status)
            for victim, sham in zip(victims, shared, strict=True)
        ]

    def _with_inferred_labels(self, victims: list[Victim]) -> list[Victim]:
        seen = [victim.seen for victim in victims if victim.seen is not None]
        if not seen:
            return victims
        finder = SingleLabel() if seen[0].size == 1 else Counted()
        bare = [replace(s, gradients=first_round(s), knowledge=Knowledge()) for s in seen]
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

    def tells(self, name: str) -> bool:
        """Whether the attack is told all that it needs."""
        attack = self.attacks[name]
        if not {*attack.needs} - {*PUBLIC}:
            return "means" not in attack.needs or self.controls.means is not None
        try:
            check_told(name, attack, self.seen_by(attack, self.sample))
        except GradveilError:
            return False
        return True

    def fitted(self) -> tuple["Stage", dict[str, str]]:
        """Return the stage without the optional attacks that do not suit, and the reasons."""
        left_out: dict[str, str] = {}
        trials: dict[str, float] = {}
        _ = self.sample  # where nothing can be shared, that is said once, and not of each attack
        for name in self.attacks:
            began = time.perf_counter()
            try:
                self.try_out(name)
                trials[name] = time.perf_counter() - began
            except GradveilError as error:
                if name not in self.optional:
                    raise
                left_out[name] = str(error)
        if len(left_out) == len(self.attacks):
            reasons = "; ".join(f"{n}: {without_name(n, why)}" for n, why in left_out.items())
            raise GradveilError(f"defense {self.client.defense}: no attack suits it: {reasons}")
        return self.without(left_out, trials), left_out

    def without(
        self, left_out: Mapping[str, str], trials: Mapping[str, float] | None = None
    ) -> "Stage":
        """Return the stage without these attacks, and with new `trials` where they are given."""
        kept = {name: attack for name, attack in self.attacks.items() if name not in left_out}
        return self.with_attacks(kept, trials)

    def with_attacks(
        self, attacks: Mapping[str, Attack], trials: Mapping[str, float] | None = None
    ) -> "Stage":
        """Return the stage with these attacks, and with new `trials` where they are given."""
        made = replace(self, attacks=attacks, trials=self.trials if trials is None else trials)
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


def first_round(seen: Observation) -> Gradients:
    """Return the gradients of the first of several rounds."""
    return seen.knowledge.earlier[0] if seen.knowledge.earlier else seen.gradients


def _check_replayed(made: Tensor, used: Tensor, defense: Defense) -> None:
    """Refuse a defense whose draws do not follow from its generator: no line-up would be fair."""
    if not is_replayed(made, used):
        raise GradveilError(
            f"defense {defense}: the same generator changed the same image in two ways; "
            "protect_batch must draw from the generator it is given"
        )


def make_stage(
    job: AuditJob,
    case: Case,
    split: Images,
    victims: Victims,
    controls: Controls,
    device: torch.device,
) -> Stage:
    """Make the stage of a case, with every attack that the job has for it."""
    assert job.victims_at_once is not None
    each, step = tuple(victims.numbers.split(job.batch_size)), job.victims_at_once
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
    client = client if job.recorded is None else job.recorded(client)
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
        job.sham,
    )


def positive_stages(
    job: AuditJob,
    proper: Stage,
    controls_of: Callable[[Defense], Controls],
    attacks: Mapping[str, tuple[Attack, Defense]],
) -> list[Stage]:
    """Put each attack on an untrained model where it is known to work.

    That is without a defense, or under the mild one that is given with the attack and that it
    undoes. An attack that is not told enough there is left out. `controls_of` gives the controls of
    images under a defense.
    """
    few = (tuple(proper.victims.numbers[:POSITIVES].split(1)),)
    device = next(proper.client.model.parameters()).device
    places: dict[tuple[str, str], dict[str, Attack]] = {}
    milds = {str(mild): mild for _, mild in attacks.values()}
    for key, (attack, mild) in attacks.items():
        places.setdefault((str(mild), positive_model(attack)), {})[key] = attack
    stages = []
    for (text, name), chosen in sorted(places.items(), key=_plain_first):
        easy = build_for(name, proper.split, job.seed, check=False).to(device)
        stage = replace(
            proper,
            kind="positive",
            client=Client(easy, classes=len(proper.split.classes), defense=milds[text]),
            chunks=few,
            attacks=chosen,
            controls=controls_of(milds[text].without_gradients()),
            batch_size=1,
            trials={},
        )
        able = {key: attack for key, attack in chosen.items() if stage.tells(key)}
        stages += [stage.with_attacks(able)] if able else []
    return stages


def _plain_first(place: tuple[tuple[str, str], object]) -> tuple[bool, str, str]:
    """Return a key that sorts places without a defense to the front."""
    (defense, model), _ = place
    return defense != str(Defense()), defense, model


def positive_model(attack: Attack) -> str:
    """Name the model on which this attack is known to work, untrained.

    Without the gradients that random layers change, those of lenet say too little of an image.
    """
    return "mlp" if "random_layers" in attack.needs else attack.easy_model
