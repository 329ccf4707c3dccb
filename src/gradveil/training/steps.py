"""One training step, plain or as a CUDA graph that is captured once and replayed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradveil.core.types import Batch
from gradveil.models.bottleneck import penalties

Loss = Callable[[Tensor, Tensor], Tensor]
WARM_UP = 3  # plain steps on a side stream before a capture, as torch asks for; they are steps of the training like any other


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
        self.optimizer.zero_grad(set_to_none=True)
        answers = self.forward(batch.images)
        loss = self.loss(answers.float(), batch.labels)
        loss.backward()
        self.change_gradients(batch)
        self.optimizer.step()
        self.loss_sum += loss.detach() * len(batch)
        self.hits += hits(answers.detach(), batch.labels, self.penalties)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            answers: Tensor = self.model(images)
        return answers

    def change_gradients(self, batch: Batch) -> None:
        """Between the backward pass and the update: nothing, here."""

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


class GraphedStep(Step):
    """The same step without a launch for every kernel: full batches are replayed, the first few and an odd last one are not."""

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, bf16: bool) -> None:
        super().__init__(model, loss, optimizer, bf16)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.fixed: Batch | None = None
        self.warm = 0
        self.rate = float("nan")
        self.stream = torch.cuda.Stream()

    def __call__(self, batch: Batch) -> None:
        self.seen += len(batch)
        rate = self.optimizer.param_groups[0]["lr"]
        if rate != self.rate:  # a graph holds the learning rate it was captured with
            self.rate, self.graph, self.warm = rate, None, 0
        if self.fixed is not None and batch.images.shape != self.fixed.images.shape:
            self.run(batch)
        elif self.warm < WARM_UP:
            self._aside(batch)
        else:
            self._replay(batch)

    def _aside(self, batch: Batch) -> None:
        self.fixed = self.fixed or Batch(batch.images.clone(), batch.labels.clone())
        self.warm += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.run(batch)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _replay(self, batch: Batch) -> None:
        assert self.fixed is not None
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run(self.fixed)
        self.fixed.images.copy_(batch.images)
        self.fixed.labels.copy_(batch.labels)
        self.graph.replay()
