"""The published training recipe as a value."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil.core.errors import GradveilError

LARGEST = torch.finfo(torch.float32).max  # the optimizer's step cannot use a larger number
DECAY_AT = (3 / 8, 5 / 8, 7 / 8)


@dataclass(frozen=True)
class Recipe:
    """SGD with Nesterov momentum; the learning rate is divided by ten at 3/8, 5/8 and 7/8 of the epochs (Gao et al. 2021).

    `loss_scale` multiplies the training loss. The published code trains with 0.5 while its attacker uses 1: an option here,
    never the default.
    """

    epochs: int = 60
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 128
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, right, rule in (
            ("epochs", self.epochs >= 0, "at least 0"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1"),
            ("weight_decay", 0 <= self.weight_decay <= LARGEST, "at least 0 and finite as a float32"),
            ("lr", 0 < self.lr <= LARGEST, "above 0 and finite as a float32"),
            ("loss_scale", 0 < self.loss_scale <= LARGEST, "above 0 and finite as a float32"),
        ):
            if not right:
                raise GradveilError(f"{name.replace('_', ' ')} {getattr(self, name)}: it must be {rule}")

    def rate(self, epoch: int) -> float:
        """The learning rate of this epoch, counted from 0."""
        return self.lr * 0.1 ** sum(epoch >= part * self.epochs for part in DECAY_AT)

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        nesterov = self.momentum > 0
        return torch.optim.SGD(model.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay, nesterov=nesterov)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss_scale * cross_entropy(logits, labels)
