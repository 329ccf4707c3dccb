"""The inputs of the dense layers for each image, matched through these layers alone.

The dense layers at a model's end are a small network of their own, whose inputs are what the layers
before make of each image. What a client shares of their weights, after one step of SGD or several,
is a function of these inputs and the labels: no step moves a layer by anything but its gradient. So
inputs are looked for that give this update. That is gradient matching with some hundred numbers an
image, through a few products of matrices in place of a whole network: many more iterations can be
made. An image that is used several times is taken to have the same inputs each time, though the
layers before have moved a little.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.dense_layers import Dense, loss_like, passed, trailing
from gradveil.attacks.distances import Cosine, Measure
from gradveil.attacks.features import FeatureAim, FeatureMeasure, check_model
from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation
from gradveil.engine.gradients import per_sample, with_slope

STARTS = 2  # searches for each victim, of which the one that explains more is kept
RATE, BETAS = 0.2, (0.9, 0.99)  # of Adam; the rate is over the spread of inputs
MOST = 1 << 23  # numbers in the weights of all searches that are made together
SMALLEST = 1e-12  # sum of a gradient's sizes that tells something


class Head:
    """The dense layers at the model's end as a network of their own, trained by each client.

    Inputs are rows of `starts` for each victim, one victim after the other.
    """

    def __init__(self, victims: Sequence[Observation], layers: Sequence[Sequence[Dense]]) -> None:
        first = victims[0]
        self._protocol, self._layers = first.protocol, layers[0]
        self._count, self._pruned = len(victims), bool(first.knowledge.pruned)
        device = next(iter(first.gradients.values())).device

        def here(part: Tensor) -> Tensor:
            return part.float().to(device)

        labels = [victim.knowledge.labels for victim in victims]
        known = [each for each in labels if each is not None]
        self._labels = torch.stack(known).to(device).long()  # (victims, images)
        self._start = [here(part) for each in layers[0] for part in (each.weight, each.bias)]
        self._loss = loss_like(first.loss, self._start[0])
        parts = zip(
            *([part for each in of for part in _shared(each)] for of in layers), strict=True
        )
        self._shared = [
            None if part[0] is None else torch.stack([here(p) for p in part if p is not None])
            for part in parts
        ]

    def updates(self, inputs: Tensor) -> list[Tensor]:
        """Return (W_0 - W_k) / rate of weights and biases for inputs (rows, images, width)."""
        clients = self._protocol.averaged_clients
        labels = self._labels.repeat_interleave(len(inputs) // self._count, 0)
        each = zip(inputs.chunk(clients, dim=1), labels.chunk(clients, dim=1), strict=True)
        updates = zip(*(self._trained(its, labels) for its, labels in each), strict=True)
        return [torch.stack(parts).mean(0) for parts in updates]

    def _trained(self, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        """Return the update of a client with all these inputs."""
        protocol = self._protocol
        weights = [part.expand(len(inputs), *part.shape) for part in self._start]
        moved: list[Tensor] = []
        total = [torch.zeros_like(part) for part in weights]
        for part in protocol.parts(self._labels.shape[1]):
            slopes = self._slopes(weights, inputs[:, part], labels[:, part])
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
        losses = per_sample(self._loss, values.flatten(0, 1), labels.flatten())
        loss = with_slope(losses).view(len(inputs), -1).mean(1).sum()
        return [*torch.autograd.grad(loss, weights, create_graph=True)]

    def unexplained(self, inputs: Tensor) -> Tensor:
        """Return the share of what was shared that inputs leave unexplained, (rows,).

        It is the mean over weights and biases of |g' - g| over |g|, both sums of absolute values.
        """
        errors, starts = [], len(inputs) // self._count
        for found, shared in zip(self.updates(inputs), self._shared, strict=True):
            if shared is None:
                continue
            apart = (found.view(self._count, starts, *shared.shape[1:]) - shared[:, None]).abs()
            apart = apart * (shared != 0)[:, None] if self._pruned else apart
            whole = shared.abs().flatten(1).sum(1, keepdim=True).clamp(min=SMALLEST)
            errors.append(apart.flatten(2).sum(2) / whole)
        return torch.stack(errors).mean(0).flatten()


def _shared(layer: Dense) -> tuple[Tensor, Tensor | None]:
    return layer.by_weight, layer.by_bias


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


def match_inputs(victims: Sequence[Observation], iterations: int, seed: int) -> list[Matched]:
    """Return the inputs of the first dense layer for each image, as well as they can be matched.

    `error` is `Head.unexplained`. Images are in the order of the labels that the attacker knows.
    The victims, who share of one model, are matched together, and each of them once.
    """
    settings = iterations, seed
    groups: dict[Any, list[tuple[Observation, list[Dense]]]] = {}
    for victim in victims:
        victim.knowledge.need("labels", by="of features")
        if settings not in _KEPT.setdefault(victim, {}):
            layers = trailing(victim)
            if not layers:
                raise GradveilError(
                    "the last dense layer's gradient is needed, with finite numbers"
                )
            alike = tuple((each.layer, each.by_bias is None) for each in layers)
            kind = alike, victim.size, victim.protocol, bool(victim.knowledge.pruned)
            groups.setdefault(kind, []).append((victim, layers))
    for group in groups.values():
        weights = sum(each.weight.numel() for each in group[0][1])
        at_once = max(1, MOST // (STARTS * weights))
        for start in range(0, len(group), at_once):
            some = group[start : start + at_once]
            those = [victim for victim, _ in some]
            matched = _match(those, [its for _, its in some], iterations, seed)
            for victim, found in zip(those, matched, strict=True):
                _KEPT[victim][settings] = found
    return [_KEPT[victim][settings] for victim in victims]


def _match(
    victims: Sequence[Observation],
    layers: Sequence[Sequence[Dense]],
    iterations: int,
    seed: int,
) -> Iterator[Matched]:
    """Give what is matched of victims whose layers, sizes and protocols are alike."""
    victim, count, rng = victims[0], len(victims), Generator().manual_seed(seed)
    head, first = Head(victims, layers), layers[0][0].layer
    typical, _ = passed(victim).get(first, (None, None))
    if typical is None:
        raise GradveilError("the last dense layer must run once, on a row of numbers an image")
    shape = STARTS, victim.size, first.in_features
    spread, least = float(typical.std()), float(typical.min())
    starts = float(typical.mean()) + spread * torch.randn(shape, generator=rng)
    inputs = starts.to(next(iter(victim.gradients.values())).device).repeat(count, 1, 1)
    inputs.requires_grad_()
    optimizer = torch.optim.Adam([inputs], RATE * max(spread, SMALLEST), BETAS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for _ in range(iterations):
        with torch.enable_grad():
            (inputs.grad,) = torch.autograd.grad(head.unexplained(inputs).sum(), inputs)
        optimizer.step()
        schedule.step()
        if least >= 0:  # as after a ReLU
            inputs.detach().clamp_(min=0)
    errors = head.unexplained(inputs).detach().nan_to_num(torch.inf).view(count, STARTS)
    apart = float(typical.var(0).mean().sqrt())
    found = inputs.detach().view(count, *shape)
    for row, error, best in zip(found, errors, errors.argmin(1), strict=True):
        yield Matched(first, row[best].clone(), float(error[best]), apart)


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
        found = match_inputs(seen, self.iterations, self.seed)
        layers = dict.fromkeys(each.layer for each in found)
        return FeatureMeasure(None, [_aim(layer, found, restarts) for layer in layers])


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
