"""Many victims in one pass, where the model allows it: the engine, and the trial it must pass first."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Generator, Tensor, nn

from gradveil.core.draws import Draws, given
from gradveil.core.errors import GradveilError, one_line
from gradveil.core.gradients import Gradients, Loss, check_victims, gradient, trainable
from gradveil.core.obstacles import obstacle
from gradveil.core.products import Aim, Pair
from gradveil.core.taps import Pass, collect, compare, forward


class NotBatchableError(GradveilError):
    """The model's victims cannot share a pass; the plain loop still works."""


class BatchedGradients:
    """Built once for a model and a loss, then called with images (victims, batch, ...) and labels (victims, batch[, classes]).

    The first call tries it out on two random victims, against plain autograd. `why_not` says in one line what stands in the way.
    They have graph and values like those of `loop_gradients`. `short`: on a GPU, products of patches may be taken in bf16, which
    halves the memory they move; such gradients come out as bf16. `told`: the modules whose draws come with each call.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, short: bool = False, told: Collection[str] = ()) -> None:
        self._model, self._loss, self._short, self._told = model, loss, short, frozenset(told)
        self._tried = False
        self._mismatch: str | None = None

    @property
    def why_not(self) -> str | None:
        """Read anew each time, since a model may change its mode; a failed trial is remembered."""
        return obstacle(self._model, self._told) or self._mismatch

    def __call__(self, images: Tensor, labels: Tensor, *, draws: Draws | None = None, differentiable: bool = False) -> Gradients:
        """`draws` are (victims, batch, ...) for each of the modules told."""
        with self._passed(images, labels, draws, differentiable) as done:
            return collect(self._model, done, len(images), differentiable, short=self._short)

    def compare(self, images: Tensor, labels: Tensor, aim: Aim, *, draws: Draws | None = None, differentiable: bool = False) -> Pair:
        """The gradients' inner products with the aim and with themselves, all that a cosine needs."""
        with self._passed(images, labels, draws, differentiable) as done:
            return compare(self._model, done, len(images), differentiable, aim, short=self._short)

    @contextmanager
    def _passed(self, images: Tensor, labels: Tensor, draws: Draws | None, differentiable: bool) -> Iterator[Pass]:
        draws = draws or {}
        if draws.keys() != self._told:
            raise GradveilError(f"draws of {', '.join(draws) or 'nothing'}: expected those of {', '.join(sorted(self._told)) or 'nothing'}")
        self.check(images, labels, draws)
        if not differentiable:
            images, labels, draws = images.detach(), labels.detach(), {name: value.detach() for name, value in draws.items()}
        with torch.enable_grad(), _rows_given(self._model, draws):
            yield forward(self._model, self._loss, images, labels, {n: p.detach() for n, p in self._model.named_parameters()})

    def check(self, images: Tensor, labels: Tensor, draws: Draws | None = None) -> None:
        """Refuse what is no victims, and victims that cannot share a pass. The first call is the trial."""
        check_victims(images, labels)
        if not self._tried and self.why_not is None:
            ends = {name: value.detach()[[0, -1]] for name, value in (draws or {}).items()}
            with _rows_given(self._model, ends):
                self._mismatch = _trial(self._model, self._loss, images, labels)
            self._tried = True
        if (reason := self.why_not) is not None:
            raise NotBatchableError(f"the gradients of these victims cannot be batched: {reason}")


def _rows_given(model: nn.Module, draws: Draws) -> AbstractContextManager[None]:
    """For a pass of all victims' rows at once."""
    return given(model, {name: value.flatten(0, 1) for name, value in draws.items()})


def _trial(model: nn.Module, loss: Loss, images: Tensor, labels: Tensor) -> str | None:
    """What is wrong with batching, seen on two random victims of the same shape, or None.

    Each victim's loss is differentiated by plain autograd in the same pass, so a model that draws random numbers can be tried too.
    """
    first = torch.rand((2, *images.shape[1:]), generator=Generator().manual_seed(0)).to(images)
    ends = labels.detach()[[0, -1]]
    try:
        with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
            done = forward(model, loss, first, ends, dict(model.named_parameters()))
            return _disagreement(model, done, collect(model, done, 2, differentiable=True))
    except Exception as error:
        gradient(model, loss, first[0], ends[0])  # a mistake in the input, not in the batching, shows here
        return f"a trial pass failed with {one_line(error)}"


def _disagreement(model: nn.Module, done: Pass, batched: Gradients) -> str | None:
    parameters = trainable(model)
    # TF32 and half types keep three digits or fewer; a wrong rule is off by as much as the gradient itself.
    exact = done.rows.device.type == "cpu" and done.rows.dtype in (torch.float32, torch.float64)
    tolerance = 1e-3 if exact else 5e-2
    for victim, losses in enumerate(done.losses.chunk(2)):
        targets = [*parameters.values(), done.rows]
        *plain, images = torch.autograd.grad(losses.mean(), targets, retain_graph=True, materialize_grads=True)
        if images.chunk(2)[1 - victim].any():
            return "one row of a batch changes the outcome of another"
        whole = torch.stack([p.norm() for p in plain]).norm()
        for name, expected in zip(parameters, plain, strict=True):
            error = (batched[name][victim] - expected).norm()
            if not error <= tolerance * (expected.norm() + 0.01 * whole):
                return f"the gradient of {name!r} differs from plain autograd's by {float(error / expected.norm()):.1%}"
    return None
