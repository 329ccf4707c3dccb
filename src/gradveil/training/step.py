"""One training step: plain, as a CUDA graph that is captured once and replayed, or defended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Generator, Tensor, nn

from gradveil.core.types import Batch, Gradients, Loss
from gradveil.defenses import Defense, Moment, State
from gradveil.defenses.applied import protected_gradients
from gradveil.engine.device import Replayed
from gradveil.engine.draws import Draws, draw, draw_shapes, drawing, given
from gradveil.engine.gradients import cross_entropy, trainable
from gradveil.models.bottleneck import penalties

BatchLoss = Callable[[Tensor, Tensor], Tensor]
T = TypeVar("T")


class Step:
    """Forward, backward and update; sums of loss and hits stay on the device until asked for."""

    def __init__(
        self, model: nn.Module, loss: BatchLoss, optimizer: torch.optim.Optimizer, bf16: bool
    ) -> None:
        self.model, self.loss, self.optimizer, self.bf16 = model, loss, optimizer, bf16
        self.penalties = penalties(model)
        device = next(model.parameters()).device
        self.loss_sum, self.hits = torch.zeros((), device=device), torch.zeros((), device=device)
        self.seen = 0

    def __call__(self, batch: Batch) -> None:
        self.seen += len(batch)
        self.run(batch)

    def run(self, batch: Batch) -> None:
        self.learn(batch)
        self.optimizer.step()

    def learn(self, batch: Batch) -> None:
        """Compute the gradients of the batch into the parameters."""
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
        """Return mean loss and accuracy since the last call; waits for the device."""
        count = max(self.seen, 1)
        found = float(self.loss_sum) / count, float(self.hits) / count
        self.loss_sum.zero_()
        self.hits.zero_()
        self.seen = 0
        return found


def hits(answers: Tensor, labels: Tensor, penalties: int) -> Tensor:
    """Count the right answers by their logits: the last `penalties` columns are none."""
    return (answers[:, : answers.shape[1] - penalties].argmax(1) == labels).sum()


class Graphed(Generic[T]):
    """A function of a batch, replayed for batches that look like the first.

    A smaller last batch is passed to the function itself.
    """

    def __init__(self, function: Callable[[Batch], T]) -> None:
        self.function = function
        self.fixed: Batch | None = None
        self.replayed: Replayed[T] | None = None

    def forget(self) -> None:
        """Capture anew next time: something changes that a capture holds as it was."""
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

    def __init__(
        self, model: nn.Module, loss: BatchLoss, optimizer: torch.optim.Optimizer, bf16: bool
    ) -> None:
        super().__init__(model, loss, optimizer, bf16)
        self.graphed = Graphed(super().run)
        self.rate = float("nan")

    def run(self, batch: Batch) -> None:
        rate = self.optimizer.param_groups[0]["lr"]
        if rate != self.rate:
            self.rate = rate
            self.graphed.forget()
        self.graphed(batch)


def repasses(defense: Defense) -> bool:
    """Tell whether a part of it passes the batch through the model again, with the same draws."""
    return any(part.repasses for part in defense.parts())


def replays(defense: Defense, device: torch.device) -> bool:
    """Tell whether steps are CUDA graphs: on a GPU, unless the batch passes through again."""
    return device.type == "cuda" and not repasses(defense)


@dataclass(frozen=True)
class Objective:
    """scale x (task loss + penalties): a value for each sample, and their mean when called."""

    losses: Loss
    scale: float

    @classmethod
    def of(cls, defense: Defense, scale: float) -> "Objective":
        return cls(defense.protect_loss(cross_entropy), scale)

    def each(self, answers: Tensor, labels: Tensor) -> Tensor:
        return self.scale * self.losses(answers, labels)

    def __call__(self, answers: Tensor, labels: Tensor) -> Tensor:
        return self.each(answers, labels).mean()


class DefendedStep(Step):
    """Update the model by what a client would share; `stream` gives the present step's generator.

    With `graphs` the forward and backward pass are replayed; the defense, which may draw and
    remember, and the update are not. Values are looked at only where `thorough`: that waits for
    the device.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        bf16: bool,
        defense: Defense,
        stream: Callable[[], Generator],
        graphs: bool = False,
        thorough: bool = False,
    ) -> None:
        super().__init__(model, objective, optimizer, bf16)
        self.objective, self.defense, self.stream = objective, defense, stream
        self.thorough = thorough
        self.state: State = defense.start()
        self.again = repasses(defense)
        self.learned = Graphed(self.gradients) if graphs else self.gradients
        self.shapes: dict[str, tuple[int, ...]] | None = None
        self.draws: Draws = {}

    def forward(self, images: Tensor) -> Tensor:
        self.draws = self._drawn(images) if self.again else {}
        with given(self.model, self.draws):
            return super().forward(images)

    def gradients(self, batch: Batch) -> Gradients:
        self.learn(batch)
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in trainable(self.model).items()
        }

    def run(self, batch: Batch) -> None:
        clean = self.learned(batch)
        moment = Moment(self.model, batch, self.objective.each, self.draws)
        with _statistics_kept(self.model) if self.again else nullcontext():
            shared, self.state = protected_gradients(
                self.defense, clean, moment, self.state, self.stream(), finite=self.thorough
            )
        for name, parameter in trainable(self.model).items():
            parameter.grad = shared[name].detach()
        self.optimizer.step()

    def _drawn(self, images: Tensor) -> Draws:
        """Draw from torch's own generator, as the modules themselves would."""
        if self.shapes is None:
            # Forked: a run that was stopped comes here at another step.
            with torch.random.fork_rng([images.device] if images.is_cuda else []):
                names = set(drawing(self.model))
                self.shapes = draw_shapes(self.model, images, names) if names else {}
        return {
            name: draw(self.model.get_submodule(name), (len(images), *shape), images)
            for name, shape in self.shapes.items()
        }


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers: a second pass must not count twice in the statistics of batch norm."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
