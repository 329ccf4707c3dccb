"""The dense layers at the end of a model, and the inputs of each from its gradient.

Where the inputs h = f(z) of the last layer are known for each image, so are the slopes s of the
loss by its outputs, and with them those by the outputs of the layer before: d = (W^T s) * f'(z),
since f' of a ReLU, a sigmoid or a tanh follows from h. The gradient of that layer is
mean_b d_b x_b^T with every d_b known, which gives its inputs x_b by least squares, as long as the
batch has fewer images than the layer has units. So it goes on, layer by layer, to the first dense
one: what a convolutional network makes of each image, or the image itself.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.labels import last_layer, predict
from gradveil.core.types import Loss, Observation
from gradveil.engine.calls import after_use

PROBES = 4  # random images on which layers are seen to follow each other
EXPLAINED = 1e-5  # relative error at most of a gradient that the inputs found explain
COMPUTED = 1e-10  # relative error of what is computed in float64
ROUNDED = 8  # roundings of a number that exact inputs leave unexplained at most, over the gradient
NEAR_ZERO = 1e-3  # of an image's largest feature: a ReLU made it zero, but for rounding
FITTING, SURE = 1e-2, 1e-5  # relative error of a unit's bias gradient where slopes are right
ROUNDS = 50  # of a refinement at most
SETTLED = 1e-9  # relative change of inputs after which there is nothing to refine


class Activation(NamedTuple):
    """A function between two dense layers, and its slope from its own value."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


ACTIVATIONS = (
    Activation(torch.relu, lambda made: (made > 0).to(made)),
    Activation(torch.sigmoid, lambda made: made * (1 - made)),
    Activation(torch.tanh, lambda made: 1 - made.square()),
    Activation(lambda values: values, torch.ones_like),
)


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense layer with its parameters and their gradients in float64 on the processor.

    `activation` makes the next layer's inputs of its outputs; the last layer has none.
    """

    layer: nn.Linear
    activation: Activation | None
    weight: Tensor  # (units, width)
    bias: Tensor  # (units,), zeros without one
    by_weight: Tensor  # the gradient
    by_bias: Tensor | None
    rounding: float  # relative error of a number in the gradient as it was shared

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return what the layer makes of inputs (images, width)."""
        return inputs @ self.weight.T + self.bias

    def error(self, inputs: Tensor, slopes: Tensor) -> float:
        """Return how much of the gradient these inputs and slopes leave unexplained, over it.

        Entries that are zero do not count, since pruning may have made them so.
        """
        made = (slopes.T @ inputs / len(inputs)) * (self.by_weight != 0)
        return float((made - self.by_weight).norm() / self.by_weight.norm())

    def spreads(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """Return how far each image's inputs may be off, over their size.

        That is by an error in the gradient like what they leave unexplained, or like its rounding.
        """
        units, images = slopes.shape[1], len(slopes)
        share = max(self.error(inputs, slopes), self.rounding) / math.sqrt(units - images)
        moves = torch.linalg.pinv(slopes / images, rtol=1e-15).norm(dim=0)
        found: Tensor = moves * share * self.by_weight.norm() / inputs.norm(dim=1).clamp(min=1e-30)
        return found

    def misfit(self, inputs: Tensor, slopes: Tensor) -> float:
        """Return how far the slopes are from the gradient, by the bias where it has one."""
        if self.by_bias is None:
            return self.error(inputs, slopes)
        return float((slopes.mean(0) - self.by_bias).norm())


def trailing(victim: Observation) -> list[Dense]:
    """Return the dense layers at the model's end that follow each other, the first one first.

    A layer whose gradient is not shared or not finite, and what comes before it, is left out.
    """
    runs = passed(victim)
    found = [*_shared(victim, last_layer(victim), None)]
    while found and found[0].layer in runs:
        inputs, _ = runs.pop(found[0].layer)
        before = [dense for pair in _before(inputs, runs) for dense in _shared(victim, *pair)]
        if not before:
            break
        found.insert(0, before[0])
    return found


def passed(victim: Observation) -> dict[nn.Linear, tuple[Tensor, Tensor]]:
    """Return what goes in and comes out of each dense layer that runs once on rows of numbers.

    The images are `PROBES` random ones.
    """
    model, seen = victim.model, list[tuple[nn.Linear, Tensor, Tensor]]()

    def keep(layer: nn.Module, inputs: Tensor, output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        seen.append((layer, inputs, output))

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [after_use(layer, keep) for layer in layers]
    images = torch.rand(PROBES, *victim.image_shape, generator=Generator().manual_seed(0))
    try:
        with torch.no_grad():
            predict(model, images.to(next(model.parameters())), victim.protocol.train_mode)
    finally:
        for handle in handles:
            handle.remove()
    runs = [layer for layer, *_ in seen]
    return {
        layer: (inputs, output)
        for layer, inputs, output in seen
        if runs.count(layer) == 1 and inputs.shape == (PROBES, layer.in_features)
    }


def _before(
    inputs: Tensor, runs: dict[nn.Linear, tuple[Tensor, Tensor]]
) -> Iterator[tuple[nn.Linear, Activation]]:
    """Give the dense layers whose outputs become these inputs by an activation alone."""
    for layer, (_, output) in runs.items():
        for activation in ACTIVATIONS:
            same = output.shape == inputs.shape
            if same and torch.allclose(activation.function(output), inputs):
                yield layer, activation


def _shared(
    victim: Observation, layer: nn.Linear, activation: Activation | None
) -> Iterator[Dense]:
    """Give the layer with its gradients, where its weight's is shared and they are finite."""
    weight, bias = gradients_of(victim, layer)
    given = [part for part in (weight, bias) if part is not None]
    if weight is None or not all(bool(part.isfinite().all()) for part in given):
        return
    units = layer.weight.new_zeros(layer.out_features)
    yield Dense(
        layer,
        activation,
        exact(layer.weight),
        exact(units if layer.bias is None else layer.bias),
        exact(weight),
        None if bias is None else exact(bias),
        rounding(weight),
    )


def gradients_of(victim: Observation, layer: nn.Linear) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the layer's weight and bias; None for one that is not shared.

    A weight that is computed of others, as weight norm has it, is none.
    """
    names = {id(parameter): name for name, parameter in victim.model.named_parameters()}
    weight, bias = (
        None if part is None else victim.gradients.get(names.get(id(part), ""))
        for part in (layer.weight, layer.bias)
    )
    return weight, bias


def exact_loss(loss: Loss) -> Loss:
    """Return the loss for logits in float64 on the processor."""
    return loss_like(loss, torch.zeros((), dtype=torch.float64))


def loss_like(loss: Loss, values: Tensor) -> Loss:
    """Return the loss for logits of the format of these values: a module's class weights too."""
    return deepcopy(loss).to(values) if isinstance(loss, nn.Module) else loss


def rounding(gradient: Tensor) -> float:
    """Return the relative error of its numbers, no less than what computing with them adds."""
    return max(torch.finfo(gradient.dtype).eps, COMPUTED)


def exact(values: Tensor) -> Tensor:
    """Return values in float64 on the processor."""
    return values.detach().cpu().double()


@dataclass(frozen=True, eq=False)
class Found:
    """The inputs of a dense layer for each image, (images, features) in float64.

    `error` is the share of the layer's gradient that they leave unexplained; `spreads` (images,)
    how far each image's may be off, over their size, by errors like that.
    """

    layer: nn.Linear
    features: Tensor
    error: float
    spreads: Tensor


def find_inputs(
    victim: Observation,
    layers: Sequence[Dense],
    features: Tensor,
    slopes: Tensor,
    spreads: Tensor,
) -> list[Found]:
    """Return the inputs of each dense layer that gives them up, those of the first one first.

    `features` are the inputs of the last of the layers with their `spreads`, and `slopes` those of
    each image's loss by its outputs, in float64. A layer whose gradient is not explained ends it.
    """
    found = [Found(layers[-1].layer, features, layers[-1].error(features, slopes), spreads)]
    for number in reversed(range(len(layers) - 1)):
        here, after = layers[number], layers[number + 1]
        assert here.activation is not None
        pulled = slopes @ after.weight
        slopes = pulled * here.activation.slope(_cleaned(features))
        inputs = _inputs(here, slopes, FITTING)
        if inputs is None:
            break
        features, slopes = _refined(victim, layers[number:], inputs, slopes, pulled)
        error = here.error(features, slopes)
        if not error <= EXPLAINED:
            break
        spreads = here.spreads(features, slopes)
        if error > ROUNDED * here.rounding:  # the slopes are wrong, and mix images that are alike
            worse = error / max(found[0].error, here.rounding)
            spreads = spreads.maximum(worse * found[0].spreads)
        found.insert(0, Found(here.layer, features, error, spreads))
    return found


def _cleaned(features: Tensor) -> Tensor:
    """Return features with zeros where rounding alone keeps them from it."""
    small = features.abs() < NEAR_ZERO * features.abs().amax(1, keepdim=True)
    return features.masked_fill(small, 0)


def _inputs(dense: Dense, slopes: Tensor, fitting: float) -> Tensor | None:
    """Return the inputs by these slopes (images, units); None where there are too few units.

    Units whose slopes do not give their bias gradient, to `fitting`, take no part: a feature near
    zero does not tell whether a ReLU let it through. Entries of the gradient that pruning set to
    zero give no equation, and a column with fewer left than images counts as zero.
    """
    size, bias = len(slopes), dense.by_bias
    fits = torch.ones(len(dense.weight), dtype=torch.bool)
    if bias is not None:
        least = FITTING * bias.abs().max()
        fits = (slopes.mean(0) - bias).abs() <= fitting * bias.abs().clamp(min=least)
    gradient, known = dense.by_weight[fits], slopes.T[fits] / size
    if len(gradient) <= size:
        return None
    there = gradient != 0
    counts = there.sum(0)
    if bool((counts[counts > 0] == counts.max()).all()):
        return _least_squares(known, gradient)
    found = gradient.new_zeros(size, gradient.shape[1])
    for column in (counts > size).nonzero().flatten().tolist():
        rows = there[:, column]
        found[:, column] = _least_squares(known[rows], gradient[rows, column, None])[:, 0]
    return found


def _least_squares(known: Tensor, values: Tensor) -> Tensor:
    found: Tensor = torch.linalg.lstsq(known, values, driver="gelsd").solution
    return found


def _refined(
    victim: Observation, layers: Sequence[Dense], inputs: Tensor, slopes: Tensor, pulled: Tensor
) -> tuple[Tensor, Tensor]:
    """Return inputs of the first layer, and slopes by its outputs, that agree with each other.

    Inputs give the outputs of all layers, these give slopes, and slopes give inputs, until they
    settle, from units that fit ever better; of all rounds, those that explain the gradient best.
    Where the later layers' inputs are exact already, the slopes `pulled` back from these are better
    than new ones, and what passes the layer's own activation is all that is looked at anew.
    """
    first = layers[0]
    best = first.error(inputs, slopes), inputs, slopes
    for number in range(ROUNDS):
        anew = _slopes(victim, layers, inputs), _passed_back(first, inputs, pulled)
        slopes = min(anew, key=lambda each: first.misfit(inputs, each))
        again = _inputs(first, slopes, max(SURE, FITTING / 10**number))
        if again is None or not bool(again.isfinite().all()):
            break
        change = float((again - inputs).norm() / inputs.norm())
        inputs = again
        best = min(best, (first.error(inputs, slopes), inputs, slopes), key=lambda each: each[0])
        if change < SETTLED:
            break
    return best[1:]


def _passed_back(dense: Dense, inputs: Tensor, pulled: Tensor) -> Tensor:
    """Return the slopes by a layer's outputs of those by what its activation makes of them."""
    assert dense.activation is not None
    return pulled * dense.activation.slope(dense.activation.function(dense.outputs(inputs)))


def _slopes(victim: Observation, layers: Sequence[Dense], inputs: Tensor) -> Tensor:
    """Return the slopes of each image's loss by the outputs of the first of the layers."""
    labels = victim.knowledge.labels
    assert labels is not None
    made = layers[0].outputs(inputs).requires_grad_()
    with torch.enable_grad():
        values = made
        for here, after in pairwise(layers):
            assert here.activation is not None
            values = after.outputs(here.activation.function(values))
        losses = exact_loss(victim.loss)(values, labels.cpu().long())
        (slopes,) = torch.autograd.grad(losses.sum(), made)
    return slopes
