"""The values that travel between the parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits, class indices or class probabilities) -> one value for each sample."""

Gradients = dict[str, Tensor]
"""A tensor for each parameter that requires a gradient, by name, in the order of
`model.named_parameters()`."""


@dataclass(frozen=True)
class Batch:
    """Images as NCHW floats in [0, 1] and a class index for each; the model normalizes."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What the attacker knows beyond the model and what was shared. None: unknown."""

    labels: Tensor | None = None
    """A class index for each image of the victim."""

    transform: Callable[[Tensor], Tensor] | None = None
    """Pixel images as the client changed them, its draws known; differentiable."""

    policy: Callable[[Tensor, Generator], Tensor] | None = None
    """The same with new draws at each call: those of the client are unknown."""

    means: Tensor | None = None
    """The class means of public data, (classes, C, H, W)."""

    random_layers: tuple[str, ...] | None = None
    """Patterns of parameters whose gradients depend on what the model draws."""

    defended_layers: tuple[str, ...] | None = None
    """Patterns of parameters whose gradients the defense changed."""

    pruned: bool | None = None
    """Zeros in the shared gradient are cut off, not measured."""

    noise: tuple[str, float] | None = None
    """Noise on the shared gradient: "gaussian" or "laplacian", and its scale."""

    train_masks: bool | None = None
    """Dropout was on; its masks are unknown."""

    earlier: tuple[Gradients, ...] | None = None
    """Shared of the same batch in the rounds before, what was cut off being fed back."""

    momentum: float | None = None
    """The momentum of that feedback (deep gradient compression); None counts as 0."""

    def need(self, *names: str, by: str) -> None:
        """Refuse when something that the attack cannot do without is unknown."""
        absent = [
            f"{name} ({MEANINGS[name].long})" if name in MEANINGS else name
            for name in names
            if getattr(self, name) is None
        ]
        if absent:
            raise GradveilError(
                f"attack {by} needs to know the {' and the '.join(absent)}: give them, or choose "
                "an attack that does without or infers them"
            )


class Meaning(NamedTuple):
    """Words for a field of `Knowledge`: in an error, in a table, and where it is known."""

    long: str
    short: str
    where: str = ""  # known beside, or only at, the defenses whose breakers need it


MEANINGS = {
    "transform": Meaning(
        "what the client made of its images, draws included", "policy and its draws"
    ),
    "policy": Meaning("the policy in use", "policy"),
    "means": Meaning("class means of public data", "class means"),
    "random_layers": Meaning(
        "which gradients depend on the model's own draws",
        "random layers",
        "or where the model draws by itself, such as dropout layers in train mode",
    ),
    "train_masks": Meaning(
        "whether dropout was on", "dropout is on", "or in train mode with dropout layers"
    ),
    "earlier": Meaning(
        "what the client shared in the rounds before",
        "earlier rounds",
        "where nothing after it clips, prunes or adds noise",
    ),
    "pruned": Meaning(
        "whether zeros were cut off", "what is pruned", "where no noise is added after it"
    ),
    "noise": Meaning("kind and scale of the noise", "noise"),
    "defended_layers": Meaning("which gradients the defense changed", "defended layers"),
}
"""Also the order of the attacks in a combined one, by the first of these that each needs."""


MOST_STEPS = 100_000  # local steps: each is a pass that an attack has to differentiate


@dataclass(frozen=True)
class Protocol:
    """How a client makes what it shares, which the server knows: it runs the training.

    One step shares a gradient. Several share the difference of the weights after `local_steps`
    steps of plain SGD over the whole batch with rate `local_lr`, divided by that rate, so that it
    stands for a sum of gradients. `train_mode`: batch norm uses the batch's own statistics, dropout
    is on.
    """

    local_steps: int = 1
    local_lr: float = 0.01
    train_mode: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.local_steps <= MOST_STEPS:
            raise GradveilError(
                f"local steps {self.local_steps}: there must be at least 1, and at most "
                f"{MOST_STEPS:,}"
            )
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
    """What an attack found of one victim: images (size, C, H, W) in [0, 1] and labels (size,).

    The labels are those used, or inferred. `distance` is that between its gradient and the observed
    one, all that an attacker has to judge by; infinite where the attack diverged, and `status` says
    so. `frames` are the images after some of the iterations, `frame_steps`. `aims_at` says whether
    the images are looked for as the client used them, or as they were before its policy. `draws`
    are what the model drew, where that was looked for too: (size, ...) by the name of the module.
    `certain` are (size,) booleans: which images the attack knows to be exact, without the truth.
    """

    images: Tensor
    labels: Tensor | None
    distance: float
    status: str = "ok"
    frames: Tensor | None = None  # (frames, size, C, H, W)
    frame_steps: tuple[int, ...] = ()
    aims_at: Literal["used", "original"] = "used"
    draws: Mapping[str, Tensor] = field(default_factory=dict)
    certain: Tensor | None = None


def stacked(seen: list[Observation]) -> dict[str, Tensor]:
    """The gradients of many victims of one model, (victims, *parameter shape)."""
    return {name: torch.stack([one.gradients[name] for one in seen]) for name in seen[0].gradients}
