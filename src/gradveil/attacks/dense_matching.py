"""The inputs of the dense layers for each image, matched through these layers alone.

The dense layers at a model's end are a small network of their own, whose inputs are what the layers
before make of each image. What a client shares of their weights, after one step of SGD or several,
is a function of these inputs and the labels: no step moves a layer by anything but its gradient. So
inputs are looked for that give this update. That is gradient matching with some hundred numbers an
image, through a few products of matrices in place of a whole network: many more iterations can be
made. An image that is used several times is taken to have the same inputs each time, though the
layers before have moved a little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.dense_layers import Dense, passed, trailing
from gradveil.attacks.distances import Cosine, Measure
from gradveil.attacks.features import FeatureAim, FeatureMeasure, check_model
from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation
from gradveil.engine.gradients import per_sample, with_slope

STARTS = 2  # searches for each victim, of which the one that explains more is kept
RATE, BETAS = 0.2, (0.9, 0.99)  # of Adam; the rate is over the spread of inputs
SMALLEST = 1e-12  # sum of a gradient's sizes that tells something


class Head:
    """The dense layers at a model's end as a network of their own, trained by the client."""

    def __init__(self, victim: Observation, layers: Sequence[Dense]) -> None:
        victim.knowledge.need("labels", by="of features")
        assert victim.knowledge.labels is not None
        self._protocol, self._loss, self._layers = victim.protocol, victim.loss, layers
        device = next(iter(victim.gradients.values())).device
        self._labels = victim.knowledge.labels.to(device).long()

        def here(part: Tensor) -> Tensor:
            return part.float().to(device)

        self._start = [here(part) for each in layers for part in (each.weight, each.bias)]
        self._shared = [
            None if part is None else here(part)
            for each in layers
            for part in (each.by_weight, each.by_bias)
        ]
        self._pruned = bool(victim.knowledge.pruned)

    def updates(self, inputs: Tensor) -> list[Tensor]:
        """Return (W_0 - W_k) / rate of weights and biases for inputs (starts, images, width)."""
        clients = self._protocol.averaged_clients
        each = zip(inputs.chunk(clients, dim=1), self._labels.chunk(clients), strict=True)
        updates = zip(*(self._trained(its, labels) for its, labels in each), strict=True)
        return [torch.stack(parts).mean(0) for parts in updates]

    def _trained(self, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        """Return the update of a client with all these inputs."""
        protocol = self._protocol
        weights = [part.expand(len(inputs), *part.shape) for part in self._start]
        moved: list[Tensor] = []
        total = [torch.zeros_like(part) for part in weights]
        for part in protocol.parts(len(self._labels)):
            slopes = self._slopes(weights, inputs[:, part], labels[part])
            slopes = [
                s + protocol.client_weight_decay * w for s, w in zip(slopes, weights, strict=True)
            ]
            moved = [
                s + protocol.client_momentum * m if moved else s
                for s, m in zip(slopes, moved or slopes, strict=True)
            ]
            # A parameter that is not shared did not move.
            total = [
                t if shared is None else t + m
                for t, m, shared in zip(total, moved, self._shared, strict=True)
            ]
            weights = [
                start - protocol.local_lr * t for start, t in zip(self._start, total, strict=True)
            ]
        return total

    def _slopes(self, weights: Sequence[Tensor], inputs: Tensor, labels: Tensor) -> list[Tensor]:
        weights = [
            part if part.requires_grad else part.detach().requires_grad_() for part in weights
        ]
        values = inputs
        for layer, weight, bias in zip(self._layers, weights[::2], weights[1::2], strict=True):
            values = torch.baddbmm(bias[:, None], values, weight.transpose(1, 2))
            values = values if layer.activation is None else layer.activation.function(values)
        losses = per_sample(self._loss, values.flatten(0, 1), labels.repeat(len(inputs)))
        loss = with_slope(losses).view(len(inputs), -1).mean(1).sum()
        return [*torch.autograd.grad(loss, weights, create_graph=True)]

    def unexplained(self, inputs: Tensor) -> Tensor:
        """Return the share of what was shared that inputs leave unexplained, (starts,).

        It is the mean over weights and biases of |g' - g| over |g|, both sums of absolute values.
        """
        errors = []
        for found, shared in zip(self.updates(inputs), self._shared, strict=True):
            if shared is None:
                continue
            apart = (found - shared).abs()
            apart = apart * (shared != 0) if self._pruned else apart
            errors.append(apart.flatten(1).sum(1) / shared.abs().sum().clamp(min=SMALLEST))
        return torch.stack(errors).mean(0)


@dataclass(frozen=True, eq=False)
class Matched:
    """Inputs of the first dense layer, (images, width), and what they leave unexplained.

    `spread` is the usual difference between the inputs of two images of noise, for each number.
    """

    layer: nn.Linear
    inputs: Tensor
    error: float
    spread: float


_KEPT: WeakKeyDictionary[Observation, dict[tuple[int, int], Matched]] = WeakKeyDictionary()


def match_inputs(victim: Observation, iterations: int, seed: int) -> Matched:
    """Return the inputs of the first dense layer for each image, as well as they can be matched.

    `error` is `Head.unexplained`. Images are in the order of the labels that the attacker knows. A
    victim's are looked for once.
    """
    kept, settings = _KEPT.setdefault(victim, {}), (iterations, seed)
    if settings not in kept:
        kept[settings] = _match(victim, iterations, Generator().manual_seed(seed))
    return kept[settings]


def _match(victim: Observation, iterations: int, rng: Generator) -> Matched:
    layers = trailing(victim)
    if not layers:
        raise GradveilError("the last dense layer's gradient is needed, with finite numbers")
    head, first = Head(victim, layers), layers[0].layer
    typical, _ = passed(victim).get(first, (None, None))
    if typical is None:
        raise GradveilError("the last dense layer must run once, on a row of numbers an image")
    shape = STARTS, victim.size, first.in_features
    spread, least = float(typical.std()), float(typical.min())
    inputs = float(typical.mean()) + spread * torch.randn(shape, generator=rng)
    inputs = inputs.to(next(iter(victim.gradients.values())).device).requires_grad_()
    optimizer = torch.optim.Adam([inputs], RATE * max(spread, SMALLEST), BETAS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for _ in range(iterations):
        with torch.enable_grad():
            (inputs.grad,) = torch.autograd.grad(head.unexplained(inputs).sum(), inputs)
        optimizer.step()
        schedule.step()
        if least >= 0:  # as after a ReLU
            inputs.detach().clamp_(min=0)
    errors = head.unexplained(inputs).detach().nan_to_num(torch.inf)
    best = int(errors.argmin())
    apart = float(typical.var(0).mean().sqrt())
    return Matched(first, inputs[best].detach(), float(errors[best]), apart)


@dataclass(frozen=True)
class MatchedFeatures(Cosine):
    """The distance of each image's features from those that explain what is shared, and no cosine.

    The features are the inputs of the first dense layer (`match_inputs`), and their distance is the
    mean of |f' - f|^2 over a row, in units of how much features differ between images of noise. No
    gradient of the whole network is made. They are matched by as many `iterations` as the search
    after it has steps, if it has fewer.
    """

    iterations: int = 4_000
    seed: int = field(default=0, kw_only=True)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("labels",)

    def within(self, steps: int) -> "MatchedFeatures":
        return replace(self, iterations=min(steps, self.iterations))

    def bind(self, seen: Sequence[Observation], restarts: int = 1) -> Measure:
        check_model(seen[0], moves=True)
        found = [match_inputs(victim, self.iterations, self.seed) for victim in seen]
        layers = dict.fromkeys(each.layer for each in found)
        return FeatureMeasure(
            None, seen[0].model, [_aim(layer, found, restarts) for layer in layers]
        )


def _aim(layer: nn.Linear, found: Sequence[Matched], restarts: int) -> FeatureAim:
    """Return the aim of the victims whose features are those at this layer."""
    like, size = layer.weight.detach(), len(found[0].inputs)
    none = like.new_zeros(size, layer.in_features)
    target = torch.stack([each.inputs.to(like) if each.layer is layer else none for each in found])
    factors = like.new_zeros(len(found), size)
    for number, each in enumerate(found):
        if each.layer is layer:
            factors[number] = 1 / (max(each.spread, SMALLEST) ** 2 * none.numel())
    rows = (part.repeat_interleave(restarts, 0) for part in (target, factors))
    return FeatureAim(layer, *rows)
