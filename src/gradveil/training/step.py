"""One training step, plain or as a CUDA graph that is captured once and replayed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Generator, Tensor, nn

from gradveil.core.types import Batch, Gradients, Loss
from gradveil.defenses import DPSGD, Defense, Moment, Soteria, State
from gradveil.defenses.pruning import Residuals
from gradveil.engine.device import Replayed
from gradveil.engine.draws import Draws, draw, draw_shapes, drawing, given
from gradveil.engine.gradients import cross_entropy, trainable
from gradveil.models.bottleneck import penalties

BatchLoss = Callable[[Tensor, Tensor], Tensor]
T = TypeVar("T")


class Step:
    """Forward, backward and update; keeps the sums of loss and hits on the device until they are asked for."""

    def __init__(
        self, model: nn.Module, loss: BatchLoss, optimizer: torch.optim.Optimizer, bf16: bool
    ) -> None:
        self.model, self.loss, self.optimizer, self.bf16 = model, loss, optimizer, bf16
        self.penalties = penalties(model)
        device = next(model.parameters()).device
        self.loss_sum, self.hits, self.seen = (
            torch.zeros((), device=device),
            torch.zeros((), device=device),
            0,
        )

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


AGAIN = (
    DPSGD,
    Soteria,
)  # these pass the batch through the model again, and must meet the same draws there


def passes_again(defense: Defense) -> bool:
    return any(isinstance(part, AGAIN) for part in defense.parts())


def acts_on(defense: Defense, what: Literal["model", "batch", "gradients"]) -> bool:
    return any(part.acts_on == what for part in defense.parts())


@dataclass(frozen=True)
class Objective:
    """scale x (task loss + penalties), as one value for each sample and, when called, as their mean."""

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
    """What the optimizer gets is what a client would share. `stream` gives the generator of the present step.

    `graphs`: forward and backward pass are replayed; the defense, which may draw and remember, and the update are not.
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
    ) -> None:
        super().__init__(model, objective, optimizer, bf16)
        self.objective, self.defense, self.stream = objective, defense, stream
        self.state: State = defense.start()
        self.again = passes_again(defense)
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
            shared, self.state = self.defense.protect_gradients(
                clean, moment, self.state, self.stream()
            )
        for name, parameter in trainable(self.model).items():
            parameter.grad = shared[name].detach()
        self.optimizer.step()

    def _drawn(self, images: Tensor) -> Draws:
        """From torch's own generator, as the modules themselves would draw."""
        if self.shapes is None:
            with torch.random.fork_rng(
                [images.device] if images.is_cuda else []
            ):  # a run that goes on looks at another time
                names = set(drawing(self.model))
                self.shapes = draw_shapes(self.model, images, names) if names else {}
        return {
            name: draw(self.model.get_submodule(name), (len(images), *shape), images)
            for name, shape in self.shapes.items()
        }


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """A second pass of a batch does not count twice in the running statistics of batch norm."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])


def packed(state: State) -> Any:
    if state is None:
        return None
    if isinstance(state, tuple):
        return [packed(one) for one in state]
    if isinstance(state, Residuals):
        return {"momentum": dict(state.momentum), "unsent": dict(state.unsent)}
    raise TypeError(
        f"a defense keeps a {type(state).__name__} between steps: say here how a checkpoint holds it"
    )


def unpacked(plain: Any, device: torch.device) -> State:
    """What `packed` was given, on this device."""
    if plain is None:
        return None
    if isinstance(plain, list):
        return tuple(unpacked(one, device) for one in plain)
    return Residuals(
        **{
            part: {name: value.to(device) for name, value in values.items()}
            for part, values in plain.items()
        }
    )
