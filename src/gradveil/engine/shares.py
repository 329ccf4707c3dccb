"""The update a client shares, as a function of its images.

The client calls it on the true images, an attacker on a guess. `Shares` is that function for a
protocol of one step (a gradient) or several (`local.LocalUpdates`), for many victims at once where
the model allows it, else for one victim at a time after a warning.
"""

import warnings
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.importing import RAISED
from gradveil.core.seeds import forked
from gradveil.core.types import Gradients, ImageShape, Loss, Protocol, Statistics
from gradveil.engine.batched import BatchedGradients, NotBatchableError
from gradveil.engine.draws import Draws
from gradveil.engine.gradients import check_victims, in_mode, loop_gradients, loop_inputs, try_pass
from gradveil.engine.local import LocalUpdates, mean_of_clients
from gradveil.engine.norms import Running, mixes_rows
from gradveil.engine.products import Aim, DotAndSquare


class Sent(NamedTuple):
    """What each victim sends: (victims, *parameter shape), and running statistics, by name.

    The statistics are (victims, channels); there are none where the model keeps none in its mode.
    """

    gradients: Gradients
    statistics: Statistics


class Shares:
    """What each victim shares: images (victims, batch, ...) give (victims, *parameter shape).

    Build it once for a model, a loss and a protocol: the first call tries the model out. Each call
    puts the model into the protocol's mode, and then each module back into its mode before.
    Without a protocol one step is shared, in the mode the model is in. `short` allows shorter
    number formats on a GPU (see `BatchedGradients`). `told` names the modules whose draws come
    with each call.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        protocol: Protocol | None = None,
        *,
        short: bool = False,
        told: Collection[str] = (),
    ) -> None:
        self._model, self._loss, self._protocol = model, loss, protocol
        self._clients = 1 if protocol is None else protocol.averaged_clients
        self._batched = BatchedGradients(model, loss, short=short, told=told)
        self._watched = BatchedGradients(model, loss, free=True)
        self._told = told
        self._updates = LocalUpdates(model, loss, protocol or Protocol(), short=short)
        self._warned = False
        self._size = 1
        if protocol is not None and protocol.moves(1):
            self._refuse_draws(1)

    @property
    def why_not(self) -> str | None:
        """The reason why victims are taken one at a time, in one line; None where none is known."""
        with self._mode():
            updates = self._updates_of(self._size)
            return self._batched.why_not if updates is None else updates.why_not

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> Gradients:
        """Return (victims, *parameter shape) by name.

        Labels are (victims, batch), or class probabilities (victims, batch, classes); draws are
        (victims, batch, ...).
        """
        return self._share(images, labels, draws, differentiable, None)

    def send(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> Sent:
        """Return the same with the running statistics that each victim ends with."""
        with self._mode():
            running = Running(self._model, len(images) * self._clients)
        found = self._share(images, labels, draws, differentiable, running)
        return Sent(found, self._kept(running, differentiable))

    def statistics(
        self, images: Tensor, labels: Tensor, *, differentiable: bool = False
    ) -> Statistics:
        """Return the running statistics alone: for one step, no gradient is made.

        Layers that draw do so by themselves.
        """
        check_victims(images, labels)
        with self._mode():
            running = Running(self._model, len(images) * self._clients)
            follow: dict[str, Any] = {"differentiable": differentiable, "running": running}
            if self._protocol is not None and self._protocol.moves(images.shape[1]):
                self._updates(images, labels, **follow)
            else:
                try:
                    self._watched.watch(images, labels, **follow)
                except NotBatchableError as reason:
                    self._warn(reason)
                    self._loop(images, labels, None, **follow)
        return self._kept(running, differentiable)

    def inputs(
        self,
        images: Tensor,
        labels: Tensor,
        layers: Sequence[nn.Module],
        *,
        differentiable: bool = False,
    ) -> list[Tensor]:
        """Return what goes into each of these layers at its last use, (victims, batch, ...).

        It is so with the weights before the first step. Where a layer mixes images, as batch norm
        does in training mode, each mini-batch goes by itself.
        """
        check_victims(images, labels)
        whole = [slice(0, images.shape[1])]
        apart = whole if self._protocol is None else self._protocol.first_epoch(images.shape[1])
        with self._mode():
            parts = apart if mixes_rows(self._model) else whole
            try:
                found = [
                    self._watched.inputs(
                        images[:, part], labels[:, part], layers, differentiable=differentiable
                    )
                    for part in parts
                ]
            except NotBatchableError as reason:  # a layer of any kind may mix images
                self._warn(reason)
                with torch.set_grad_enabled(differentiable):
                    found = [loop_inputs(self._model, images[:, part], layers) for part in apart]
        return [torch.cat(each, 1) for each in zip(*found, strict=True)]

    def _share(
        self,
        images: Tensor,
        labels: Tensor,
        draws: Draws | None,
        differentiable: bool,
        running: Running | None,
    ) -> Gradients:
        check_victims(images, labels)
        self._size = images.shape[1]
        with self._mode():
            if (updates := self._updates_of(self._size)) is not None:
                return updates(images, labels, differentiable=differentiable, running=running)
            try:
                return self._batched(
                    images, labels, draws=draws, differentiable=differentiable, running=running
                )
            except NotBatchableError as reason:
                self._warn(reason)
            return self._loop(images, labels, draws, differentiable, running)

    def compare(
        self,
        images: Tensor,
        labels: Tensor,
        aim: Aim,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> DotAndSquare:
        """Return the shares' inner products with the aim and with themselves, (victims,) each.

        They are all that a cosine needs.
        """
        check_victims(images, labels)
        self._size = images.shape[1]
        if self._updates_of(self._size) is not None:
            return aim.pair(self(images, labels, differentiable=differentiable))
        with self._mode():
            try:
                return self._batched.compare(
                    images, labels, aim, draws=draws, differentiable=differentiable
                )
            except NotBatchableError as reason:
                self._warn(reason)
            return aim.pair(self._loop(images, labels, draws, differentiable, None))

    def check(self, images: Tensor, classes: int) -> None:
        """Refuse a model that does not turn a batch of such images into a logit for each class.

        The smallest mini-batch of the protocol has to do as well.
        """
        few = len(images) if self._protocol is None else _smallest(self._protocol, len(images))
        if few < len(images):
            self.check(images[:few], classes)
        taken = f"{type(self._model).__name__} and images of shape {tuple(images.shape)}"
        with self._mode():
            logits = try_pass(self._model, images, f"{taken} do not fit")
        if logits.shape != (len(images), classes):
            raise GradveilError(
                f"{taken}: the model gave shape {tuple(logits.shape)}; expected "
                f"{(len(images), classes)}, one logit for each of {classes} classes"
            )

    def _mode(self) -> AbstractContextManager[None]:
        if self._protocol is None:
            return nullcontext()
        return in_mode(self._model, self._protocol.train_mode)

    def _kept(self, running: Running, differentiable: bool) -> Statistics:
        found = mean_of_clients(running.values(), self._clients)
        return found if differentiable else {name: value.detach() for name, value in found.items()}

    def steps(self, size: int) -> int:
        """Count the passes that a client makes with so many images."""
        return 1 if self._protocol is None else self._protocol.steps(size)

    def _updates_of(self, size: int) -> LocalUpdates | None:
        """Return the steps of a client with so many images; None where it shares a gradient."""
        if self._protocol is None or not self._protocol.moves(size):
            return None
        self._refuse_draws(size)
        return self._updates

    def _refuse_draws(self, size: int) -> None:
        if self._told:
            assert self._protocol is not None
            raise GradveilError(
                f"{self._protocol.steps(size)} local steps draw anew at each: "
                "draws can be given for 1 step alone"
            )

    def _loop(
        self,
        images: Tensor,
        labels: Tensor,
        draws: Draws | None,
        differentiable: bool,
        running: Running | None,
    ) -> Gradients:
        return loop_gradients(
            self._model,
            self._loss,
            images,
            labels,
            draws=draws,
            differentiable=differentiable,
            running=running,
        )

    def _warn(self, reason: NotBatchableError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{reason}; taking them one at a time, which is slow", GradveilWarning, stacklevel=3
            )


ROWS = 8  # images at most of a pass that shows whether they are mixed


def as_one_client(
    protocol: Protocol, model: nn.Module, size: int, image_shape: ImageShape
) -> Protocol:
    """Return the protocol of one client with all images where that shares the same as several.

    It does where each shares a gradient, and no layer mixes the images of a batch.
    """
    one, each = replace(protocol, averaged_clients=1), max(1, size // protocol.averaged_clients)
    if protocol == one or one.moves(each):
        return protocol
    with in_mode(model, protocol.train_mode):
        return protocol if _mixes(model, min(max(size, 3), ROWS), image_shape) else one


def _mixes(model: nn.Module, rows: int, image_shape: ImageShape) -> bool:
    """Tell whether the images of a batch are mixed in the model's present mode, by any layer.

    Of random images all but one in the middle are replaced by others, with the same draws: where
    its answer changes, or no pass is possible, they count as mixed. The first and the last may
    change others without being changed, as in sums over all images so far.
    """
    if mixes_rows(model):
        return True
    example = next(model.parameters(), torch.zeros(()))
    rng, middle = Generator().manual_seed(0), rows // 2
    try:
        one, *others = torch.rand(2 * rows - 1, *image_shape, generator=rng).to(example)
        answers: list[Tensor] = []
        with torch.no_grad(), forked():
            for some in (others[: rows - 1], others[rows - 1 :]):
                torch.manual_seed(0)
                batch = torch.stack([*some[:middle], one, *some[middle:]])
                buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
                answers.append(functional_call(model, buffers, (batch,))[middle])
        here, there = answers
        return not torch.allclose(here, there, rtol=1e-4, atol=1e-6 * float(here.abs().max()))
    except RAISED:  # the model may be anyone's, and is refused where it is attacked
        return True


def _smallest(protocol: Protocol, size: int) -> int:
    return min(len(range(size)[part]) for part in protocol.parts(size))
