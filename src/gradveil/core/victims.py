"""The gradients of many victims, as fast as the model allows."""

import warnings
from collections.abc import Collection

from torch import Tensor, nn

from gradveil.core.batched import BatchedGradients, NotBatchableError
from gradveil.core.draws import Draws
from gradveil.core.errors import GradveilWarning
from gradveil.core.gradients import Gradients, Loss, loop_gradients
from gradveil.core.products import Aim, Pair


class VictimGradients:
    """Batched where possible; else one victim at a time, after one warning that says why. Keep it: its first call tries the model out."""

    def __init__(self, model: nn.Module, loss: Loss, *, short: bool = False, told: Collection[str] = ()) -> None:
        self._model, self._loss = model, loss
        self._batched = BatchedGradients(model, loss, short=short, told=told)
        self._warned = False

    @property
    def why_not(self) -> str | None:
        """Why the slow way is taken, as far as is known."""
        return self._batched.why_not

    def __call__(self, images: Tensor, labels: Tensor, *, draws: Draws | None = None, differentiable: bool = False) -> Gradients:
        """Of each victim's mean loss: images (victims, batch, ...) give tensors (victims, *parameter shape)."""
        try:
            return self._batched(images, labels, draws=draws, differentiable=differentiable)
        except NotBatchableError as reason:
            self._warn(reason)
        return loop_gradients(self._model, self._loss, images, labels, draws=draws, differentiable=differentiable)

    def compare(self, images: Tensor, labels: Tensor, aim: Aim, *, draws: Draws | None = None, differentiable: bool = False) -> Pair:
        """Their inner products with the aim and with themselves."""
        try:
            return self._batched.compare(images, labels, aim, draws=draws, differentiable=differentiable)
        except NotBatchableError as reason:
            self._warn(reason)
        return aim.pair(loop_gradients(self._model, self._loss, images, labels, draws=draws, differentiable=differentiable))

    def _warn(self, reason: NotBatchableError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{reason}; taking them one at a time, which is slow", GradveilWarning, stacklevel=3)


def victim_gradients(model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, *, differentiable: bool = False) -> Gradients:
    """For a single use; an attack that asks again and again should keep a `VictimGradients`."""
    return VictimGradients(model, loss)(images, labels, differentiable=differentiable)
