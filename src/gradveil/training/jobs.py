"""What a training run is asked for, and what it gives."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError, unknown
from gradveil.training.recipe import Recipe
from gradveil.transforms import Policy, Preparation

PRECISIONS = ("auto", "32", "bf16")


@dataclass(frozen=True)
class Job:
    """Everything that decides the result of a training run."""

    data: str
    model: str
    recipe: Recipe = field(default_factory=Recipe)
    policy: Policy = field(default_factory=Policy)
    augment: bool = True
    fraction: float = 1.0
    image_size: int | None = None
    save_at: tuple[int, ...] = ()
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if any(step < 0 for step in self.save_at):
            raise GradveilError(f"save-at {min(self.save_at)}: steps are counted from 0, the untrained model")

    def settings(self) -> dict[str, Any]:
        """As plain values, for the JSON files."""
        plain = asdict(self)
        recipe: dict[str, Any] = plain.pop("recipe")
        return plain | recipe | {"policy": str(self.policy), "save_at": sorted(self.save_at)}

    def preparation(self) -> Preparation:
        return Preparation(policy=self.policy) if self.augment else Preparation(padding=0, flip=False, policy=self.policy)

    def steps(self, images: int) -> int:
        """Of the whole training on this many images; a `save_at` beyond them is an error."""
        steps = -(-images // self.recipe.batch_size) * self.recipe.epochs
        if self.save_at and max(self.save_at) > steps:
            raise GradveilError(f"save-at {max(self.save_at)}: this training has {steps} steps")
        return steps


@dataclass(frozen=True)
class Trained:
    """What a run gave, and where it is."""

    out: Path
    checkpoint: Path
    accuracy: float
    epochs: int
    steps: int
    history: tuple[Mapping[str, float], ...]
