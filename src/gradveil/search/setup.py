"""Images, the untrained and the semi-trained model, and two scorers: all that a search needs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil import __version__
from gradveil.attacks.attack_files import short_digest
from gradveil.audits.victims import find_victims, refuse_tuned_on
from gradveil.core.errors import GradveilError
from gradveil.core.files import digest
from gradveil.core.locks import held
from gradveil.core.progress import Bar
from gradveil.data import Images, load
from gradveil.models import build_for
from gradveil.models.checkpoints import load_checkpoint
from gradveil.scores.accuracy import AccuracyScorer
from gradveil.scores.privacy import PrivacyScorer
from gradveil.scores.scorer import Scorer
from gradveil.search.confirm import try_attack
from gradveil.search.job import SCORES, SEMI_TRAINED, SearchJob, images_digest
from gradveil.search.probe import make_probe, short_attack

FIRST = 200  # where scoring images start
STEP = 5
BATCHES = 10
BATCH = 100
SMALLEST = 2  # images of an accuracy batch: a single one has no correlation
EPOCHS = 50
FRACTION = 0.1


@dataclass(frozen=True)
class Chosen:
    """Indices into the test images, and notes on what is less than usual.

    Leakage is scored on the images `leak`, accuracy on ten batches that are together `accuracy`.
    """

    leak: tuple[int, ...]
    accuracy: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def scored(self) -> tuple[int, ...]:
        """All images that a score uses, each once and in order."""
        return tuple(sorted({*self.leak, *self.accuracy}))

    def of_order(self, order: Tensor) -> "Chosen":
        """Return the images that have these numbers in another order of the split."""
        leak, accuracy = (tuple(order[list(some)].tolist()) for some in (self.leak, self.accuracy))
        return replace(self, leak=leak, accuracy=accuracy)


def in_turn(labels: Tensor) -> Tensor:
    """Return the order of a split: as it is, or where it is sorted with the classes mixed evenly.

    Folders are sorted by class: neighbors, whose accuracy is scored together, would be of one.
    """
    if bool((labels.diff() < 0).any()):
        return torch.arange(len(labels))
    number = torch.arange(len(labels)) - torch.searchsorted(labels, labels)  # within its class
    return ((number + 0.5) / labels.bincount()[labels]).argsort(stable=True)


def choose_images(size: int, wanted: int | None, usual: int, name: str) -> Chosen:
    """Choose from a split of `size`: every fifth image from 200 on, and ten batches of a hundred.

    A smaller split has closer images (the largest step that fits) and smaller batches; of less than
    220 images the first half is left to the audits. `wanted` None asks for the usual number, or as
    many as there are; a number that does not fit is an error.
    """
    least = BATCHES * SMALLEST
    first = FIRST if size - FIRST >= least else size // 2
    left = size - first
    if left < least:
        raise GradveilError(
            f"{name} has {size} images: scores need {least}, and the audits others; give at least "
            f"{2 * least - 1} test images"
        )
    if wanted is not None and wanted > left:
        raise GradveilError(
            f"images {wanted}: {name} has {left} from image {first} on, where scores start; "
            f"choose at most {left}"
        )
    count = min(usual, left) if wanted is None else wanted
    step = min(STEP, (left - 1) // (count - 1)) if count > 1 else STEP
    batch = min(BATCH, left // BATCHES)
    notes = []
    if count < usual:
        notes.append(
            f"leakage was scored on {count} images instead of {usual}: the ranking is less sure"
        )
    if batch < BATCH:
        notes.append(
            f"{name} has {size} images: accuracy was scored on {BATCHES} batches of {batch} images "
            f"instead of {BATCH}"
        )
    leak, accuracy = range(first, first + count * step, step), range(first, first + BATCHES * batch)
    return Chosen(tuple(leak), tuple(accuracy), tuple(notes))


@dataclass(frozen=True, eq=False)
class Setup:
    """A search that can start. `of` writes nothing, and refuses what cannot work."""

    job: SearchJob
    train: Images
    test: Images
    chosen: Chosen
    audited: tuple[int, ...]  # images that the audits attack, and no score may see

    @classmethod
    def of(cls, job: SearchJob, root: Path | None) -> "Setup":
        train, test = find_images(job, root)
        chosen = choose_images(
            len(test), job.images, SCORES[job.score], f"{test.name} {test.split}"
        ).of_order(in_turn(test.labels))
        made = cls(job, train, test, chosen, find_audited(job, test, chosen))
        refuse_tuned_on({job.attack_title: job.attack}, test, torch.tensor(made.audited))
        try_attack(job, made.untrained(), test)
        if job.checkpoint:
            load_checkpoint(job.checkpoint, made.untrained())
        return made

    def untrained(self) -> nn.Module:
        """Make the model anew, untrained."""
        return build_for(self.job.model, self.train, self.job.seed)

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """Return digests of weights and images: a study of others is another, on any device."""
        return {
            "weights_sha256": digest(model.state_dict()),
            "images_sha256": images_digest(self.train, self.test),
            "images": len(self.chosen.leak),
            "gradveil": __version__,
        }

    def digests(self) -> tuple[str, ...]:
        """Return the short digests of the images that a score uses."""
        return tuple(short_digest(self.test.images[number]) for number in self.chosen.scored)

    def scorers(self, model: nn.Module, device: torch.device) -> dict[str, Scorer]:
        """Make the scorers `accuracy`, on the untrained model, and `leak`, on the semi-trained."""
        job, leak, accuracy = self.job, list(self.chosen.leak), list(self.chosen.accuracy)
        untrained, model = self.untrained().to(device), model.to(device)
        judge = AccuracyScorer(
            untrained,
            self.test.images[accuracy],
            self.test.labels[accuracy],
            augment=job.augment,
            seed=job.seed,
        )
        if job.score == "privacy":
            images, labels = self.test.images[leak], self.test.labels[leak]
            return {
                "accuracy": judge,
                "leak": PrivacyScorer(
                    model, images, labels, job.rule, augment=job.augment, seed=job.seed
                ),
            }
        probe = make_probe(
            self.train,
            self.test,
            model,
            leak,
            attack=short_attack(job.attack, job.probe_steps),
            seed=job.seed,
            augment=job.augment,
            device=device,
            apart=self.audited,
        )
        return {"accuracy": judge, "leak": probe}


def find_audited(job: SearchJob, test: Images, chosen: Chosen) -> tuple[int, ...]:
    """Return the images that the audits will draw: none of those that scores have seen."""
    left = len(test) - len(chosen.scored)
    if job.audit_images > left:
        raise GradveilError(
            f"audit images {job.audit_images}: {test.name} {test.split} has {left} that no score "
            f"has seen; choose at most {left}"
        )
    found = find_victims(test, job.audit_images, 1, None, job.seed, apart=chosen.scored)
    return tuple(found.numbers.tolist())


def find_images(job: SearchJob, root: Path | None) -> tuple[Images, Images]:
    """Return the job's training and test images: its own, or loaded by name."""
    if isinstance(job.data, str):
        train, test = (
            load(job.data, split, root=root, image_size=job.image_size, channels=job.channels)
            for split in ("train", "test")
        )
        return train, test
    train, test = job.data
    for name, ours, theirs in (
        ("images", train.images.shape[1:], test.images.shape[1:]),
        ("classes", len(train.classes), len(test.classes)),
    ):
        if ours != theirs:
            raise GradveilError(
                f"data: the training split has {name} {ours}, the test split {theirs}; "
                "they must agree"
            )
    return train, test


def find_checkpoint(
    job: SearchJob, out: Path, *, root: Path | None, device: str, bar: Bar, progress: bool
) -> Path:
    """Return the semi-trained weights: the job's, or trained now, by one of several processes."""
    if job.checkpoint:
        return job.checkpoint
    from gradveil.training import Recipe, TrainingJob, train  # Lightning takes seconds to import

    data, test = (job.data, None) if isinstance(job.data, str) else job.data
    recipe = TrainingJob(
        data,
        job.model,
        Recipe(epochs=EPOCHS),
        augment=job.augment,
        fraction=FRACTION,
        image_size=job.image_size,
        channels=job.channels,
        seed=job.seed,
        test=test,
    )
    busy = "trains the semi-trained model: waiting for it"
    with held(out, lambda holder: bar.say(f"{holder} {busy}")):
        result = train(recipe, out / SEMI_TRAINED, root=root, device=device, progress=progress)
    return result.checkpoint
