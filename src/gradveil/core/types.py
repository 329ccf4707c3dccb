"""The values that travel between the parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits, class indices or class probabilities) -> one value for each sample."""

Gradients = dict[str, Tensor]
"""A tensor for each parameter that requires a gradient, by name, in the order of
`model.named_parameters()`."""

Statistics = dict[str, Tensor]
"""Running means and variances of normalization layers, by the names of the buffers that hold them,
such as `features.1.running_mean`."""


ImageShape = tuple[int, int, int]
"""(C, H, W)."""


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

    statistics: Statistics | None = None
    """The running statistics of the client's normalization layers after its steps, which it sends
    with the weights: (channels,) each."""

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
    "statistics": Meaning(
        "running statistics after the client's steps",
        "running statistics",
        "in train mode with layers that keep running statistics",
    ),
}
"""Also the order of the attacks in a combined one, by the first of these that each needs."""


MOST_STEPS = 100_000  # local steps: each is a pass that an attack has to differentiate


@dataclass(frozen=True)
class Protocol:
    """How a client makes what it shares, which the server knows: it runs the training.

    One step shares a gradient. Several share the difference of the weights before and after them,
    divided by the rate `local_lr`, so that it stands for a sum of gradients. The client makes
    `local_steps` steps of SGD over its whole batch, or goes through the batch `local_epochs` times
    in mini-batches of `local_batch_size` images, with a step for each; the images stay in their
    order, and the last mini-batch of an epoch may be smaller. `client_momentum` and
    `client_weight_decay` are those of torch.optim.SGD. `train_mode`: batch norm uses the batch's
    own statistics, dropout is on. With `averaged_clients` the batch has the images of so many
    clients, in equal parts one after the other; each does all that by itself, and the mean of their
    updates is shared, which is what secure aggregation leaves a server with.
    """

    local_steps: int = 1
    local_lr: float = 0.01
    train_mode: bool = False
    local_epochs: int = 1
    local_batch_size: int | None = None
    client_momentum: float = 0.0
    client_weight_decay: float = 0.0
    averaged_clients: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.averaged_clients < 1:
            raise GradveilError(
                f"averaged clients {self.averaged_clients}: there must be at least 1"
            )
        for name, count in (("steps", self.local_steps), ("epochs", self.local_epochs)):
            if not 1 <= count <= MOST_STEPS:
                raise GradveilError(
                    f"local {name} {count}: there must be at least 1, and at most {MOST_STEPS:,}"
                )
        if self.local_batch_size is not None and self.local_batch_size < 1:
            raise GradveilError(
                f"local batch size {self.local_batch_size}: there must be at least 1 image"
            )
        if self.local_steps > 1 and (self.local_epochs > 1 or self.local_batch_size is not None):
            raise GradveilError(
                f"local steps {self.local_steps} go over the whole batch: give either these, or "
                "local epochs and a local batch size"
            )
        if not 0 < self.local_lr < float("inf"):
            raise GradveilError(
                f"local learning rate {self.local_lr}: it must be above 0 and finite"
            )
        if not 0 <= self.client_momentum < 1:
            raise GradveilError(
                f"client momentum {self.client_momentum}: it must be at least 0 and below 1"
            )
        if not 0 <= self.client_weight_decay < float("inf"):
            raise GradveilError(
                f"client weight decay {self.client_weight_decay}: it must be at least 0 and finite"
            )

    def parts(self, size: int) -> list[slice]:
        """Return the images of a batch of `size` that each step is made with.

        Of several clients, those are its places among the images of each.
        """
        return self._epoch(size) * (self.local_steps * self.local_epochs)

    def first_epoch(self, size: int) -> list[slice]:
        """Return the mini-batches of the first pass over a batch of `size`, of all clients."""
        each, epoch = self._each(size), self._epoch(size)
        return [
            slice(first + part.start, first + part.stop)
            for first in range(0, each * self.averaged_clients, each)
            for part in epoch
        ]

    def steps(self, size: int) -> int:
        """Count the steps that a client makes with a batch of `size` images."""
        each = 1 if self.local_batch_size is None else -(-self._each(size) // self.local_batch_size)
        return each * self.local_steps * self.local_epochs

    def moves(self, size: int) -> bool:
        """Tell whether more is shared of such a batch than its gradient: a run of SGD."""
        several = self.averaged_clients > 1
        return several or self.steps(size) > 1 or self.client_weight_decay > 0

    def _epoch(self, size: int) -> list[slice]:
        """Return the mini-batches of one pass of a client, among its own images."""
        size = self._each(size)
        width = size if self.local_batch_size is None else min(size, self.local_batch_size)
        return [slice(first, min(first + width, size)) for first in range(0, size, width)]

    def _each(self, size: int) -> int:
        """Return how many of a batch's images a client has."""
        return max(1, size // self.averaged_clients)

    def summed(self, size: int) -> float:
        """Return how many gradients an update adds up to: with momentum, steps count repeatedly."""
        steps, momentum = self.steps(size), self.client_momentum
        if not momentum:
            return steps
        return sum((1 - momentum**left) / (1 - momentum) for left in range(1, steps + 1))

    def in_words(self, size: int) -> str:
        """Say how the weights move: `3 local steps with momentum 0.9`."""
        steps = self.steps(size)
        moved = {"momentum": steps > 1 and self.client_momentum}  # the first step has none
        moved |= {"weight decay": self.client_weight_decay}
        words = f"{steps} local step{'s' if steps > 1 else ''}"
        if self.averaged_clients > 1:
            words += f" of each of {self.averaged_clients} clients, averaged"
        said = " and ".join(f"{name} {value:g}" for name, value in moved.items() if value)
        return f"{words} with {said}" if said else words

    def settings(self) -> dict[str, Any]:
        """Return the fields as JSON has them; later ones where they are not at their defaults."""
        always = {"local_steps", "local_lr", "train_mode"}
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name in always or getattr(self, each.name) != each.default
        }


@dataclass(frozen=True, eq=False)
class Observation:
    """What the server sees of one victim. It has no field for the images."""

    model: nn.Module
    loss: Loss
    gradients: Gradients  # one tensor per trainable parameter, the shape of the parameter
    image_shape: ImageShape
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
    """Stack the gradients of many victims of one model, (victims, *parameter shape)."""
    return {
        name: torch.stack([victim.gradients[name] for victim in seen]) for name in seen[0].gradients
    }
