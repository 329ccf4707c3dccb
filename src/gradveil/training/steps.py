"""One training step, plain or as a CUDA graph that is captured once and replayed."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from gradveil.core.replay import Replayed
from gradveil.core.types import Batch
from gradveil.models.bottleneck import penalties

Loss = Callable[[Tensor, Tensor], Tensor]
T = TypeVar("T")


class Step:
    """Forward, backward and update; keeps the sums of loss and hits on the device until they are asked for."""

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, bf16: bool) -> None:
        self.model, self.loss, self.optimizer, self.bf16 = model, loss, optimizer, bf16
        self.penalties = penalties(model)
        device = next(model.parameters()).device
        self.loss_sum, self.hits, self.seen = torch.zeros((), device=device), torch.zeros((), device=device), 0

    def __call__(self, batch: Batch) -> None:
        self.seen += len(batch)
        self.run(batch)

    def run(self, batch: Batch) -> None:
        self.learn(batch)
        self.optimizer.step()

    def learn(self, batch: Batch) -> None:
        """Give the parameters the gradients of the batch."""
        self.optimizer.zero_grad(set_to_none=True)
        answers = self.forward(batch.images)
        loss = self.loss(answers.float(), batch.labels)
        loss.backward()
        self.loss_sum += loss.detach() * len(batch)
        self.hits += hits(answers.detach(), batch.labels, self.penalties)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            answers: Tensor = self.model(images)
        return answers

    def averages(self) -> tuple[float, float]:
        """Mean loss and accuracy since the last call. It waits for the device."""
        count = max(self.seen, 1)
        found = float(self.loss_sum) / count, float(self.hits) / count
        self.loss_sum.zero_()
        self.hits.zero_()
        self.seen = 0
        return found


def hits(answers: Tensor, labels: Tensor, penalties: int) -> Tensor:
    """How many are right, by the logits alone: the last columns of an answer may be penalties."""
    return (answers[:, : answers.shape[1] - penalties].argmax(1) == labels).sum()


class Graphed(Generic[T]):
    """A function of a batch, replayed for batches that look like the first one; an odd last one is passed to the function itself."""

    def __init__(self, function: Callable[[Batch], T]) -> None:
        self.function = function
        self.fixed: Batch | None = None
        self.replayed: Replayed[T] | None = None

    def forget(self) -> None:
        """Before something changes that a capture holds as it was."""
        self.replayed = None

    def __call__(self, batch: Batch) -> T:
        fixed = self.fixed = self.fixed or Batch(batch.images.clone(), batch.labels.clone())
        if batch.images.shape != fixed.images.shape:
            return self.function(batch)
        fixed.images.copy_(batch.images)
        fixed.labels.copy_(batch.labels)
        self.replayed = self.replayed or Replayed(lambda: self.function(fixed))
        return self.replayed()


class GraphedStep(Step):
    """The same step without a launch for every kernel."""

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, bf16: bool) -> None:
        super().__init__(model, loss, optimizer, bf16)
        self.graphed = Graphed(super().run)
        self.rate = float("nan")

    def run(self, batch: Batch) -> None:
        rate = self.optimizer.param_groups[0]["lr"]
        if rate != self.rate:
            self.rate = rate
            self.graphed.forget()
        self.graphed(batch)
