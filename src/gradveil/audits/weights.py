"""The model of an audit: untrained or from a checkpoint, plain or as a defence protects it, and how accurate it is."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradveil.audits.jobs import AuditJob
from gradveil.core.errors import GradveilError
from gradveil.core.files import write_text
from gradveil.core.seeds import following, generator
from gradveil.data import Images
from gradveil.defenses import Defense, PolicyDefense, RandomPolicies, chain, parse
from gradveil.models import build
from gradveil.models.bottleneck import at_rest
from gradveil.models.checkpoints import load_checkpoint, read_settings

MODEL = "model.json"
AT_ONCE = 500
MEASURED = {
    "cpu": 2_000,
    "cuda": 10_000,
}  # images at most, where a checkpoint does not say its accuracy


@dataclass(frozen=True)
class Trained:
    """A checkpoint: its test accuracy, the share of `tested` images, the defence it was trained under, and after how many steps."""

    accuracy: float
    tested: int
    under: str | None
    step: int | None

    @property
    def hits(self) -> int:
        return round(self.accuracy * self.tested)


def find_model(job: AuditJob, split: Images) -> tuple[nn.Module, bool]:
    """The one to be audited, and whether what the defence does to models has been done to it.

    A checkpoint may be of the protected model, trained under the defence, or of the plain one, which is then protected with
    untrained parts.
    """
    plain = untrained(job.model, split, job.seed)
    if job.checkpoint is None:
        return plain, False
    inside = _in_the_model(job.acting)
    if not inside:
        _refuse_protected(job.checkpoint, job.acting)
        return load_checkpoint(job.checkpoint, plain), False
    protected = job.acting.protect_model(plain, (split.channels, split.size, split.size))
    try:
        return load_checkpoint(job.checkpoint, protected), True
    except GradveilError as error:
        try:
            return load_checkpoint(job.checkpoint, plain), False
        except GradveilError:
            raise error from None


def untrained(name: str, split: Images, seed: int) -> nn.Module:
    facts = {"channels": split.channels, "size": split.size, "classes": len(split.classes)}
    return build(name, **facts, mean=split.mean, std=split.std, seed=seed)


def trained(job: AuditJob, test: Images, device: torch.device) -> Trained | None:
    """What the checkpoint's settings say, or what is measured on the test images; None for an untrained model, or one whose
    defence has parts that were not trained with it."""
    if job.checkpoint is None:
        return None
    model, protected = find_model(job, test)
    if _in_the_model(job.acting) and not protected:
        return None
    facts = read_settings(job.checkpoint)
    said = facts.get("test_accuracy")
    if (
        isinstance(said, float)
        and facts.get("data") == job.data
        and facts.get("image_size") in (None, test.size)
    ):
        accuracy, tested = said, len(test)
    else:
        accuracy, tested = measured(
            model.to(device), test, MEASURED.get(device.type, MEASURED["cpu"]), job.seed
        )
    return Trained(accuracy, tested, _trained_under(facts), facts.get("step"))


def measured(model: nn.Module, test: Images, most: int, seed: int = 0) -> tuple[float, int]:
    """On all images, or on this many at even distances. The seed is for a model that draws, as PRECODE's does."""
    chosen = torch.linspace(0, len(test) - 1, min(most, len(test))).round().long()
    device, hits, mode = next(model.parameters()).device, 0, model.training
    model.eval()
    with torch.no_grad(), at_rest(model), following(generator(seed, "test")):
        for some in chosen.split(AT_ONCE):
            answers = model(test.images[some].to(device).float() / 255)
            hits += int(
                (answers[:, : len(test.classes)].argmax(1).cpu() == test.labels[some]).sum()
            )
    model.train(mode)
    return hits / len(chosen), len(chosen)


def save_trained(out: Path, found: Trained | None) -> None:
    write_text(out / MODEL, json.dumps(None if found is None else asdict(found)) + "\n")


def read_trained(out: Path) -> Trained | None:
    try:
        found = json.loads((out / MODEL).read_text())
        return None if found is None else Trained(**found)
    except (OSError, ValueError, TypeError):
        raise GradveilError(
            f"{out / MODEL} is missing or damaged: run the same command again"
        ) from None


def _in_the_model(defense: Defense) -> bool:
    return any(part.acts_on == "model" for part in defense.parts())


def _trained_under(facts: Mapping[str, Any]) -> str | None:
    """As training writes it: a defence, or a policy alone; with augment off, the same without its crop and flip."""
    found = facts.get("defense", "none")
    found = facts.get("policy", facts.get("defense")) if found == "none" else found
    if not isinstance(found, str):
        return None
    parts = parse(found).parts()
    return str(
        chain(parts if facts.get("augment", True) else [_as_they_are(part) for part in parts])
    )


def _as_they_are(part: Defense) -> Defense:
    return (
        replace(part, augment=False) if isinstance(part, PolicyDefense | RandomPolicies) else part
    )


def _refuse_protected(path: Path, defense: Defense) -> None:
    under = _trained_under(read_settings(path))
    if under is not None and _in_the_model(parse(under)):
        raise GradveilError(
            f"checkpoint {path} was trained under {under}, a part of the model: audit it with that defense, not {defense}"
        )
