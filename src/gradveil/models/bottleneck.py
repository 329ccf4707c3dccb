"""Layers that defenses put into a model: PRECODE's variational bottleneck, dropout that stays on.

A model with a bottleneck is wrapped so that its answers carry the penalty: no pass leaves anything
behind on the model.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.core.seeds import derived
from gradveil.engine.draws import Draw


class Bottleneck(nn.Module):
    """Features of any shape > mu, sigma (k each) > mu + sigma eps, eps ~ N(0, 1) > the same shape.

    A pass returns the features and the penalty of each sample, beta KL(N(mu, sigma) || N(0, 1)), in
    nats, or in bits as the authors' code has it.
    """

    def __init__(
        self, width: int, k: int, beta: float, *, bits: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(derived(seed, "bottleneck"))
            self.encoder = nn.Linear(width, 2 * k)
            self.decoder = nn.Linear(k, width)
        self.draw = Draw()
        self.weight = beta / math.log(2) if bits else beta

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mu, raw = self.encoder(features.flatten(1)).chunk(2, dim=1)
        sigma = F.softplus(raw)
        decoded: Tensor = self.decoder(mu + sigma * self.draw(mu))
        return decoded.view_as(features), self.weight * divergence(mu, sigma)


def divergence(mu: Tensor, sigma: Tensor) -> Tensor:
    """Return KL(N(mu, sigma) || N(0, 1)) of each row, in nats."""
    return 0.5 * (mu.square() + sigma.square() - 1 - 2 * sigma.log()).sum(1)


class Penalized(nn.Module):
    """A model with bottlenecks: behind the logits, its answers have a column for each penalty."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.training = inner, inner.training

    def forward(self, images: Tensor) -> Tensor:
        """Return (batch, classes + bottlenecks).

        Hooks that live for this pass take the penalties, so no layer needs to pass them on.
        """
        found: list[list[Tensor]] = []
        with ExitStack() as hooks:
            for bottleneck in bottlenecks(self.inner):
                found.append([])
                hooks.callback(bottleneck.register_forward_hook(_keep(found[-1])).remove)
            answers: Tensor = self.inner(images)
        columns = [torch.stack(uses, 1).sum(1, keepdim=True) for uses in found]
        return torch.cat([answers, *columns], dim=1)


def bottlenecks(model: nn.Module) -> list[Bottleneck]:
    """Return the model's bottlenecks, in the order of registration."""
    return [module for module in model.modules() if isinstance(module, Bottleneck)]


def penalties(model: nn.Module) -> int:
    """Count the last columns of the model's answers that are no logits."""
    return len(bottlenecks(model)) if isinstance(model, Penalized) else 0


def _keep(
    found: list[Tensor],
) -> Callable[[nn.Module, tuple[Any, ...], tuple[Tensor, Tensor]], None]:
    def keep(_: nn.Module, __: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        found.append(output[1])

    return keep


class AlwaysDropout(nn.Dropout):
    """Dropout that is on in either mode of the model.

    Gradients are shared with it on, also where batch norm is in eval mode.
    """

    def train(self, mode: bool = True) -> "AlwaysDropout":
        self.training = True
        return self


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Switch `AlwaysDropout` off for a while, such as to measure a trained model's accuracy."""
    layers = [module for module in model.modules() if isinstance(module, AlwaysDropout)]
    try:
        for layer in layers:
            layer.training = False
        yield
    finally:
        for layer in layers:
            layer.training = True
