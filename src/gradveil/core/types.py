"""The values that travel between the parts."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.gradients import Gradients, Loss


@dataclass(frozen=True)
class Batch:
    """Images as NCHW floats in [0, 1] (normalization lives in the model) and one class index for each."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Knowledge:
    """What the attacker knows beyond the model and what was shared. None: unknown."""

    labels: Tensor | None = None  # one class index for each image of the victim

    def need(self, *names: str, by: str) -> None:
        """Refuse when something the attack cannot do without is unknown."""
        absent = [name for name in names if getattr(self, name) is None]
        if absent:
            raise GradveilError(
                f"attack {by} needs to know the {' and the '.join(absent)}: give them, or choose an attack that infers them"
            )


@dataclass(frozen=True)
class Protocol:
    """How a client makes what it shares, which the server knows: it runs the training.

    One step shares a gradient. Several share the difference of the weights after `local_steps` steps of plain SGD over the whole
    batch with rate `local_lr`, divided by that rate, so that it stands for a sum of gradients. `train_mode`: batch norm uses
    the batch's own statistics, dropout is on.
    """

    local_steps: int = 1
    local_lr: float = 0.01
    train_mode: bool = False

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise GradveilError(f"local steps {self.local_steps}: there must be at least 1")
        if not 0 < self.local_lr < float("inf"):
            raise GradveilError(f"local learning rate {self.local_lr}: it must be above 0 and finite")


@dataclass(frozen=True, eq=False)
class Observation:
    """What the server sees of one victim. It has no field for the images."""

    model: nn.Module
    loss: Loss
    gradients: Gradients  # one tensor per trainable parameter, the shape of the parameter
    image_shape: tuple[int, int, int]
    size: int  # images in the victim's batch
    classes: int
    protocol: Protocol = field(default_factory=Protocol)
    knowledge: Knowledge = field(default_factory=Knowledge)


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What an attack found of one victim: images (size, C, H, W) in [0, 1], labels (size,) used or inferred.

    `distance` is that between its gradient and the observed one, all that an attacker has to judge by; infinite where the attack
    diverged, and `status` says so. `frames` are the images after some of the iterations, `frame_steps`.
    """

    images: Tensor
    labels: Tensor | None
    distance: float
    status: str = "ok"
    frames: Tensor | None = None  # (frames, size, C, H, W)
    frame_steps: tuple[int, ...] = ()


def stacked(seen: list[Observation]) -> dict[str, Tensor]:
    """The gradients of many victims of one model, (victims, *parameter shape)."""
    return {name: torch.stack([one.gradients[name] for one in seen]) for name in seen[0].gradients}
