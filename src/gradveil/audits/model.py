"""The model of a case, untrained or from a checkpoint, plain or protected, and its accuracy."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from msgspec import to_builtins
from torch import Tensor, nn

from gradveil.audits.job import AuditJob, Case
from gradveil.audits.records import MODEL
from gradveil.core.files import digest, write_text
from gradveil.core.formats import TrainedModel
from gradveil.core.reading import read_json
from gradveil.data import Images
from gradveil.defenses.weights import load_weights, trained_under
from gradveil.models import build_for
from gradveil.models.accuracy import measure_accuracy
from gradveil.models.checkpoints import read_settings


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a checkpoint.

    `accuracy` was measured on `tested` images, which `measured_on` tells apart: those of the
    `test` split, the `others` of a user's own images, which are no victims, or, where there are no
    others, the `victims`. `weights_sha256` is the digest of the weights; both are None in files of
    early versions, which wrote the accuracy that the checkpoint claims. `under`, the defense in
    training, as text, and `step`, the number of training steps, are claims of the checkpoint that
    nothing can measure.
    """

    accuracy: float
    tested: int
    under: str | None
    step: int | None
    measured_on: str | None = None
    weights_sha256: str | None = None

    @property
    def hits(self) -> int:
        """The number of test images that the model classifies correctly."""
        return round(self.accuracy * self.tested)


def find_model(job: AuditJob, case: Case, split: Images) -> tuple[nn.Module, bool]:
    """Return the model to audit, and whether the defense has been built into it already.

    A checkpoint may be of the protected model, trained under the defense, or of the plain model,
    which is then protected with untrained parts.
    """
    plain = build_for(job.model, split, job.seed, check=False)
    if case.weights is None:
        return plain, False
    return load_weights(case.weights, plain, case.acting, (split.channels, split.size, split.size))


def describe_model(
    job: AuditJob, case: Case, test: Images, victims: Tensor, device: torch.device
) -> ModelFacts | None:
    """Return what the checkpoint says of its training, and the accuracy of its weights, measured.

    Return None without a checkpoint, and where the defense has parts that were not trained. `test`
    are the images to measure on; a user's own have no test split, so the `victims`, by their
    numbers, are left out of them.
    """
    if case.weights is None:
        return None
    model, protected = find_model(job, case, test)
    if case.acting.changes("model") and not protected:
        return None
    facts = read_settings(case.weights)
    measured_on, images = "test", test
    if test is job.data:
        numbers = torch.arange(len(test))
        others = numbers[~torch.isin(numbers, victims)]
        measured_on = "others" if len(others) else "victims"
        images = test.select(others) if len(others) else test
    weights = digest(model.state_dict())
    accuracy, tested = measure_accuracy(model.to(device), images, seed=job.seed)
    under, step = trained_under(facts), facts.get("step")
    return ModelFacts(accuracy, tested, under, step, measured_on, weights)


def facts_hold(out: Path, weights: str) -> bool:
    """Tell whether a case's folder has facts that were measured on these weights, by digest.

    The facts of a model without a checkpoint, null, hold too.
    """
    if not (out / MODEL).is_file():
        return False
    found = read_facts(out)
    return found is None or found.weights_sha256 == weights


def save_facts(out: Path, found: ModelFacts | None) -> None:
    """Write the facts, or null, into a case's folder."""
    write_text(out / MODEL, json.dumps(None if found is None else asdict(found)) + "\n")


def read_facts(out: Path) -> ModelFacts | None:
    """Read what `save_facts` wrote."""
    found = read_json(out / MODEL, TrainedModel | None)
    return None if found is None else ModelFacts(**to_builtins(found))
