"""Who finds the victim's labels: known beforehand, read off the last layer's gradient, or optimized along with the images.

All rests on that layer's bias gradient, db_c = mean over the batch of (p_c - [y = c]): only the classes present pull it below the
mean probability. Without a bias, the row sums of the weight gradient stand in for it, db_c times the sum of the features: that
needs features whose sum is positive and much alike for all images, as after a ReLU or a sigmoid.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import following
from gradveil.core.types import Gradients, Observation
from gradveil.engine.gradients import in_mode, per_sample


def outputs(
    model: nn.Module, images: Tensor, train_mode: bool, weights: Gradients | None = None
) -> Tensor:
    """The model's answer in this mode, with other weights if given, which leaves it as it is: buffers that a pass may update are copies."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with in_mode(model, train_mode):
        found: Tensor = functional_call(model, {**buffers, **(weights or {})}, (images,))
    return found


@dataclass(frozen=True, eq=False)
class Expected:
    """What the gradients of the last layer are made of, by the mean over noise images.

    `absent` (classes,): the slope of the loss at a logit whose class is not the label; `drop` (1,): how much lower it is at the
    label's own; `features` (1,): the sum of the layer's inputs. For cross-entropy `absent` holds the mean probabilities and
    `drop` is 1. Taken from the client's own loss, they fit a scaled or a smoothed one too.
    """

    absent: Tensor
    drop: Tensor
    features: Tensor


def expect(one: Observation, layer: nn.Linear, count: int, rng: Generator) -> Expected:
    """From `count` images of uniform noise; with several local steps, before the first and before the last of them."""
    noise = torch.rand(count, *one.image_shape, generator=rng, device=rng.device).to(layer.weight)
    features: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    try:
        with torch.no_grad(), following(rng):
            logits = torch.cat(
                [
                    outputs(one.model, noise, one.protocol.train_mode, weights)
                    for weights in _stages(one)
                ]
            )
    finally:
        hook.remove()
    if not features:
        raise GradveilError(
            "the last linear layer plays no part in the model's output, so labels cannot be counted; give the labels"
        )
    first, second = (_slopes(one, logits, label) for label in (0, 1))
    absent = torch.cat([second[:1], first[1:]])
    return Expected(absent, absent[:1] - first[:1], torch.cat(features).sum(-1).mean().view(1))


def _stages(one: Observation) -> list[Gradients]:
    """The weights before the first local step and, about, before the last: W_0 - rate (k - 1) / k times the shared sum of gradients."""
    steps = one.protocol.local_steps
    if steps == 1:
        return [{}]
    rate = one.protocol.local_lr * (steps - 1) / steps
    return [
        {},
        {
            name: p - rate * one.gradients[name]
            for name, p in one.model.named_parameters()
            if name in one.gradients
        },
    ]


def _slopes(one: Observation, logits: Tensor, label: int) -> Tensor:
    logits = logits.detach().requires_grad_()
    labels = torch.full((len(logits),), label, device=logits.device)
    with torch.enable_grad():
        (found,) = torch.autograd.grad(per_sample(one.loss, logits, labels).sum(), logits)
    return found[:, : one.classes].mean(0)  # a model may answer with penalties behind the logits


@dataclass(frozen=True)
class LabelFinder(ABC):
    """From what is seen of victims of one model to their labels."""

    @abstractmethod
    def infer(self, seen: Sequence[Observation], rng: Generator) -> Tensor:
        """(victims, B), int64."""


@dataclass(frozen=True)
class Known(LabelFinder):
    """The attacker was told."""

    def infer(self, seen: Sequence[Observation], rng: Generator) -> Tensor:
        return torch.stack([_told(one) for one in seen])


@dataclass(frozen=True)
class SingleLabel(LabelFinder):
    """For batches of one image (iDLG, Zhao et al. 2020): p_c - [y = c] is negative for the true class alone.

    The smallest entry is that one, and still the best guess where a defense left several negative entries or none.
    """

    def infer(self, seen: Sequence[Observation], rng: Generator) -> Tensor:
        for one in seen:
            if one.size != 1:
                raise GradveilError(
                    f"batch of {one.size}: SingleLabel reads the label of one image; use Counted or give the labels"
                )
        return _pulls(seen, last_layer(seen[0]))[0].argmin(1, keepdim=True)


@dataclass(frozen=True)
class Counted(LabelFinder):
    """For any batch, repeats included: class c occurs n_c = B (pbar_c - db_c) times, pbar the mean probability over the batch.

    The attacker has no data, so it takes pbar from `probes` images of uniform noise. Then B times the class with the largest n_c
    is taken, and its n_c lowered by 1. Labels come sorted: the gradient does not tell which image has which. With several local
    steps it works on their mean, which is an approximation: weights move between them.
    """

    probes: int = 64

    def __post_init__(self) -> None:
        if self.probes < 1:
            raise GradveilError(f"probes {self.probes}: Counted needs at least 1 noise image")

    def infer(self, seen: Sequence[Observation], rng: Generator) -> Tensor:
        size, steps = seen[0].size, seen[0].protocol.local_steps
        layer = last_layer(seen[0])
        pulls, biased = _pulls(seen, layer)
        whose = seen if steps > 1 else seen[:1]  # after a step, each victim's weights are its own
        expected = [expect(one, layer, self.probes, rng) for one in whose]
        absent, drop, features = (
            torch.stack([getattr(own, name) for own in expected])
            for name in ("absent", "drop", "features")
        )
        means = pulls / steps if biased else pulls / steps / features
        return _largest(size * (absent - means) / drop, size)


@dataclass(frozen=True)
class Joint:
    """Labels are variables of the search, as the softmax of logits (DLG, Zhu et al. 2019): this gives only their start."""

    def start(self, rows: int, size: int, classes: int, rng: Generator) -> Tensor:
        """N(0, 1), (rows, size, classes), row by row: none depends on how many follow."""
        return torch.stack(
            [torch.randn(size, classes, generator=rng, device=rng.device) for _ in range(rows)]
        )


Labels = LabelFinder | Joint


def last_layer(one: Observation) -> nn.Linear:
    """The last linear layer, in the order of registration, with one output for each class."""
    fitting = [
        m for m in one.model.modules() if isinstance(m, nn.Linear) and m.out_features == one.classes
    ]
    if not fitting:
        raise GradveilError(
            f"label inference needs a last linear layer with {one.classes} outputs, one for each class; give the labels"
        )
    return fitting[-1]


def _told(one: Observation) -> Tensor:
    one.knowledge.need("labels", by="with known labels")
    labels = one.knowledge.labels
    assert labels is not None
    if labels.shape != (one.size,) or labels.is_floating_point():
        got = f"labels of shape {tuple(labels.shape)} and type {labels.dtype}"
        raise GradveilError(f"{got}: expected one class index for each of {one.size} image(s)")
    if bool(((labels < 0) | (labels >= one.classes)).any()):
        raise GradveilError(
            f"labels {labels.tolist()}: expected class indices from 0 to {one.classes - 1}"
        )
    return labels.long()


def _pulls(seen: Sequence[Observation], layer: nn.Linear) -> tuple[Tensor, bool]:
    """(victims, classes): the last layer's bias gradients and True, or its weight gradients' row sums and False."""
    shared = {
        id(p): name for name, p in seen[0].model.named_parameters() if name in seen[0].gradients
    }
    for parameter, biased in ((layer.bias, True), (layer.weight, False)):
        name = shared.get(id(parameter))
        if name is not None:
            both = torch.stack([one.gradients[name] for one in seen])
            _check_usable(both, name)
            return both if biased else both.sum(2), biased
    raise GradveilError(
        "the last linear layer is frozen, so its gradient is not shared and tells no labels; give the labels"
    )


def _check_usable(gradients: Tensor, name: str) -> None:
    for victim, own in enumerate(gradients):
        if not bool(own.isfinite().all()) or not bool(own.any()):
            state = "all zero" if bool(own.isfinite().all()) else "not finite"
            raise GradveilError(
                f"the gradient of {name!r} of victim {victim} is {state}: it tells no label; give the labels"
            )


def _largest(counts: Tensor, size: int) -> Tensor:
    """`size` classes for each victim, sorted: always the one with the largest count, which is then lowered by 1."""
    left, rows, taken = counts.clone(), torch.arange(len(counts), device=counts.device), []
    for _ in range(size):
        taken.append(left.argmax(1))
        left[rows, taken[-1]] -= 1
    return torch.stack(taken, dim=1).sort(dim=1).values
