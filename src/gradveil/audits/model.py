"""The model of a case, untrained or from a checkpoint, plain or protected, and its accuracy."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch import nn

from gradveil.audits.job import AuditJob, Case, data_name
from gradveil.audits.records import MODEL
from gradveil.core.errors import GradveilError
from gradveil.core.files import write_text
from gradveil.core.formats import TrainedModel
from gradveil.core.reading import read_json
from gradveil.core.seeds import following, generator
from gradveil.data import Images
from gradveil.defenses import REGISTRY, Defense
from gradveil.defenses.applied import protected_model
from gradveil.defenses.chain import THEN
from gradveil.models import build_for
from gradveil.models.bottleneck import at_rest
from gradveil.models.checkpoints import load_checkpoint, read_settings

PASSED_AT_ONCE = 500
MEASURED = {"cpu": 2_000, "cuda": 10_000}
"""Test images at most, where a checkpoint does not say its accuracy."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a checkpoint.

    `accuracy` is that on `tested` test images; `under` the defense in training, as text; `step`
    the number of training steps.
    """

    accuracy: float
    tested: int
    under: str | None
    step: int | None

    @property
    def hits(self) -> int:
        """The number of test images that the model classifies correctly."""
        return round(self.accuracy * self.tested)


def find_model(job: AuditJob, case: Case, split: Images) -> tuple[nn.Module, bool]:
    """Return the model to audit, and whether the defense has been built into it already.

    A checkpoint may be of the protected model, trained under the defense, or of the plain model,
    which is then protected with untrained parts.
    """
    plain = plain_model(job.model, split, job.seed)
    if case.weights is None:
        return plain, False
    if not changes_model(case.acting):
        _refuse_protected(case.weights, case.acting)
        return load_checkpoint(case.weights, plain), False
    shape = split.channels, split.size, split.size
    protected = protected_model(case.acting, plain, shape)
    try:
        return load_checkpoint(case.weights, protected), True
    except GradveilError as error:
        try:
            return load_checkpoint(case.weights, plain), False
        except GradveilError:
            raise error from None


def plain_model(model: nn.Module | str, split: Images, seed: int) -> nn.Module:
    """Return a copy of the module, or a new model of this name for such images."""
    return build_for(model, split, seed, check=False)


def describe_model(
    job: AuditJob, case: Case, test: Images, device: torch.device
) -> ModelFacts | None:
    """Return the facts that the checkpoint holds; an accuracy it does not hold is measured.

    Return None without a checkpoint, and where the defense has parts that were not trained.
    """
    if case.weights is None:
        return None
    model, protected = find_model(job, case, test)
    if changes_model(case.acting) and not protected:
        return None
    facts = read_settings(case.weights)
    said = facts.get("test_accuracy")
    same_images = facts.get("data") == data_name(job.data)
    if isinstance(said, float) and same_images and facts.get("image_size") in (None, test.size):
        accuracy, tested = said, len(test)
    else:
        most = MEASURED.get(device.type, MEASURED["cpu"])
        accuracy, tested = measure_accuracy(model.to(device), test, most, job.seed)
    return ModelFacts(accuracy, tested, trained_under(facts), facts.get("step"))


def measure_accuracy(model: nn.Module, test: Images, most: int, seed: int = 0) -> tuple[float, int]:
    """Return the share of test images that the model classifies correctly, and their number.

    These are all images, or `most` at even distances. The seed is for a model that draws.
    """
    chosen = torch.linspace(0, len(test) - 1, min(most, len(test))).round().long()
    device, hits, mode = next(model.parameters()).device, 0, model.training
    model.eval()
    with torch.no_grad(), at_rest(model), following(generator(seed, "test")):
        for some in chosen.split(PASSED_AT_ONCE):
            answers = model(test.images[some].to(device).float() / 255)
            guesses = answers[:, : len(test.classes)].argmax(1).cpu()
            hits += int((guesses == test.labels[some]).sum())
    model.train(mode)
    return hits / len(chosen), len(chosen)


def save_facts(out: Path, found: ModelFacts | None) -> None:
    """Write the facts, or null, into a case's folder."""
    write_text(out / MODEL, json.dumps(None if found is None else asdict(found)) + "\n")


def read_facts(out: Path) -> ModelFacts | None:
    """Read what `save_facts` wrote."""
    found = read_json(out / MODEL, TrainedModel | None)
    return None if found is None else ModelFacts(**to_builtins(found))


def changes_model(defense: Defense) -> bool:
    """Return whether a part of the defense lies in the model."""
    return any(part.acts_on == "model" for part in defense.parts())


def trained_under(facts: Mapping[str, Any]) -> str | None:
    """Return the defense, as text, that a checkpoint says it was trained under.

    Early versions wrote a policy beside the defense, and crop and flip as a setting of the run.
    The text is looked at and never parsed: a file does not decide what is made.
    """
    found = facts.get("defense")
    found = facts.get("policy", found) if found in (None, "none") else found
    if not isinstance(found, str):
        return None
    if facts.get("augment") is not False:
        return found
    return THEN.join(map(_without_augment, found.split(THEN)))


def _without_augment(part: str) -> str:
    """Switch crop and flip off in the text of a defense, where it has them."""
    name, _, settings = part.partition(":")
    if name not in REGISTRY and ":" not in part:
        return f"policy:{part},augment=no"
    if name not in REGISTRY:  # a user's class
        return part
    if "augment" not in {f.name for f in fields(REGISTRY[name])} or "augment=" in settings:
        return part
    return f"{part}{',' if settings else ':'}augment=no"


def _refuse_protected(path: Path, defense: Defense) -> None:
    """Refuse weights trained under a defense that lies in the model, which is told by its name."""
    under = trained_under(read_settings(path)) or "none"
    kinds = [REGISTRY.get(part.partition(":")[0]) for part in under.split(THEN)]
    if any(kind is not None and kind.acts_on == "model" for kind in kinds):
        raise GradveilError(
            f"checkpoint {path} was trained under {under}, a part of the model: audit it with that "
            f"defense, not {defense}"
        )
