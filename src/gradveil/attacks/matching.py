"""The one optimizer attack: find images whose gradients match the observed ones. Every published variant is a choice of parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from gradveil.attacks import priors
from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.distances import Distance, cosine
from gradveil.attacks.initial import Initial, Normal
from gradveil.attacks.labels import Joint, Known, Labels
from gradveil.attacks.optimizers import Adam, Optimizer, Search, Slopes
from gradveil.attacks.priors import Prior, PriorState
from gradveil.core.errors import GradveilError
from gradveil.core.gpu import tf32
from gradveil.core.memory import keep_freed_memory
from gradveil.core.shares import Shares
from gradveil.core.space import pixel_frame
from gradveil.core.types import Observation, Reconstruction, stacked


@dataclass(frozen=True)
class GradientMatching(Attack):
    """Minimize distance + prior over images in the model's normalized space, where published step sizes and N(0, 1) live.

    Victims and restarts are rows of one batch. Of a victim's restarts the one with the smallest gradient distance is kept, all
    that an attacker can judge by; one that diverged never is. `boxed` clips to valid pixels after each step. `fast` lets a GPU use
    shorter number formats: TF32, and bf16 for products of patches. `frames` pictures are kept of the way.
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

    def __post_init__(self) -> None:
        for name in ("steps", "restarts"):
            if getattr(self, name) < 1:
                raise GradveilError(f"{name} {getattr(self, name)}: an attack needs at least 1")

    def reconstruct(self, seen: Sequence[Observation], rng: Generator, progress: Progress) -> list[Reconstruction]:
        keep_freed_memory()
        with tf32(self.fast):
            problem = Problem(self, seen, rng)
            shots: list[tuple[int, Tensor]] = []
            wanted = {round(self.steps * part / self.frames) for part in range(1, self.frames + 1)} if self.frames else set()

            def after(step: int) -> None:
                progress(step, self.steps)
                if step in wanted:
                    shots.append((step, problem.pixels().cpu()))

            first = problem.pixels().cpu()
            self.optimizer.minimize(problem.search(self, after))
            shots = [(0, first), *shots] if self.frames else []
            return problem.best(shots, self.restarts)


class Problem:
    """The images looked for, victims x restarts rows of them, and what they are judged by."""

    def __init__(self, attack: GradientMatching, seen: Sequence[Observation], rng: Generator) -> None:
        first, rows, target = seen[0], len(seen) * attack.restarts, stacked(list(seen))
        device = next(iter(target.values())).device
        dtype = next(iter(target.values())).dtype
        self.mean, self.std = (part.to(device, dtype) for part in pixel_frame(first.model, first.image_shape))
        shape = (first.size, *first.image_shape)
        frame = self.mean.cpu(), self.std.cpu()
        self.images = attack.initial(rows, shape, rng, frame).to(device, dtype)
        self.joint = isinstance(attack.labels, Joint)
        self.labels = self._labels(attack.labels, seen, attack.restarts, rng).to(device)
        self.shares = Shares(first.model, first.loss, first.protocol, short=attack.fast)
        self.measure = attack.distance.against({name: part.repeat_interleave(attack.restarts, 0) for name, part in target.items()})
        self.prior, self.model, self.train_mode = attack.prior, first.model, first.protocol.train_mode

    @staticmethod
    def _labels(labels: Labels, seen: Sequence[Observation], restarts: int, rng: Generator) -> Tensor:
        if isinstance(labels, Joint):
            return labels.start(len(seen) * restarts, seen[0].size, seen[0].classes, rng).to(next(seen[0].model.parameters()).dtype)
        return labels.infer(seen, rng).repeat_interleave(restarts, 0)

    def search(self, attack: GradientMatching, after: Callable[[int], None]) -> Search:
        variables = [self.images, self.labels] if self.joint else [self.images]
        low, high = (0 - self.mean) / self.std, (1 - self.mean) / self.std

        def confine() -> None:
            if attack.boxed:
                self.images.clamp_(low, high)

        self._distances(*variables)  # a first run, so that a model is tried out before anything is captured
        replayable = self.images.is_cuda and self.shares.why_not is None and not attack.prior.waits
        return Search(variables, self.evaluate, attack.steps, attack.signed, attack.decay, confine, after, replayable)

    def evaluate(self) -> tuple[Tensor, Slopes]:
        leaves = [self.images.detach().requires_grad_()]
        leaves += [self.labels.detach().requires_grad_()] if self.joint else []
        with torch.enable_grad():
            losses = self._distances(*leaves, differentiable=True)
            state = PriorState(self.model, self._targets(*leaves[1:]), self.mean, self.std, self.train_mode)
            losses = losses + self.prior(leaves[0] * self.std + self.mean, state)
            return losses.detach(), list(torch.autograd.grad(losses.sum(), leaves))

    def _distances(self, images: Tensor, logits: Tensor | None = None, *, differentiable: bool = False) -> Tensor:
        targets = self._targets() if logits is None else self._targets(logits)
        return self.measure(self.shares(images * self.std + self.mean, targets, differentiable=differentiable))

    def _targets(self, logits: Tensor | None = None) -> Tensor:
        if not self.joint:
            return self.labels
        return (self.labels if logits is None else logits).softmax(-1)

    def pixels(self) -> Tensor:
        return (self.images * self.std + self.mean).clamp(0, 1)

    def best(self, shots: list[tuple[int, Tensor]], restarts: int) -> list[Reconstruction]:
        """Each victim's restart with the smallest finite distance."""
        finite = self.images.flatten(1).isfinite().all(1)
        distances = torch.where(finite, self._distances(self.images), torch.inf).nan_to_num(torch.inf, torch.inf, torch.inf)
        pixels = self.pixels().nan_to_num(0.5).cpu()
        labels = (self.labels.argmax(-1) if self.joint else self.labels).cpu()
        found = []
        for victim, row in enumerate(distances.view(-1, restarts).argmin(1).tolist()):
            index = victim * restarts + row
            distance = float(distances[index])
            status = "ok" if distance < float("inf") else "failed: every restart diverged"
            frames = torch.stack([shot[index] for _, shot in shots]) if shots else None
            found.append(Reconstruction(pixels[index], labels[index], distance, status, frames, tuple(step for step, _ in shots)))
        return found
