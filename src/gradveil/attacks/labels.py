"""How an attack gets the labels: told, read off the last layer's gradient, or optimized along.

Inference rests on the bias gradient of the last layer, db_c = mean over the batch of
(p_c - [y = c]): only the classes present pull it below the mean probability. Without a bias, the
row sums of the weight gradient take its place, which are db_c times the sum of the features. That
needs features whose sum is positive and similar for all images, as after a ReLU or a sigmoid.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import following
from gradveil.core.types import Gradients, Observation
from gradveil.engine.calls import before_use
from gradveil.engine.gradients import in_mode, per_sample, with_slope


@dataclass(frozen=True)
class LabelFinder(ABC):
    """A way to get the victims' labels."""

    optimized: ClassVar[bool] = False
    """Whether the labels are variables of the search, given as logits."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the `Knowledge` fields without which it cannot run."""
        return ()

    @abstractmethod
    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Tensor:
        """Return class indices (victims x restarts, B), or logits (..., classes) to optimize."""


@dataclass(frozen=True)
class Known(LabelFinder):
    """The attacker is told the labels."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("labels",)

    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Tensor:
        return torch.stack([_told(victim) for victim in seen]).repeat_interleave(restarts, 0)


@dataclass(frozen=True)
class SingleLabel(LabelFinder):
    """Find the label of a batch of one image (iDLG, Zhao et al. 2020).

    p_c - [y = c] is negative for the true class alone. The smallest entry is chosen, which is still
    the best guess where a defense left several negative entries, or none.
    """

    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Tensor:
        for victim in seen:
            if victim.size != 1:
                raise GradveilError(
                    f"batch of {victim.size}: SingleLabel reads the label of one image; "
                    "use Counted or give the labels"
                )
        pulls, _ = _pulls(seen, last_layer(seen[0]))
        return pulls.argmin(1, keepdim=True).repeat_interleave(restarts, 0)


@dataclass(frozen=True)
class Counted(LabelFinder):
    """Find the labels of a batch of any size, repeated labels included.

    Class c occurs n_c = B (pbar_c - db_c) times, with pbar the mean probability over the batch. The
    attacker has no data, so it estimates pbar on `probes` images of uniform noise. Then, B times,
    the class with the largest n_c is taken and its n_c lowered by 1. Labels come sorted: the
    gradient does not tell which image has which. Several local steps are treated as their mean,
    which is an approximation, since the weights move between them.
    """

    probes: int = 64

    def __post_init__(self) -> None:
        if self.probes < 1:
            raise GradveilError(f"probes {self.probes}: Counted needs at least 1 noise image")

    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Tensor:
        size, protocol = seen[0].size, seen[0].protocol
        summed = protocol.summed(size)
        layer = last_layer(seen[0])
        pulls, biased = _pulls(seen, layer)
        probed = (
            seen if protocol.steps(size) > 1 else seen[:1]
        )  # after a step, weights differ between victims
        each = [_expect(victim, layer, self.probes, rng) for victim in probed]
        absent, drop, features = (
            torch.stack([getattr(expected, name) for expected in each])
            for name in ("absent", "drop", "features")
        )
        means = pulls / summed if biased else pulls / summed / features
        counts = size * (absent - means) / drop
        return _take_largest(counts, size).repeat_interleave(restarts, 0)


@dataclass(frozen=True)
class Joint(LabelFinder):
    """Optimize labels along with the images, as the softmax of logits (DLG, Zhu et al. 2019).

    The logits start as N(0, 1), drawn row by row, so that a row does not depend on the next ones.
    """

    optimized: ClassVar[bool] = True

    def bind(self, seen: Sequence[Observation], rng: Generator, restarts: int = 1) -> Tensor:
        shape, rows = (seen[0].size, seen[0].classes), len(seen) * restarts
        logits = [torch.randn(shape, generator=rng, device=rng.device) for _ in range(rows)]
        return torch.stack(logits).to(next(seen[0].model.parameters()).dtype)


def predict(
    model: nn.Module, images: Tensor, train_mode: bool, weights: Gradients | None = None
) -> Tensor:
    """Return the model's output in this mode, with other weights if given.

    The model stays as it is: buffers that a pass may update are copies.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with in_mode(model, train_mode):
        output: Tensor = functional_call(model, {**buffers, **(weights or {})}, (images,))
    return output


def last_layer(
    victim: Observation, needs: str = "label inference needs", instead: str = "give the labels"
) -> nn.Linear:
    """Return the last linear layer, in order of registration, with an output for each class.

    Where there is none, the error says who `needs` it and what to do `instead`.
    """
    fitting = [
        module
        for module in victim.model.modules()
        if isinstance(module, nn.Linear) and module.out_features == victim.classes
    ]
    if not fitting:
        raise GradveilError(
            f"{needs} a last linear layer with {victim.classes} outputs, one for each class; "
            f"{instead}"
        )
    return fitting[-1]


def _told(victim: Observation) -> Tensor:
    victim.knowledge.need("labels", by="with known labels")
    labels = victim.knowledge.labels
    assert labels is not None
    if labels.shape != (victim.size,) or labels.is_floating_point():
        got = f"labels of shape {tuple(labels.shape)} and type {labels.dtype}"
        raise GradveilError(f"{got}: expected one class index for each of {victim.size} image(s)")
    if bool(((labels < 0) | (labels >= victim.classes)).any()):
        raise GradveilError(
            f"labels {labels.tolist()}: expected class indices from 0 to {victim.classes - 1}"
        )
    return labels.long()


@dataclass(frozen=True, eq=False)
class _Expected:
    """Means over noise images that explain the gradient of the last layer.

    `absent` (classes,): the slope of the loss at the logit of a class that is not the label;
    `drop` (1,): how much lower the slope is at the label; `features` (1,): the sum of the layer's
    inputs. For cross-entropy `absent` holds the mean probabilities and `drop` is 1. Computed with
    the client's loss, they fit a scaled or a smoothed loss too.
    """

    absent: Tensor
    drop: Tensor
    features: Tensor


def _expect(victim: Observation, layer: nn.Linear, count: int, rng: Generator) -> _Expected:
    """Compute the means on `count` noise images, at the weights of `_stages`."""
    noise = torch.rand(count, *victim.image_shape, generator=rng, device=rng.device)
    noise = noise.to(layer.weight)
    features: list[Tensor] = []
    hook = before_use(layer, lambda _, inputs: features.append(inputs))
    train_mode = victim.protocol.train_mode
    try:
        with torch.no_grad(), following(rng):
            logits = torch.cat(
                [predict(victim.model, noise, train_mode, weights) for weights in _stages(victim)]
            )
    finally:
        hook.remove()
    if not features:
        raise GradveilError(
            "the last linear layer plays no part in the model's output, so labels cannot be "
            "counted; give the labels"
        )
    first, second = (_slopes(victim, logits, label) for label in (0, 1))
    absent = torch.cat([second[:1], first[1:]])
    return _Expected(absent, absent[:1] - first[:1], torch.cat(features).sum(-1).mean().view(1))


def _stages(victim: Observation) -> list[Gradients]:
    """Return the weights before the first local step and, estimated, before the last.

    The estimate is W_0 - rate (k - 1) / k times the shared sum of k gradients.
    """
    steps = victim.protocol.steps(victim.size)
    if steps == 1:
        return [{}]
    rate = victim.protocol.local_lr * (steps - 1) / steps
    moved = {
        name: parameter - rate * victim.gradients[name]
        for name, parameter in victim.model.named_parameters()
        if name in victim.gradients
    }
    return [{}, moved]


def _slopes(victim: Observation, logits: Tensor, label: int) -> Tensor:
    """Return the mean slope of the loss at each logit, if all images had this label."""
    logits = logits.detach().requires_grad_()
    labels = torch.full((len(logits),), label, device=logits.device)
    with torch.enable_grad():
        losses = with_slope(per_sample(victim.loss, logits, labels))
        (slopes,) = torch.autograd.grad(losses.sum(), logits)
    return slopes[:, : victim.classes].mean(0)  # a model may append penalties to the logits


def _pulls(seen: Sequence[Observation], layer: nn.Linear) -> tuple[Tensor, bool]:
    """Return (victims, classes): bias gradients and True, or row sums of weights and False."""
    shared = {
        id(parameter): name
        for name, parameter in seen[0].model.named_parameters()
        if name in seen[0].gradients
    }
    for parameter, biased in ((layer.bias, True), (layer.weight, False)):
        name = shared.get(id(parameter))
        if name is not None:
            gradients = torch.stack([victim.gradients[name] for victim in seen])
            _check_usable(gradients, name)
            return gradients if biased else gradients.sum(2), biased
    raise GradveilError(
        "the last linear layer is frozen, so its gradient is not shared and tells no labels; "
        "give the labels"
    )


def _check_usable(gradients: Tensor, name: str) -> None:
    for number, gradient in enumerate(gradients):
        finite = bool(gradient.isfinite().all())
        if not finite or not bool(gradient.any()):
            state = "all zero" if finite else "not finite"
            raise GradveilError(
                f"the gradient of {name!r} of victim {number} is {state}: it tells no label; "
                "give the labels"
            )


def _take_largest(counts: Tensor, size: int) -> Tensor:
    """Return `size` classes for each victim, sorted; each one taken lowers its count by 1."""
    left, rows, taken = counts.clone(), torch.arange(len(counts), device=counts.device), []
    for _ in range(size):
        taken.append(left.argmax(1))
        left[rows, taken[-1]] -= 1
    return torch.stack(taken, dim=1).sort(dim=1).values
