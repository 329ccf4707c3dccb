"""Training under a defense: the loss of the protected model, and the step whose gradients are protected before the optimizer sees them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.core.draws import Draws, draw, draw_shapes, drawing, given
from gradveil.core.gradients import Gradients, Loss, cross_entropy, trainable
from gradveil.core.types import Batch
from gradveil.defenses import DPSGD, Defense, Moment, Soteria, State
from gradveil.training.steps import Graphed, Step

AGAIN = (DPSGD, Soteria)  # these pass the batch through the model again, and must meet the same draws there


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
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trainable(self.model).items()}

    def run(self, batch: Batch) -> None:
        clean = self.learned(batch)
        moment = Moment(self.model, batch, self.objective.each, self.draws)
        with _statistics_kept(self.model) if self.again else nullcontext():
            shared, self.state = self.defense.protect_gradients(clean, moment, self.state, self.stream())
        for name, parameter in trainable(self.model).items():
            parameter.grad = shared[name].detach()
        self.optimizer.step()

    def _drawn(self, images: Tensor) -> Draws:
        """From torch's own generator, as the modules themselves would draw."""
        if self.shapes is None:
            with torch.random.fork_rng([images.device] if images.is_cuda else []):  # a run that goes on looks at another time
                names = set(drawing(self.model))
                self.shapes = draw_shapes(self.model, images, names) if names else {}
        return {name: draw(self.model.get_submodule(name), (len(images), *shape), images) for name, shape in self.shapes.items()}


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
