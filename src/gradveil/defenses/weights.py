"""Weights from a checkpoint for a client's model, plain or as its defense protects it."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.core.types import ImageShape
from gradveil.defenses.applied import protected_model
from gradveil.defenses.base import Defense
from gradveil.defenses.chain import THEN
from gradveil.defenses.registry import REGISTRY
from gradveil.models.checkpoints import load_checkpoint, read_settings


def load_weights(
    path: Path, model: nn.Module, defense: Defense, image_shape: ImageShape
) -> tuple[nn.Module, bool]:
    """Load a checkpoint; return the model, and whether the defense's layers are in it.

    A checkpoint may be that of the protected model, trained under the defense, or that of the plain
    one, which the client then protects with untrained layers.
    """
    if not defense.changes("model"):
        _refuse_protected(path, defense)
        return load_checkpoint(path, model), False
    protected = defense.protect_model(model, image_shape)
    try:
        return load_checkpoint(path, protected), True
    except GradveilError as error:
        try:
            return load_checkpoint(path, model), False
        except GradveilError:
            raise error from None


def first_model(
    start: Path | None, model: nn.Module, defense: Defense, image_shape: ImageShape
) -> nn.Module:
    """Return the protected model before its training, with the weights that it starts from."""
    protected = False
    if start is not None:
        model, protected = load_weights(start, model, defense, image_shape)
    return model if protected else protected_model(defense, model, image_shape)


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
            f"checkpoint {path} was trained under {under}, a part of the model: take that "
            f"defense, not {defense}"
        )
