"""Weights from a checkpoint for a client's model, plain or as its defense protects it."""

from pathlib import Path

from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.defenses.base import Defense
from gradveil.models.checkpoints import load_checkpoint, read_settings


def load_weights(
    path: Path, model: nn.Module, defense: Defense, image_shape: tuple[int, int, int]
) -> tuple[nn.Module, bool]:
    """Load a checkpoint; return the model, and whether the defense's own layers are in it.

    A checkpoint may be that of the protected model, trained under the defense, or that of the plain
    one, which the client then protects with untrained layers.
    """
    if any(part.acts_on == "model" for part in defense.parts()):
        try:
            return load_checkpoint(path, defense.protect_model(model, image_shape)), True
        except GradveilError as error:
            try:
                return load_checkpoint(path, model), False
            except GradveilError:
                raise error from None
    try:
        return load_checkpoint(path, model), False
    except GradveilError:
        under = read_settings(path).get("defense", "none") if path.is_file() else "none"
        if under in ("none", str(defense)):
            raise
        raise GradveilError(
            f"checkpoint {path} was trained under {under}, a part of the model: "
            f"take that defense, not {defense}"
        ) from None
