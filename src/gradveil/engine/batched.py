"""The gradients of many victims in one forward and one backward pass, where the model allows it.

Victims do not interact: in eval mode no rows do, and a batch norm in training mode is given
statistics for each victim. So one pass of all victims' images (`passes`) gives the gradients of
each. `BatchedGradients` makes it, after a trial against plain autograd.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, one_line
from gradveil.core.types import Gradients, Loss
from gradveil.engine.convolutions import is_short, shortened
from gradveil.engine.draws import DROPOUTS, Draws, given, is_dropping
from gradveil.engine.fused import suits
from gradveil.engine.gradients import (
    check_victims,
    copied_buffers,
    first_finite,
    gradient,
    trainable,
)
from gradveil.engine.layers import FORWARDS, RULES, SHORT_TWICE
from gradveil.engine.norms import BATCH_NORMS, Running, is_normalized, takes_statistics
from gradveil.engine.passes import Forwards, Pass, collect, compare, forward
from gradveil.engine.products import Aim, DotAndSquare

ALIKE = 0.9  # cosine below which bf16 is no rounding but a mistake
ALL_DROPOUTS = (*DROPOUTS, nn.AlphaDropout, nn.FeatureAlphaDropout)


class NotBatchableError(GradveilError):
    """The model's victims cannot share a pass; the plain loop still works."""


class BatchedGradients:
    """Gradients of each victim's mean loss, like those of `loop_gradients` in values and graph.

    Build it once for a model and a loss, then call it with images (victims, batch, ...) and labels
    (victims, batch) or (victims, batch, classes). The first call tries it out on two random
    victims; where batching cannot work, a call raises `NotBatchableError`. With `short`, a GPU may
    multiply patches in bf16, which halves the memory they move; such gradients come out as bf16.
    `told` names the modules whose draws come with each call; with `free`, dropout layers may
    draw by themselves. Weights may change between calls, but with `short` not through
    `weight.data.add_` and the like, which torch does not count.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        short: bool = False,
        told: Collection[str] = (),
        free: bool = False,
    ) -> None:
        self._model, self._loss, self._short, self._told = model, loss, short, frozenset(told)
        self._free = free
        self._tried = False
        self._mismatch: str | None = None
        self._forwards = FORWARDS
        self._shortened: dict[str, _Shortened] = {}

    @property
    def why_not(self) -> str | None:
        """The reason, in one line, why victims cannot share a pass; None where none is known.

        It is read anew each time, since a model may change its mode; a failed trial is remembered.
        """
        told = self._told
        if self._free:
            told |= {name for name, module in self._model.named_modules() if is_dropping(module)}
        return obstacle(self._model, told) or self._mismatch

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
        buffers: Mapping[str, Tensor] | None = None,
        running: Running | None = None,
    ) -> Gradients:
        """Return (victims, *parameter shape) by name; `draws` are (victims, batch, ...).

        The pass changes `buffers` and `running` as `passes.forward` says.
        """
        with self._passed(images, labels, draws, differentiable, buffers, running) as done:
            return collect(self._model, done, len(images), differentiable, short=self._short)

    def compare(
        self,
        images: Tensor,
        labels: Tensor,
        aim: Aim,
        *,
        draws: Draws | None = None,
        differentiable: bool = False,
    ) -> DotAndSquare:
        """Return the gradients' inner products with the aim and with themselves, (victims,) each.

        They are all that a cosine needs, and cost less than the gradients.
        """
        with self._passed(images, labels, draws, differentiable) as done:
            return compare(self._model, done, len(images), differentiable, aim, short=self._short)

    def check(self, images: Tensor, labels: Tensor, draws: Draws | None = None) -> None:
        """Refuse images that are no victims, and victims that cannot share a pass.

        The first call makes the trial.
        """
        check_victims(images, labels)
        if not self._tried and self.why_not is None:
            ends = {name: value.detach()[[0, -1]] for name, value in (draws or {}).items()}
            with _rows_given(self._model, ends):
                self._mismatch = _trial(self._model, self._loss, images, labels)
                if self._short and self._mismatch is None and suits(images):
                    frozen = self._frozen(short=True)
                    if _can_be_short(self._model, self._loss, images, labels, frozen):
                        self._forwards = SHORT_TWICE
            self._tried = True
        if (reason := self.why_not) is not None:
            raise NotBatchableError(f"the gradients of these victims cannot be batched: {reason}")

    def inputs(
        self,
        images: Tensor,
        labels: Tensor,
        layers: Sequence[nn.Module],
        *,
        differentiable: bool = False,
    ) -> list[Tensor]:
        """Return what goes into each of these layers at its last use, (victims, batch, ...).

        They are layers with trainable parameters, whose gradients can be made.
        """
        with self._passed(images, labels, None, differentiable) as done:
            made = {tap.layer: tap.inputs for tap in done.taps}
        found = [made[layer].unflatten(0, images.shape[:2]) for layer in layers]
        return found if differentiable else [each.detach() for each in found]

    def watch(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        differentiable: bool,
        running: Running,
    ) -> None:
        """Update `running` by a pass; no gradients are made."""
        with self._passed(images, labels, None, differentiable, None, running):
            pass

    @contextmanager
    def _passed(
        self,
        images: Tensor,
        labels: Tensor,
        draws: Draws | None,
        differentiable: bool,
        buffers: Mapping[str, Tensor] | None = None,
        running: Running | None = None,
    ) -> Iterator[Pass]:
        """Make the forward pass; the draws stay handed in while the context lasts."""
        draws = draws or {}
        if draws.keys() != self._told:
            raise GradveilError(
                f"draws of {', '.join(draws) or 'nothing'}: "
                f"expected those of {', '.join(sorted(self._told)) or 'nothing'}"
            )
        self.check(images, labels, draws)
        if not differentiable:
            images, labels = images.detach(), labels.detach()
            draws = {name: value.detach() for name, value in draws.items()}
        frozen = self._frozen(short=self._forwards is SHORT_TWICE)
        with torch.enable_grad(), _rows_given(self._model, draws):
            yield forward(
                self._model,
                self._loss,
                images,
                labels,
                frozen,
                self._forwards,
                buffers=buffers,
                running=running,
            )

    def _frozen(self, *, short: bool) -> dict[str, Tensor]:
        """Return the parameters, detached: nobody needs the gradients summed over all victims.

        For a short pass the weights of convolutions are given in its format, made anew only when
        they have changed.
        """
        found = detached(self._model)
        if not short:
            return found
        for prefix, module in self._model.named_modules():
            name = f"{prefix}.weight" if prefix else "weight"
            if type(module) is not nn.Conv2d or not is_short(module) or name not in found:
                continue
            kept = self._shortened.get(name)
            if kept is None or not kept.is_of(found[name]):
                kept = self._shortened[name] = _Shortened(found[name])
            found[name] = kept.value
        return found


class _Shortened:
    """A weight in bf16, and what it was made of, whose memory nothing else can take meanwhile."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._version = weight, weight._version
        self.value = shortened(weight)

    def is_of(self, weight: Tensor) -> bool:
        """Tell whether it was made of this weight as it is now."""
        return (
            weight.data_ptr() == self._weight.data_ptr()
            and weight.stride() == self._weight.stride()
            and weight.device == self._weight.device
            and weight._version == self._version
        )


def detached(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name, detached: no gradients are summed over all victims."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def obstacle(model: nn.Module, told: Collection[str] = ()) -> str | None:
    """Name, in one line, the first module that prevents batching, and why; None without any.

    The modules in `told` do not draw themselves, since their draws are handed in.
    """
    for name, module in model.named_modules():
        reason = None if name in told else _reason(module)
        if reason is not None:
            return f"{name or 'the model'} ({type(module).__name__}) {reason}"
    return None


def _reason(module: nn.Module) -> str | None:
    # Torch has no public way to ask whether a module has hooks.
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return "has hooks of its own, which may not treat rows alike"
    if isinstance(module, BATCH_NORMS) and takes_statistics(module) and not is_normalized(module):
        return "takes its statistics from the batch, and there is no rule for its type"
    if isinstance(module, ALL_DROPOUTS) and module.training and module.p > 0:
        return "is in training mode: dropout is on; model.eval() would allow it"
    return None if type(module) in RULES else _without_rule(module)


def _without_rule(module: nn.Module) -> str | None:
    """Name a parameter for which there is no way to a gradient for each victim.

    A parameter (1, ...) can be copied for each row; other shapes do not say how they meet the rows.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and (parameter.dim() < 2 or len(parameter) != 1):
            return f"holds {name!r} of shape {tuple(parameter.shape)}, for which there is no rule"
    return None


def _rows_given(model: nn.Module, draws: Draws) -> AbstractContextManager[None]:
    """Hand in (victims, batch, ...) draws for a pass of all victims' rows at once."""
    return given(model, {name: value.flatten(0, 1) for name, value in draws.items()})


def _trial(model: nn.Module, loss: Loss, images: Tensor, labels: Tensor) -> str | None:
    """Say how batching fails on two random victims of the same shape, or return None.

    Plain autograd differentiates each victim's loss in the same pass, so a model that draws random
    numbers can be tried too.
    """
    ends, made = labels.detach()[[0, -1]], list[tuple[Pass, dict[str, Tensor]]]()

    def passed(guess: Tensor) -> tuple[Tensor]:
        buffers = copied_buffers(model)
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        made.append((forward(model, loss, guess, ends, parameters, buffers=buffers), buffers))
        return (made[-1][0].losses,)

    try:
        with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
            first_finite(passed, images.new_empty(2, *images.shape[1:]))
            done, buffers = made[-1]
            for name, was in model.named_buffers():
                if name in buffers and not torch.equal(buffers[name], was):
                    return f"a pass changes its buffer {name!r}, which all rows would share"
            return _disagreement(model, done, collect(model, done, 2, differentiable=True))
    except Exception as error:
        # This shows a mistake in the input, not in batching.
        gradient(model, loss, images.detach()[0], ends[0])
        return f"a trial pass failed with {one_line(error)}"


def _can_be_short(
    model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, frozen: dict[str, Tensor]
) -> bool:
    """Tell whether bf16 between the layers gives the gradients of two random victims, and slopes.

    `frozen` are the parameters of the short pass. A model's own code may not take that format.
    """
    like = images.new_empty(2, *images.shape[1:])

    def tried(first: Tensor, forwards: Forwards, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            guess = first.clone().requires_grad_()
            done = forward(model, loss, guess, labels.detach()[[0, -1]], given, forwards)
            gradients = collect(model, done, 2, differentiable=True, short=True)
            flat = torch.cat([part.float().flatten(1) for part in gradients.values()], dim=1)
            (slope,) = torch.autograd.grad(flat.square().sum(), guess)
        return flat.detach(), slope.flatten(1)

    try:
        plain = partial(tried, forwards=FORWARDS, given=detached(model))
        exact, first = first_finite(plain, like)
        return are_alike(exact, tried(first, SHORT_TWICE, frozen))
    except Exception:
        return False


def are_alike(plain: Sequence[Tensor], short: Sequence[Tensor]) -> bool:
    """Tell whether values and slopes, (victims, numbers) each, differ by no more than rounding."""
    alike = [
        torch.cosine_similarity(exact, rounded, dim=1).min()
        for exact, rounded in zip(plain, short, strict=True)
    ]
    return bool(torch.stack(alike).min() > ALIKE)


def _disagreement(model: nn.Module, done: Pass, batched: Gradients) -> str | None:
    """Say where the batched gradients of two victims differ from plain autograd's, or None."""
    parameters = trainable(model)
    # TF32 and half types keep three digits or fewer; a wrong rule is off by the whole gradient.
    exact = done.rows.device.type == "cpu" and done.rows.dtype in (torch.float32, torch.float64)
    tolerance = 1e-3 if exact else 5e-2
    for victim, losses in enumerate(done.losses.chunk(2)):
        targets = [*parameters.values(), done.rows]
        *plain, images = torch.autograd.grad(
            losses.mean(), targets, retain_graph=True, materialize_grads=True
        )
        if images.chunk(2)[1 - victim].any():
            return "one row of a batch changes the outcome of another"
        whole = torch.stack([p.norm() for p in plain]).norm()
        for name, expected in zip(parameters, plain, strict=True):
            error = (batched[name][victim] - expected).norm()
            if not error <= tolerance * (expected.norm() + 0.01 * whole):
                share = float(error / expected.norm())
                return f"the gradient of {name!r} differs from plain autograd's by {share:.1%}"
    return None
