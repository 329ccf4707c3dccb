"""Public images and a client for a tuning, and the scorers that try attacks on them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradveil import __version__
from gradveil.attacks import GradientMatching, adam_cosine
from gradveil.attacks.attack_files import image_digest
from gradveil.audits.attackers import check_told, without_name
from gradveil.audits.job import AuditJob
from gradveil.audits.outcomes import Outcome, outcomes, ranked
from gradveil.audits.stage import Stage, Victim, make_stage, run_attack
from gradveil.audits.timing import time_iteration
from gradveil.audits.victims import Victims, find_victims
from gradveil.controls import Controls
from gradveil.core.errors import GradveilError
from gradveil.core.files import digest
from gradveil.core.seeds import generator
from gradveil.data import Images, load
from gradveil.models import build_for
from gradveil.scores import ssim
from gradveil.scores.lineup import draw_victims
from gradveil.scores.scorer import Scorer
from gradveil.tuning.job import TuningJob
from gradveil.tuning.space import AttackSpace, usual_space

POOL = 10_000  # public images at most that victims and line-ups are drawn from
FIRST_BLOCK = 8  # updates after which a trial may be dropped
UNFIT = 2.0  # `missed` of an attack that cannot run on these victims; at most 1.5 otherwise


@dataclass(frozen=True, eq=False)
class AttackScorer(Scorer):
    """Score attacks on victims: of each update, the share with rank 1 in the line-up, and SSIM.

    Both are compared with the images that the attack aims at. `missed`, which shall be small, is
    1 - (line-up + SSIM) / 2. Every attack has the same victims and the same random numbers.
    """

    names: ClassVar[tuple[str, ...]] = ("missed", "lineup", "ssim", "seconds")

    stage: Stage = field(repr=False)
    victims: tuple[Tensor, ...] = field(repr=False)
    sizes: tuple[int, ...]
    seed: int
    _shared: dict[int, list[Victim]] = field(default_factory=dict, repr=False)

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.sizes

    def score(self, policies: Sequence[GradientMatching], block: int) -> Mapping[str, Tensor]:
        rows = [self._values(attack, block) for attack in policies]
        return {
            name: torch.tensor([row[name] for row in rows], dtype=torch.float64)
            for name in self.names
        }

    def _values(self, attack: GradientMatching, block: int) -> dict[str, list[float]]:
        victims = self._lined_up(block)
        seen = self.stage.seen_by(attack, victims)
        began = time.perf_counter()
        try:
            found = run_attack(attack, seen, generator(self.seed, "tuning", block))
        except GradveilError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            count = len(victims)
            return {name: [0.0] * count for name in self.names} | {"missed": [UNFIT] * count}
        images = sum(len(victim.indices) for victim in victims)
        seconds = (time.perf_counter() - began) / images
        made = ranked(outcomes(victims, found), generator(self.seed, "lot", block))
        hits, likeness = zip(*(_measure(each, attack.view.aims_at) for each in made), strict=True)
        missed = [1 - (hit + like) / 2 for hit, like in zip(hits, likeness, strict=True)]
        return {
            "missed": missed,
            "lineup": list(hits),
            "ssim": list(likeness),
            "seconds": [seconds] * len(victims),
        }

    def _lined_up(self, block: int) -> list[Victim]:
        """Return the victims of a block, who share once for all attacks."""
        if block not in self._shared:
            first = sum(self.sizes[:block])
            some = self.victims[first : first + self.sizes[block]]
            self._shared[block] = self.stage.lined_up(self.stage.share(some))
        return self._shared[block]


def _measure(outcome: Outcome, truth: str) -> tuple[float, float]:
    """Return the share of an update's images with rank 1, and their mean SSIM."""
    if outcome.status != "ok":
        return 0.0, 0.0
    victim = outcome.victim
    true = victim.used if truth == "used" else victim.original.images
    ranks = outcome.ranks[truth]
    return sum(rank == 1 for rank in ranks) / len(ranks), float(ssim(outcome.images, true).mean())


@dataclass(frozen=True, eq=False)
class Setup:
    """A tuning that can start. `of` writes nothing, and refuses what cannot work."""

    job: TuningJob
    space: AttackSpace
    pool: Images
    victims: Victims
    stage: Stage
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: TuningJob, root: Path | None, device: torch.device) -> "Setup":
        """Draw the victims, make the client, and try every option of the space out."""
        data, pool = find_images(job, root)
        count = job.images + job.held_out
        if count > len(pool):
            raise GradveilError(
                f"images {job.images} and {job.held_out} held out: {pool.name} has {len(pool)} "
                "public images; choose fewer"
            )
        victims = find_victims(pool, count, job.batch_size, None, job.seed)
        if victims.lineups is None:
            raise GradveilError(
                f"{pool.name}: no line-ups can be made, and attacks are judged by them: "
                f"{victims.reason}; give more public images"
            )
        space = job.space
        if space is None:
            model = build_for(job.model, data, job.seed, check=False)
            space = usual_space(model, job.defense, job.protocol.train_mode)
        if job.work < space.least_work:
            raise GradveilError(
                f"work {job.work}: too small for one iteration of every attack; give at least "
                f"{space.least_work}"
            )
        stage = _make_stage(job, space, pool, victims, device)
        made = cls(job, space, pool, victims, stage)
        return made._fitted(strict=job.space is not None)

    def _fitted(self, strict: bool) -> "Setup":
        """Return the setup without options that do not suit; with `strict` such are an error."""
        unfit: dict[str, str] = {}
        for name, attack in self.space.options():
            try:
                seen = self.stage.seen_by(attack, self.stage.sample)
                check_told(name, attack, seen)
                run_attack(attack, seen, generator(self.job.seed, "trial", name))
            except GradveilError as error:
                unfit[name] = without_name(name, str(error))
                if strict:
                    raise GradveilError(f"setting {name}: {unfit[name]}") from None
        notes = tuple(f"left out, {name}: {why}" for name, why in unfit.items())
        return replace(self, space=self.space.without(unfit), notes=notes)

    @property
    def tuned_on(self) -> Tensor:
        """The images to tune on, by their numbers in the pool."""
        return self.victims.numbers[: self.job.images]

    @property
    def held_out(self) -> Tensor:
        """The images that the result is tested on, by their numbers in the pool."""
        return self.victims.numbers[self.job.images :]

    def digests(self, numbers: Tensor) -> list[str]:
        """Return the digests of these images."""
        return [image_digest(self.pool.images[number]) for number in numbers.tolist()]

    def scorers(self) -> dict[str, Scorer]:
        """Return the scorers of the trials and of the images held out, by name."""
        size = self.job.batch_size
        tuned, held = (tuple(some.split(size)) for some in (self.tuned_on, self.held_out))
        rest = len(tuned) - FIRST_BLOCK
        sizes = (FIRST_BLOCK, rest) if rest >= FIRST_BLOCK // 2 else (len(tuned),)
        seed = self.job.seed
        return {
            "trial": AttackScorer(self.stage, tuned, sizes, seed),
            "held out": AttackScorer(self.stage, held, (len(held),), seed + 1),
        }

    def facts(self) -> dict[str, Any]:
        """Return digests of weights and images: a study of others is another study."""
        return {
            "weights_sha256": digest(self.stage.client.model.state_dict()),
            "images_sha256": self.pool.select(self.victims.numbers).digest(),
            "gradveil": __version__,
        }

    @cached_property
    def _of_an_image(self) -> float:
        return time_iteration(self.stage, "standard", replace(adam_cosine, frames=0))

    def iteration(self, trials: int) -> float:
        """Return the seconds of an iteration of the standard attack on all images.

        These are those of so many trials, and those held out, which two attacks are tested on.
        """
        return self._of_an_image * (trials * self.job.images + 2 * self.job.held_out)

    def work_within(self, minutes: float) -> int:
        """Return the work of each attack with which all trials fit into so many minutes."""
        iteration = self.iteration(self.job.trials)
        work = min(self.job.work, int(60 * minutes / max(iteration, 1e-12)))
        least = self.space.least_work
        if work < least:
            raise GradveilError(
                f"budget {minutes:g}: these minutes are too few for one iteration of every attack; "
                f"give at least {least * iteration / 60:.2g}, fewer images or fewer trials"
            )
        return work


def _make_stage(
    job: TuningJob, space: AttackSpace, pool: Images, victims: Victims, device: torch.device
) -> Stage:
    numbers = torch.arange(len(pool))
    others = pool.select(numbers[~torch.isin(numbers, victims.numbers)])
    audit = AuditJob(
        job.model,
        pool,
        dict(space.bases),
        cases=(job.case,),
        images=len(victims.numbers),
        batch_size=job.batch_size,
        labels=job.labels,
        protocol=job.protocol,
        positive=False,
        sham=False,
        seed=job.seed,
    ).on(device)
    controls = Controls.of(others, job.case.before_gradients, job.batch_size, job.seed)
    return make_stage(audit, job.case, pool, victims, controls, device)


def find_images(job: TuningJob, root: Path | None) -> tuple[Images, Images]:
    """Return images of the clients' kind, and those of the public that are tuned on."""
    if isinstance(job.data, str):
        data = load(job.data, "train", root=root, image_size=job.image_size, channels=job.channels)
    else:
        data = job.data
    public = data if job.public is None else _like(job.public, data)
    every = torch.ones(len(public), dtype=torch.bool)
    chosen = draw_victims(public.labels, min(POOL, len(public)), every, job.seed)
    return data, public.select(chosen.sort().values)


def _like(public: Images, data: Images) -> Images:
    """Return the public images with the classes and the normalization of the clients' data."""
    theirs, ours = (tuple(some.images.shape[1:]) for some in (public, data))
    if theirs != ours:
        raise GradveilError(f"public: images of shape {theirs}; those of {data.name} have {ours}")
    labels = public.labels
    if set(public.classes) <= set(data.classes):
        numbers = torch.tensor([data.classes.index(name) for name in public.classes])
        labels = numbers[labels]
    elif len(public.classes) != len(data.classes):
        raise GradveilError(
            f"public: {len(public.classes)} classes, such as {public.classes[0]!r}; {data.name} "
            f"has {len(data.classes)}, such as {data.classes[0]!r}"
        )
    return replace(public, labels=labels, classes=data.classes, mean=data.mean, std=data.std)
