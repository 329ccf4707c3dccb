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
from gradveil.core.digests import digest
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.data import Images, load
from gradveil.models.checkpoints import load_checkpoint
from gradveil.scores.accuracy import AccuracyScorer
from gradveil.scores.privacy import PrivacyScorer
from gradveil.scores.scorers import Scorer
from gradveil.search.folders import TRAINING, alone
from gradveil.search.images import Chosen, choose_images
from gradveil.search.jobs import SCORES, SearchJob
from gradveil.search.probes import make_probe
from gradveil.search.progress import Bar
from gradveil.training.candidates import candidate

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
        train, test = (load(job.data, split, root=root, image_size=job.image_size) for split in ("train", "test"))
        chosen = choose_images(len(test), job.images, SCORES[job.score], f"{test.name} {test.split}")
        made = cls(job, train, test, chosen)
        made.try_attack()
        if job.checkpoint:
            load_checkpoint(job.checkpoint, made.untrained())
        return made

    def try_attack(self) -> None:
        """One iteration on one image: an attack that does not suit the model would fail in the audits, after all the work."""
        model = self.untrained()
        batch = Batch(self.test.images[:1].float() / 255, self.test.labels[:1])
        ((seen, _),) = Client(model, classes=len(self.test.classes)).share([batch], generator(self.job.seed, "trial"))
        attacked(shortened(find(self.job.attack)), [seen], generator(self.job.seed, "trial", "attack"), None)

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
                {f"{name} {what}": getattr(one, what) for name, one in splits.items() for what in ("images", "labels")}
            ),
            "images": len(self.chosen.leak),
            "gradveil": __version__,
        }

    def scorers(self, model: nn.Module, device: torch.device) -> dict[str, Scorer]:
        """`accuracy` on the untrained model, `leak` on the semi-trained one."""
        job, leak, accuracy = self.job, list(self.chosen.leak), list(self.chosen.accuracy)
        untrained, model = self.untrained().to(device), model.to(device)
        judge = AccuracyScorer(untrained, self.test.images[accuracy], self.test.labels[accuracy], augment=job.augment, seed=job.seed)
        if job.score == "privacy":
            images, labels = self.test.images[leak], self.test.labels[leak]
            return {"accuracy": judge, "leak": PrivacyScorer(model, images, labels, job.rule, augment=job.augment, seed=job.seed)}
        probe = make_probe(
            self.train, self.test, model, leak, attack=job.attack, steps=job.probe_steps, seed=job.seed, augment=job.augment, device=device
        )
        return {"accuracy": judge, "leak": probe}


def find_checkpoint(job: SearchJob, out: Path, *, root: Path | None, device: str, bar: Bar, progress: bool) -> Path:
    """The semi-trained weights: the job's own, or trained now on a tenth of the data. Of several processes one trains."""
    if job.checkpoint:
        return job.checkpoint
    from gradveil.training import Job, Recipe, train  # Lightning takes seconds to import

    recipe = Job(
        job.data, job.model, Recipe(epochs=EPOCHS), augment=job.augment, fraction=FRACTION, image_size=job.image_size, seed=job.seed
    )
    with alone(out, lambda: bar.say("another process trains the semi-trained model: waiting for it")):
        return train(recipe, out / TRAINING, root=root, device=device, progress=progress).checkpoint
