"""The class `Defense`: what a client does to model, loss, batch and gradients before it shares.

A defense is one small frozen dataclass. It declares all that the rest of the package has to know
of it: what it changes, what it tells an attacker, which attacks break it, what it keeps between
rounds. A new one needs no entry elsewhere but a line in the registry, and a user's own not even
that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.types import Batch, Gradients, ImageShape, Knowledge, Loss
from gradveil.engine.draws import Draws
from gradveil.transforms import Preparation

State = object
"""What one client keeps between rounds; None for most defenses."""

Seam = Literal["nothing", "model", "batch", "gradients"]
"""What a defense changes."""

SEAMS: dict[str, Seam] = {
    "protect_model": "model",
    "protect_batch": "batch",
    "protect_gradients": "gradients",
}


@dataclass(frozen=True, eq=False)
class Moment:
    """What gradients were computed from: the protected model and loss, and the batch truly used.

    `draws` are what the model drew in the pass, by module, with a row for each image.
    """

    model: nn.Module
    batch: Batch
    loss: Loss
    draws: Draws = field(default_factory=dict)


@dataclass(frozen=True)
class Defense:
    """Change nothing: the identity, and the base of all others, whose fields are their settings.

    No method changes what it is given. `str` gives the text that `parse` reads.
    """

    name: ClassVar[str] = "none"
    line: ClassVar[str] = "what is shared is left as it is"
    paper: ClassVar[str] = ""
    example: ClassVar[str] = "none"
    use: ClassVar[str] = "as the baseline"  # when to use it
    cost: ClassVar[str] = "none"
    assessed: ClassVar[str | None] = None  # the text of a sensible setting, for an assessment
    first: ClassVar[str | None] = None  # the setting that a value without a name stands for
    acts_on: ClassVar[Seam] = "nothing"  # by default what the methods that are overridden say

    clips: ClassVar[bool] = False
    noisy: ClassVar[bool] = False  # adds noise to the gradients
    prunes: ClassVar[bool] = False  # sets gradients to zero, which others will stand for
    one_step: ClassVar[bool] = False  # defined for one gradient, not for several local steps
    repasses: ClassVar[bool] = False  # passes the batch through the model again

    breakers: ClassVar[tuple[str, ...]] = ()
    """The attacks known to undo it, by name; empty where none is known."""

    strongest: ClassVar[tuple[str, ...]] = ()
    """Which breaker joins those of the other parts in one attack on a chain: the first of these
    that an attacker can be told enough for under that chain."""

    instead: ClassVar[tuple[str | None, ...]] = ()
    """Breakers that the attack on a chain is tried with once more in its stead; None: without."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        changed = [seam for method, seam in SEAMS.items() if method in vars(cls)]
        if "acts_on" in vars(cls) or cls.acts_on != "nothing" or not changed:
            return
        if len(changed) > 1:
            raise GradveilError(
                f"defense class {cls.__name__} changes {' and '.join(changed)}: say which in the "
                "class, such as acts_on = 'gradients', or write a class for each and chain them"
            )
        cls.acts_on = changed[0]

    @classmethod
    def mild(cls) -> "Defense | None":
        """Return a setting at which its breakers are known to work: their positive control.

        None: no such setting is known.
        """
        return None

    @property
    def random(self) -> bool:
        """Whether two shares of one batch differ."""
        return False

    @property
    def scored_on(self) -> tuple[str, ...]:
        """Short digests of the images that a search chose it by: an audit draws none of them."""
        return ()

    @property
    def control(self) -> "Defense | None":
        """What is left of it without what is to protect, to stand beside it in an audit.

        For a policy that is crop and flip alone, for a chain that in place of the policy. None:
        nothing.
        """
        return None

    def protect_model(self, model: nn.Module, image_shape: ImageShape | None = None) -> nn.Module:
        """Return a protected copy, or the model itself where nothing is to be done.

        Some positions in a model can only be found with the shape of an image (C, H, W).
        """
        return model

    def protect_loss(self, loss: Loss) -> Loss:
        """Return the loss of the protected model, which may answer more columns than classes."""
        return loss

    def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Return what the client computes its gradients on, images of the same shape in [0, 1]."""
        return batch

    def start(self) -> State:
        """Return what a client keeps before its first round."""
        return None

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        """Return what is shared, under the same names, and what is kept for the next round."""
        return gradients, state

    def pack_state(self, state: State) -> object:
        """Return what a client keeps in the form that a checkpoint holds.

        That is None, numbers, text, tensors, and lists, tuples and dicts of these. Override this
        and `unpack_state` for a state that is something else.
        """
        if not _is_plain(state):
            raise GradveilError(
                f"defense {self} keeps {kind_of(state)} between rounds, which no "
                f"checkpoint can hold: write pack_state and unpack_state in {type(self).__name__}"
            )
        return state

    def unpack_state(self, packed: Any, device: torch.device) -> State:
        """Return what `pack_state` was given, its tensors on this device."""
        return _moved(packed, device)

    def tell(self, knowledge: Knowledge, model: nn.Module) -> Knowledge:
        """Add what an attacker knows who knows the defense and its settings, but no draw.

        The model is the protected one.
        """
        return knowledge

    def reveal(self, images: Tensor, rng: Generator) -> Callable[[Tensor], Tensor] | None:
        """Return what `protect_batch` does to such images with this generator, draws included.

        The function is differentiable. None: images are left as they are, or there is no such
        function.
        """
        return None

    @property
    def preparation(self) -> Preparation | None:
        """What `protect_batch` does to uint8 images, where it does no more: training is faster
        then. None: it does something else."""
        return None

    def parts(self) -> tuple["Defense", ...]:
        """Return the defenses it is made of, in order; none for one that changes nothing."""
        return () if type(self) is Defense else (self,)

    def changes(self, seam: Seam) -> bool:
        """Return whether a part of this defense acts on the model, the batch or the gradients."""
        return any(part.acts_on == seam for part in self.parts())

    def without_gradients(self) -> "Defense":
        """Return what of it acts before gradients are computed.

        Published evaluations attacked the clean gradient.
        """
        return Defense() if self.acts_on == "gradients" else self

    def without_augmentation(self) -> "Defense":
        """Return the same without random crop and flip."""
        return self

    def conflict(self, earlier: "Defense") -> str | None:
        """Say why it cannot come after the other in a chain; None where it can."""
        if self.acts_on in ("model", "batch") and earlier.acts_on == "gradients":
            changes = "model, which comes" if self.acts_on == "model" else "images, which come"
            return (
                f"{self} changes the {changes} before the gradients that {earlier} changes; "
                "put it first"
            )
        if self.one_step and earlier.acts_on == "gradients":
            return (
                f"{self} starts from the gradients of single samples, so it must come before "
                f"{earlier}"
            )
        if self.clips and earlier.noisy:
            return f"{self} would clip the noise of {earlier} too; clip first"
        return None

    def __str__(self) -> str:
        settings = [
            (each.name, getattr(self, each.name))
            for each in fields(self)
            if getattr(self, each.name) != each.default
        ]
        kind = type(self)
        if not is_built_in(kind):
            given = ", ".join(f"{key}={value!r}" for key, value in settings)
            name = kind.__qualname__.rpartition("<locals>.")[2]
            return f"{kind.__module__}:{name}" + (f"({given})" if given else "")
        written = ",".join(
            _written(value) if key == self.first else f"{key}={_written(value)}"
            for key, value in settings
        )
        return f"{self.name}:{written}" if written else self.name


def is_built_in(kind: type[Defense]) -> bool:
    """Tell whether the class is one of this package; a user's is named by module and class."""
    return kind.__module__.split(".")[0] == __name__.split(".")[0]


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _is_plain(state: object) -> bool:
    if isinstance(state, dict):
        return all(isinstance(key, str | int) for key in state) and _is_plain([*state.values()])
    if isinstance(state, list | tuple):
        return type(state) in (list, tuple) and all(map(_is_plain, state))
    return state is None or isinstance(state, Tensor | int | float | str)


def _moved(packed: Any, device: torch.device) -> Any:
    if isinstance(packed, Tensor):
        return packed.to(device)
    if isinstance(packed, dict):
        return {key: _moved(value, device) for key, value in packed.items()}
    if isinstance(packed, list | tuple):
        return type(packed)(_moved(value, device) for value in packed)
    return packed
