"""What a search scores with: the images, the untrained and the semi-trained model, and the two scores on them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradveil import __version__
from gradveil.attacks import find
from gradveil.audits.chunks import attacked
from gradveil.audits.jobs import shortened
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.files import digest
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.data import Images, load
from gradveil.models.checkpoints import load_checkpoint
from gradveil.scores.accuracy import AccuracyScorer
from gradveil.scores.privacy import PrivacyScorer
from gradveil.scores.scorer import Scorer
from gradveil.search.folders import TRAINING, alone
from gradveil.search.job import SCORES, SearchJob
from gradveil.search.probe import make_probe
from gradveil.search.progress import Bar
from gradveil.training.run import candidate

FIRST = 200  # where scoring images start
STEP = 5
BATCHES = 10
BATCH = 100
SMALLEST = 2  # images of an accuracy batch: one alone has no correlation


@dataclass(frozen=True)
class Chosen:
    """Places in the split: of the images whose leakage is scored, and of all batches of the accuracy score. Notes say what is less
    than usual."""

    leak: tuple[int, ...]
    accuracy: tuple[int, ...]
    notes: tuple[str, ...] = ()


def choose_images(size: int, wanted: int | None, usual: int, name: str) -> Chosen:
    """From a split of `size`: every fifth image from 200 on, and ten batches of a hundred from there.

    A smaller split has closer images (the largest step that fits) and smaller batches. `wanted` None asks for the usual number, or
    as many as there are; a number that does not fit is an error.
    """
    there = size - FIRST
    if there < BATCHES * SMALLEST:
        raise GradveilError(
            f"{name} has {size} images: scores start at image {FIRST} and need {BATCHES * SMALLEST} from there; search on a larger split"
        )
    if wanted is not None and wanted > there:
        raise GradveilError(
            f"images {wanted}: {name} has {there} from image {FIRST} on, where scores start; choose at most {there}"
        )
    count = min(usual, there) if wanted is None else wanted
    step = min(STEP, (there - 1) // (count - 1)) if count > 1 else STEP
    batch = min(BATCH, there // BATCHES)
    notes = []
    if count < usual:
        notes.append(
            f"leakage was scored on {count} images instead of {usual}: the ranking is less sure"
        )
    if batch < BATCH:
        notes.append(
            f"{name} has {size} images: accuracy was scored on {BATCHES} batches of {batch} images instead of {BATCH}"
        )
    leak, accuracy = range(FIRST, FIRST + count * step, step), range(FIRST, FIRST + BATCHES * batch)
    return Chosen(tuple(leak), tuple(accuracy), tuple(notes))


EPOCHS = 50
FRACTION = 0.1


@dataclass(frozen=True, eq=False)
class Setup:
    """Made before anything is written, so that what cannot work is refused first."""

    job: SearchJob
    train: Images
    test: Images
    chosen: Chosen

    @classmethod
    def of(cls, job: SearchJob, root: Path | None) -> "Setup":
        train, test = (
            load(job.data, split, root=root, image_size=job.image_size)
            for split in ("train", "test")
        )
        chosen = choose_images(
            len(test), job.images, SCORES[job.score], f"{test.name} {test.split}"
        )
        made = cls(job, train, test, chosen)
        made.try_attack()
        if job.checkpoint:
            load_checkpoint(job.checkpoint, made.untrained())
        return made

    def try_attack(self) -> None:
        """One iteration on one image: an attack that does not suit the model would fail in the audits, after all the work."""
        model = self.untrained()
        batch = Batch(self.test.images[:1].float() / 255, self.test.labels[:1])
        ((seen, _),) = Client(model, classes=len(self.test.classes)).share_batches(
            [batch], generator(self.job.seed, "trial")
        )
        attacked(
            shortened(find(self.job.attack)),
            [seen],
            generator(self.job.seed, "trial", "attack"),
            None,
        )

    def untrained(self) -> nn.Module:
        return candidate(self.job.model, self.train, self.job.seed)

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """What the names stand for: a study of other weights or images is another study. The device is not among them.

        All images: blind guesses are made of the training split, and the test split has those that an image is mistaken for.
        """
        splits = {"train": self.train, "test": self.test}
        return {
            "weights_sha256": digest(model.state_dict()),
            "images_sha256": digest(
                {
                    f"{name} {what}": getattr(one, what)
                    for name, one in splits.items()
                    for what in ("images", "labels")
                }
            ),
            "images": len(self.chosen.leak),
            "gradveil": __version__,
        }

    def scorers(self, model: nn.Module, device: torch.device) -> dict[str, Scorer]:
        """`accuracy` on the untrained model, `leak` on the semi-trained one."""
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
            attack=job.attack,
            steps=job.probe_steps,
            seed=job.seed,
            augment=job.augment,
            device=device,
        )
        return {"accuracy": judge, "leak": probe}


def find_checkpoint(
    job: SearchJob, out: Path, *, root: Path | None, device: str, bar: Bar, progress: bool
) -> Path:
    """The semi-trained weights: the job's own, or trained now on a tenth of the data. Of several processes one trains."""
    if job.checkpoint:
        return job.checkpoint
    from gradveil.training import Recipe, TrainingJob, train  # Lightning takes seconds to import

    recipe = TrainingJob(
        job.data,
        job.model,
        Recipe(epochs=EPOCHS),
        augment=job.augment,
        fraction=FRACTION,
        image_size=job.image_size,
        seed=job.seed,
    )
    with alone(
        out, lambda: bar.say("another process trains the semi-trained model: waiting for it")
    ):
        return train(recipe, out / TRAINING, root=root, device=device, progress=progress).checkpoint
