"""The one optimizer attack: find images whose gradients match the observed ones. Every published variant is a choice of parts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from gradveil.attacks import distances as targets
from gradveil.attacks import priors
from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.distances import ByProducts, Distance, cosine
from gradveil.attacks.hidden_draws import FreshDraws, JointDraws
from gradveil.attacks.labels import Joint, Known, Labels
from gradveil.attacks.optimizers import Adam, Optimizer, Search, Slopes
from gradveil.attacks.policy_views import Itself, Through
from gradveil.attacks.priors import Prior, PriorState
from gradveil.attacks.starts import Initial, Normal
from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation, Reconstruction
from gradveil.engine.device import keep_freed_memory, tf32
from gradveil.engine.gradients import pixel_frame
from gradveil.engine.shares import Shares

Shots = list[tuple[int, Tensor]]
"""(step, pixel images of all rows), on the way."""


class Problem:
    """The images looked for, victims x restarts rows of them; where asked for, labels and the model's draws beside them."""

    def __init__(
        self, attack: "GradientMatching", seen: Sequence[Observation], rng: Generator
    ) -> None:
        self.attack, first, rows = attack, seen[0], len(seen) * attack.restarts
        example = next(iter(first.gradients.values()))
        self.mean, self.std = (
            part.to(example) for part in pixel_frame(first.model, first.image_shape)
        )
        self.labels = _labels(attack.labels, seen, attack.restarts, rng).to(example.device)
        start = attack.initial.knowing(seen, self.labels)
        self.images = start(
            rows, (first.size, *first.image_shape), rng, (self.mean.cpu(), self.std.cpu())
        ).to(example)
        self.soft_labels = isinstance(attack.labels, Joint)
        self.draws = {} if attack.joint is None else attack.joint.begin(first, rows, rng)
        self.fresh = FreshDraws(first, self.draws, rng)
        self.untold = bool(self.fresh.modules) and (
            first.protocol.local_steps > 1 or attack.prior.passes
        )
        self.views = attack.through.bind(seen, attack.restarts, rng)
        self.shares = Shares(
            first.model,
            first.loss,
            first.protocol,
            short=attack.fast,
            told={*self.draws, *self.fresh.shapes},
        )
        self.measure = targets.measure(attack.distance, seen, attack.restarts)
        self.state = PriorState(
            first.model, self.labels, self.mean, self.std, first.protocol.train_mode, first.classes
        )

    @property
    def variables(self) -> list[Tensor]:
        """Images first, then label logits if they are looked for, then draws."""
        return [self.images, *([self.labels] if self.soft_labels else []), *self.draws.values()]

    def search(self, after: Callable[[int], None]) -> Search:
        attack = self.attack
        low, high = (0 - self.mean) / self.std, (1 - self.mean) / self.std

        def confine() -> None:
            if attack.boxed:
                self.images.clamp_(low, high)

        self.distances(
            *self.variables
        )  # a first run, so that a model is tried out before anything is captured
        captured = self.images.is_cuda and self.shares.why_not is None and not attack.prior.waits
        # A policy needs values back from a GPU, and the model's draws come from a generator that a capture does not know.
        replayable = (
            captured
            and isinstance(attack.through, Itself)
            and not self.fresh.shapes
            and not self.untold
        )
        return Search(
            self.variables,
            self.evaluate,
            attack.steps,
            attack.signed,
            attack.decay,
            confine,
            after,
            replayable,
        )

    def evaluate(self) -> tuple[Tensor, Slopes]:
        leaves = [variable.detach().requires_grad_() for variable in self.variables]
        with torch.enable_grad():
            losses = self.distances(*leaves, differentiable=True) + self._beliefs(*leaves)
            return losses.detach(), list(torch.autograd.grad(losses.sum(), leaves))

    def distances(self, images: Tensor, *others: Tensor, differentiable: bool = False) -> Tensor:
        """Of each row; the mean over the views of its images."""
        labels, draws = self._split(*others)
        values = {} if self.attack.joint is None else self.attack.joint.values(draws)
        each = []
        for view in self.views(images * self.std + self.mean):
            drawn = {**values, **self.fresh(len(images))}
            with self._own_randomness():
                if isinstance(self.measure, ByProducts):
                    pair = self.shares.compare(
                        view, labels, self.measure.aim, draws=drawn, differentiable=differentiable
                    )
                    each.append(self.measure.of(*pair))
                else:
                    each.append(
                        self.measure(
                            self.shares(view, labels, draws=drawn, differentiable=differentiable)
                        )
                    )
        return each[0] if len(each) == 1 else torch.stack(each).mean(0)

    def _beliefs(self, images: Tensor, *others: Tensor) -> Tensor:
        labels, draws = self._split(*others)
        with self._own_randomness():
            belief = self.attack.prior(
                images * self.std + self.mean, replace(self.state, labels=labels)
            )
        return (
            belief
            if self.attack.joint is None
            else belief + self.attack.joint.penalty(draws, self.state.model)
        )

    def _own_randomness(self) -> AbstractContextManager[None]:
        """For passes of a model that draws without being told what."""
        return self.fresh.seeded() if self.untold else nullcontext()

    def _split(self, *others: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Labels, as probabilities where they are looked for, and the variables of the draws."""
        labels = others[0].softmax(-1) if self.soft_labels else self.labels
        return labels, dict(zip(self.draws, others[int(self.soft_labels) :], strict=True))

    def pixels(self) -> Tensor:
        return (self.images * self.std + self.mean).clamp(0, 1)

    def best(self, shots: Shots) -> list[Reconstruction]:
        """Each victim's restart with the smallest finite distance, or the mean of those that are finite."""
        restarts = self.attack.restarts
        if self.attack.averaged:
            lost = (self._final_distances() == torch.inf).view(-1, *(1,) * (self.images.dim() - 1))
            self.images.copy_(_mean(self.images.masked_fill(lost, torch.nan), restarts))
            shots = [(step, _mean(shot, restarts)) for step, shot in shots]
        distances = self._final_distances()
        chosen = distances.view(-1, restarts).argmin(1)
        return [
            self._found(victim * restarts + row, float(distances[victim * restarts + row]), shots)
            for victim, row in enumerate(chosen.tolist())
        ]

    def _final_distances(self) -> Tensor:
        finite = self.images.flatten(1).isfinite().all(1)
        return torch.where(finite, self.distances(*self.variables), torch.inf).nan_to_num(
            torch.inf, torch.inf, torch.inf
        )

    def _found(self, index: int, distance: float, shots: Shots) -> Reconstruction:
        values = {} if self.attack.joint is None else self.attack.joint.values(self.draws)
        return Reconstruction(
            self.pixels()[index].nan_to_num(0.5).cpu(),
            (self.labels.argmax(-1) if self.soft_labels else self.labels)[index].cpu(),
            distance,
            "ok" if distance < float("inf") else "failed: every restart diverged",
            torch.stack([shot[index] for _, shot in shots]) if shots else None,
            tuple(step for step, _ in shots),
            self.attack.through.aims_at,
            {name: value[index].detach().cpu() for name, value in values.items()},
        )


def _mean(rows: Tensor, restarts: int) -> Tensor:
    """In place of each restart the mean of the victim's restarts; a diverged one is not a number, and does not count."""
    each: Tensor = rows.unflatten(0, (-1, restarts))
    return each.nanmean(1, keepdim=True).expand_as(each).flatten(0, 1)


def _labels(labels: Labels, seen: Sequence[Observation], restarts: int, rng: Generator) -> Tensor:
    if isinstance(labels, Joint):
        return labels.start(len(seen) * restarts, seen[0].size, seen[0].classes, rng).to(
            next(seen[0].model.parameters()).dtype
        )
    return labels.infer(seen, rng).repeat_interleave(restarts, 0)


@dataclass(frozen=True)
class GradientMatching(Attack):
    """Minimize distance + prior over images in the model's normalized space, where published step sizes and N(0, 1) live.

    Victims and restarts are rows of one batch. Of a victim's restarts the one with the smallest gradient distance is kept, all
    that an attacker can judge by; one that diverged never is. `averaged` takes the mean of the restarts instead. `boxed` clips to
    valid pixels after each step. `fast` lets a GPU use shorter number formats: TF32, and bf16 for products of patches. `frames`
    pictures are kept of the way. `through`: what the gradient is taken of. `joint`: the model's draws, if looked for too.
    """

    distance: Distance = cosine
    optimizer: Optimizer = field(default_factory=Adam)
    prior: Prior = priors.none
    initial: Initial = field(default_factory=Normal)
    labels: Labels = field(default_factory=Known)
    steps: int = 4_800
    restarts: int = 1
    signed: bool = False
    boxed: bool = True
    decay: bool = True
    fast: bool = True
    frames: int = 8
    through: Through = field(default_factory=Itself)
    joint: JointDraws | None = None
    averaged: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "restarts"):
            if getattr(self, name) < 1:
                raise GradveilError(f"{name} {getattr(self, name)}: an attack needs at least 1")

    @property
    def needs(self) -> tuple[str, ...]:
        labels = ("labels",) if isinstance(self.labels, Known) else ()
        parts = (
            self.distance,
            self.initial,
            self.through,
            *(() if self.joint is None else (self.joint,)),
        )
        return (*labels, *(name for part in parts for name in part.needs))

    @property
    def title(self) -> str:
        return "by gradient matching"

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        if self.averaged and seen[0].size > 1:
            raise GradveilError(
                f"batch of {seen[0].size}: restarts find its images in different orders; only one image can be averaged"
            )
        keep_freed_memory()
        with tf32(self.fast):
            problem = Problem(self, seen, rng)
            shots: Shots = []
            wanted = (
                {round(self.steps * part / self.frames) for part in range(1, self.frames + 1)}
                if self.frames
                else set()
            )

            def after(step: int) -> None:
                progress(step, self.steps)
                if step in wanted:
                    shots.append((step, problem.pixels().cpu()))

            first = problem.pixels().cpu()
            self.optimizer.minimize(problem.search(after))
            return problem.best([(0, first), *shots] if self.frames else [])
