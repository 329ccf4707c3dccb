"""The values that travel between the parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import GradveilError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits, class indices or class probabilities) -> one value for each sample."""

Gradients = dict[str, Tensor]
"""One tensor for each parameter that requires a gradient, by name, in the order of `model.named_parameters()`."""


@dataclass(frozen=True)
class Batch:
    """Images as NCHW floats in [0, 1] (normalization lives in the model) and one class index for each."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What the attacker knows beyond the model and what was shared. None: unknown."""

    labels: Tensor | None = None  # one class index for each image of the victim
    transform: Callable[[Tensor], Tensor] | None = (
        None  # pixel images as the client changed them, its own draws known; differentiable
    )
    policy: Callable[[Tensor, Generator], Tensor] | None = (
        None  # the same with new draws at each call: those of the client are unknown
    )
    means: Tensor | None = None  # (classes, C, H, W): the class means of public data
    random_layers: tuple[str, ...] | None = (
        None  # patterns of parameters whose gradients depend on what the model draws
    )
    defended_layers: tuple[str, ...] | None = (
        None  # patterns of parameters whose gradients the defense changed
    )
    pruned: bool | None = None  # zeros in the shared gradient are cut off, not measured
    noise: tuple[str, float] | None = (
        None  # ("gaussian" or "laplacian", scale), added to the shared gradient
    )
    train_masks: bool | None = None  # dropout was on; its masks are unknown
    earlier: tuple[Gradients, ...] | None = (
        None  # shared of the same batch in the rounds before, what was cut off being fed back
    )
    momentum: float | None = None  # of that feedback (deep gradient compression); None counts as 0

    def need(self, *names: str, by: str) -> None:
        """Refuse when something the attack cannot do without is unknown."""
        absent = [
            f"{name} ({WORDS[name]})" if name in WORDS else name
            for name in names
            if getattr(self, name) is None
        ]
        if absent:
            raise GradveilError(
                f"attack {by} needs to know the {' and the '.join(absent)}: give them, or choose an attack that does without or infers them"
            )


WORDS = {
    "transform": "what the client made of its images, draws included",
    "policy": "the policy in use",
    "means": "class means of public data",
    "random_layers": "which gradients depend on the model's own draws",
    "defended_layers": "which gradients the defense changed",
    "pruned": "whether zeros were cut off",
    "noise": "kind and scale of the noise",
    "train_masks": "whether dropout was on",
    "earlier": "what the client shared in the rounds before",
}


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
            raise GradveilError(
                f"local learning rate {self.local_lr}: it must be above 0 and finite"
            )


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
    diverged, and `status` says so. `frames` are the images after some of the iterations, `frame_steps`. `aims_at` says whether the
    images are looked for as the client used them, or as they were before its policy. `draws` are what the model drew, where that
    was looked for too: (size, ...) by the name of the module.
    """

    images: Tensor
    labels: Tensor | None
    distance: float
    status: str = "ok"
    frames: Tensor | None = None  # (frames, size, C, H, W)
    frame_steps: tuple[int, ...] = ()
    aims_at: Literal["used", "original"] = "used"
    draws: Mapping[str, Tensor] = field(default_factory=dict)


def stacked(seen: list[Observation]) -> dict[str, Tensor]:
    """The gradients of many victims of one model, (victims, *parameter shape)."""
    return {name: torch.stack([one.gradients[name] for one in seen]) for name in seen[0].gradients}
