"""The values that travel between the parts: batches, observations, reconstructions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import GradveilError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits, class indices or class probabilities) -> a value for each sample, (batch,)."""

Gradients = dict[str, Tensor]
"""A tensor for each parameter that requires a gradient, by name, in the model's order."""


@dataclass(frozen=True)
class Batch:
    """Images as floats (N, C, H, W) in [0, 1], and a class index for each, (N,).

    Normalization lives in the model.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The facts an attacker has beyond the model and the shared gradient; None is unknown.

    labels: a class index for each image of the victim, (size,).
    transform: changes pixel images as the client did, with its draws; differentiable.
    policy: the same with new draws at each call, where those of the client are unknown.
    means: the class means of public data, (classes, C, H, W).
    random_layers: patterns of parameters whose gradients depend on the model's draws.
    defended_layers: patterns of parameters whose gradients the defense changed.
    pruned: whether zeros in the shared gradient are cut off, not measured.
    noise: ("gaussian" or "laplacian", scale), added to the shared gradient.
    train_masks: whether dropout was on; its masks are unknown.
    earlier: the gradients shared of the same batch in the rounds before, where the client feeds
        back the entries that were cut off.
    momentum: that of this feedback (deep gradient compression); None counts as 0.
    """

    labels: Tensor | None = None
    transform: Callable[[Tensor], Tensor] | None = None
    policy: Callable[[Tensor, Generator], Tensor] | None = None
    means: Tensor | None = None
    random_layers: tuple[str, ...] | None = None
    defended_layers: tuple[str, ...] | None = None
    pruned: bool | None = None
    noise: tuple[str, float] | None = None
    train_masks: bool | None = None
    earlier: tuple[Gradients, ...] | None = None
    momentum: float | None = None

    def need(self, *names: str, by: str) -> None:
        """Refuse where a fact that the attack `by` cannot do without is unknown."""
        absent = [
            f"{name} ({WORDS[name]})" if name in WORDS else name
            for name in names
            if getattr(self, name) is None
        ]
        if absent:
            raise GradveilError(
                f"attack {by} needs to know the {' and the '.join(absent)}: "
                "give them, or choose an attack that does without or infers them"
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
    """How a client makes its update, which the server knows, since it runs the training.

    One step shares a gradient. Several share the difference of the weights after `local_steps`
    steps of plain SGD over the whole batch with rate `local_lr`, divided by that rate, so that it
    stands for a sum of gradients. In `train_mode` batch norm uses the batch's statistics, and
    dropout is on.
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
    """All that the server sees of a victim. It has no field for the images."""

    model: nn.Module
    loss: Loss
    gradients: Gradients  # of the shape of the parameters
    image_shape: tuple[int, int, int]
    size: int  # images in the victim's batch
    classes: int
    protocol: Protocol = field(default_factory=Protocol)
    knowledge: Knowledge = field(default_factory=Knowledge)


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The images (size, C, H, W) in [0, 1] that an attack found, and the labels (size,) it used.

    `distance` lies between their gradient and the observed one; an attacker has nothing else to
    judge by. It is infinite where the attack diverged, and `status` says so. `frames` are the
    images after the iterations `frame_steps`. `aims_at` says whether the attack looks for the
    images as the client used them, or as they were before its policy. `draws` are the model's
    draws, where the attack looks for them too: (size, ...) by the name of the module.
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
    """Stack the gradients of many victims of one model: (victims, *parameter shape) by name."""
    names = seen[0].gradients
    return {name: torch.stack([victim.gradients[name] for victim in seen]) for name in names}
