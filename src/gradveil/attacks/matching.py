"""The optimizer attack: find images whose gradients match the observed ones.

Every published variant is a choice of its parts, see `presets`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Generator, Tensor

from gradveil.attacks import priors
from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.distances import Distance, Measure, cosine
from gradveil.attacks.hidden_draws import FreshDraws, HiddenDraws
from gradveil.attacks.labels import Known, LabelFinder
from gradveil.attacks.optimizers import Adam, Optimizer, Search, Slopes
from gradveil.attacks.policy_views import Itself, PolicyView, Views
from gradveil.attacks.priors import Prior, PriorState
from gradveil.attacks.races import Race
from gradveil.attacks.starts import Normal, Start, find_frame
from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation, Reconstruction, Statistics
from gradveil.engine.device import keep_freed_memory, sharing_cores, tf32
from gradveil.engine.draws import Draws
from gradveil.engine.shares import Shares

Frames = list[tuple[int, Tensor]]
"""(step, pixel images of all rows) at some steps of the search."""

RACING = {"cpu": 32, "cuda": 512}
"""Images in one pass of a race: as many as keep the device busy."""

T = TypeVar("T")


@dataclass(frozen=True)
class GradientMatching(Attack):
    """Minimize distance + prior over images in the model's normalized space.

    Published step sizes and N(0, 1) starts are meant for that space. Victims and restarts are rows
    of one batch. Of a victim's restarts the one with the smallest gradient distance is kept, all
    that an attacker can judge by, and never one that diverged; `averaged` takes the mean of the
    restarts instead.

    `signed` steps by the sign of the gradient, `decay` divides the learning rate by ten at 3/8, 5/8
    and 7/8 of the steps, `boxed` clips to valid pixels after each step. `fast` allows a GPU shorter
    number formats: TF32, and bf16 for products of patches. `frames` is how many pictures of the way
    are kept. `view` says whether to look for images before the client's policy, and `hidden` which
    draws of the model to look for too. With a `race`, many more restarts run a short way first.
    `tuned_on` are digests (`image_digest`) of the public images that the settings were chosen on:
    an audit refuses victims among them.
    """

    distance: Distance = cosine
    optimizer: Optimizer = field(default_factory=Adam)
    prior: Prior = priors.none
    start: Start = field(default_factory=Normal)
    labels: LabelFinder = field(default_factory=Known)
    steps: int = 4_800
    restarts: int = 1
    signed: bool = False
    boxed: bool = True
    decay: bool = True
    fast: bool = True
    frames: int = 8
    view: PolicyView = field(default_factory=Itself)
    hidden: HiddenDraws | None = None
    averaged: bool = False
    race: Race = field(default_factory=Race)
    tuned_on: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("steps", "restarts"):
            if getattr(self, name) < 1:
                raise GradveilError(f"{name} {getattr(self, name)}: an attack needs at least 1")

    @property
    def needs(self) -> tuple[str, ...]:
        hidden = () if self.hidden is None else self.hidden.needs
        return (
            *self.labels.needs,
            *self.distance.needs,
            *self.start.needs,
            *self.view.needs,
            *self.prior.needs,
            *hidden,
        )

    @property
    def title(self) -> str:
        return "by gradient matching"

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        if self.averaged and seen[0].size > 1:
            raise GradveilError(
                f"batch of {seen[0].size}: restarts find its images in different orders; "
                "only one image can be averaged"
            )
        keep_freed_memory()
        device = next(seen[0].model.parameters()).device
        with tf32(self.fast), sharing_cores(device) as look:
            stages = self.race.stages(self.restarts, self.steps)
            total = len(seen) * self.race.work(self.restarts, self.steps)
            count = _Count(progress, len(seen) * self.restarts, total, look)
            problem = Problem.draw(self, seen, rng, stages[0][0])
            for (_, steps), (kept, _) in pairwise(stages):
                problem = problem.after_heat(steps, kept, count)
            before = sum(steps for _, steps in stages[:-1])
            if not self.race.heats:
                return self._finish(problem, before, count)
            return problem.in_parts(lambda part: self._finish(part, before, count))

    def _finish(self, problem: "Problem", before: int, count: "_Count") -> list[Reconstruction]:
        """Make the search proper, after so many steps of heats."""
        problem.prior_weight = self.race.fade
        wanted = {round(self.steps * k / self.frames) for k in range(1, self.frames + 1)}
        frames: Frames = [(before, problem.pixels().cpu())] if self.frames else []

        def after(step: int) -> None:
            count.add(problem)
            if step in wanted:
                frames.append((before + step, problem.pixels().cpu()))

        self.optimizer.minimize(problem.search(self.steps, self.decay, after))
        return problem.best(frames)


@dataclass(frozen=True, eq=False)
class Rows:
    """The variables of a search and what belongs to them, in rows; a victim's are neighbors."""

    images: Tensor  # (rows, B, C, H, W), in the model's normalized space
    labels: Tensor  # (rows, B), or logits (rows, B, classes) where they are optimized
    draws: dict[str, Tensor]  # (rows, B, ...) by the name of the module
    views: Views

    def select(self, rows: slice | Tensor) -> "Rows":
        """Return these rows; those of a slice are views of the same memory."""
        numbers = torch.arange(len(self.images), device=self.images.device)[rows].tolist()
        draws = {name: values[rows] for name, values in self.draws.items()}
        return Rows(self.images[rows], self.labels[rows], draws, self.views.select(numbers))


class Problem:
    """The search for victims x restarts rows of images.

    Its variables are the images and, where asked for, labels and draws of the model. Rows do not
    depend on one another, so parts of a problem can be solved one after the other.
    """

    def __init__(
        self,
        attack: GradientMatching,
        seen: Sequence[Observation],
        rows: Rows,
        fresh: FreshDraws,
        shares: Shares,
    ) -> None:
        self.attack, self.seen, self.rows, first = attack, seen, rows, seen[0]
        self.fresh, self.shares = fresh, shares
        self.images, self.labels, self.draws = rows.images, rows.labels, rows.draws
        self.restarts = len(rows.images) // len(seen)
        self.prior_weight = 1.0
        self.mean, self.std = find_frame(first, rows.images.device)
        self.untold = bool(fresh.modules) and (
            first.protocol.moves(first.size) or attack.prior.passes
        )
        self.state = PriorState(
            first.model,
            self.labels,
            self.mean,
            self.std,
            first.protocol.train_mode,
            first.classes,
            _sent(seen, self.restarts) if "statistics" in attack.prior.needs else None,
            shares,
        )

    @classmethod
    def draw(
        cls,
        attack: GradientMatching,
        seen: Sequence[Observation],
        rng: Generator,
        restarts: int | None = None,
    ) -> "Problem":
        """Draw the starts of so many restarts of each victim; None are those of the attack."""
        # The order of these lines is the order of the random draws.
        first, restarts = seen[0], attack.restarts if restarts is None else restarts
        example = next(iter(first.gradients.values()))
        labels = attack.labels.bind(seen, rng, restarts).to(example.device)
        images = attack.start.bind(seen, rng, restarts, labels).to(example)
        draws = {} if attack.hidden is None else attack.hidden.bind(seen, rng, restarts)
        fresh = FreshDraws(first, draws, rng)
        views = attack.view.bind(seen, rng, restarts)
        shares = Shares(
            first.model,
            first.loss,
            first.protocol,
            short=attack.fast,
            told={*draws, *fresh.shapes},
        )
        return cls(attack, seen, Rows(images, labels, draws, views), fresh, shares)

    @cached_property
    def measure(self) -> Measure:
        """The distance of each row from its target."""
        return self.attack.distance.within(self.attack.steps).bind(self.seen, self.restarts)

    def in_parts(self, solve: Callable[["Problem"], list[T]], most: int | None = None) -> list[T]:
        """Solve the problem for some victims after the others, `most` images in a pass.

        None leaves it to the device. A part that does not fit into its memory is made in halves.
        """
        most = RACING.get(self.images.device.type, RACING["cpu"]) if most is None else most
        victims = max(1, most // (self.restarts * self.seen[0].size))
        found: list[T] = []
        for first in range(0, len(self.seen), victims):
            part = self._part(first, min(first + victims, len(self.seen)))
            try:
                found += solve(part)
            except torch.OutOfMemoryError:
                if len(part.seen) == 1:
                    raise
                torch.cuda.empty_cache()
                found += part.in_parts(solve, most // 2)
        return found

    def _part(self, first: int, last: int) -> "Problem":
        """Return the problem of these victims alone; it moves the same variables."""
        rows = self.rows.select(slice(first * self.restarts, last * self.restarts))
        return Problem(self.attack, self.seen[first:last], rows, self.fresh, self.shares)

    def after_heat(self, steps: int, kept: int, count: "_Count") -> "Problem":
        """Move all rows so many steps; return the problem of each victim's `kept` best rows."""

        def run(part: Problem) -> list[Tensor]:
            self.attack.optimizer.minimize(part.search(steps, False, lambda _: count.add(part)))
            return [*part.judge().view(-1, self.restarts)]

        distances = torch.stack(self.in_parts(run))
        best = distances.argsort(dim=1, stable=True)[:, :kept].sort(dim=1).values
        first = torch.arange(len(self.seen), device=best.device)[:, None] * self.restarts
        rows = self.rows.select((first + best).flatten())
        return Problem(self.attack, self.seen, rows, self.fresh, self.shares)

    @property
    def variables(self) -> list[Tensor]:
        """Images first, then label logits if they are optimized, then draws."""
        labels = [self.labels] if self.attack.labels.optimized else []
        return [self.images, *labels, *self.draws.values()]

    def search(self, steps: int, decay: bool, after: Callable[[int], None]) -> Search:
        """Return the search for an optimizer; it calls `after` with the number of each step."""
        attack = self.attack
        low, high = (0 - self.mean) / self.std, (1 - self.mean) / self.std
        # In a model's normalized space 0 is the mean color; without one it is black.
        gray = torch.where((self.mean == 0) & (self.std == 1), 0.5, 0.0)

        def confine() -> None:
            if attack.boxed:
                self.images.clamp_(low, high)

        self.distances(*self.variables)  # tries the model out before a step is captured
        replayable = self._replayable()
        # A step that is replayed reads draws from where they lie: new ones are made before it.
        fixed = self.fresh.empty(len(self.images)) if replayable else {}
        return Search(
            self.variables,
            partial(self.evaluate, fixed if replayable else None),
            steps,
            attack.signed,
            decay,
            confine,
            after,
            replayable,
            partial(self.fresh.refill, fixed),
            gray,
        )

    def _replayable(self) -> bool:
        """Tell whether a GPU may replay steps.

        It may not where a policy needs values back, or the model draws by itself: the generator is
        unknown to a capture.
        """
        return (
            self.images.is_cuda
            and self.shares.why_not is None
            and isinstance(self.attack.view, Itself)
            and not self.untold
        )

    def evaluate(self, fixed: Draws | None = None) -> tuple[Tensor, Slopes]:
        """Return the loss of each row, and the slope by each variable; see `distances`."""
        leaves = [variable.detach().requires_grad_() for variable in self.variables]
        with torch.enable_grad():
            distances = self.distances(*leaves, differentiable=True, fixed=fixed)
            losses = distances + self._penalties(*leaves)
            return losses.detach(), list(torch.autograd.grad(losses.sum(), leaves))

    def distances(
        self,
        images: Tensor,
        *others: Tensor,
        differentiable: bool = False,
        fixed: Draws | None = None,
    ) -> Tensor:
        """Return the distance of each row, the mean over the views of its images.

        The model's draws that are no variables are new ones, or these `fixed` ones.
        """
        labels, draws = self._split(*others)
        values = self._values(draws)
        each = []
        for view in self.rows.views(images * self.std + self.mean):
            drawn = {**values, **(self.fresh(len(images)) if fixed is None else fixed)}
            with self._model_randomness():
                each.append(
                    self.measure.from_shares(self.shares, view, labels, drawn, differentiable)
                )
        return each[0] if len(each) == 1 else torch.stack(each).mean(0)

    def _penalties(self, images: Tensor, *others: Tensor) -> Tensor:
        labels, draws = self._split(*others)
        pixels, state = images * self.std + self.mean, replace(self.state, labels=labels)
        with self._model_randomness():
            penalty = self.attack.prior(pixels, state)
        penalty = penalty if self.prior_weight == 1 else self.prior_weight * penalty
        hidden = self.attack.hidden
        return penalty if hidden is None else penalty + hidden.penalty(draws, self.state.model)

    def _model_randomness(self) -> AbstractContextManager[None]:
        """Seed the passes of a model that draws by itself."""
        return self.fresh.seeded() if self.untold else nullcontext()

    def _split(self, *others: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return labels, as probabilities where they are optimized, and the variables of draws."""
        optimized = self.attack.labels.optimized
        labels = others[0].softmax(-1) if optimized else self.labels
        return labels, dict(zip(self.draws, others[int(optimized) :], strict=True))

    def _values(self, draws: dict[str, Tensor]) -> dict[str, Tensor]:
        return {} if self.attack.hidden is None else self.attack.hidden.values(draws)

    def pixels(self) -> Tensor:
        """Return the images in [0, 1]."""
        return (self.images * self.std + self.mean).clamp(0, 1)

    def best(self, frames: Frames) -> list[Reconstruction]:
        """Return each victim's restart with the smallest distance, or the mean of its restarts."""
        restarts = self.restarts
        if self.attack.averaged:
            lost = (self.judge() == torch.inf).view(-1, *(1,) * (self.images.dim() - 1))
            self.images.copy_(_average(self.images.masked_fill(lost, torch.nan), restarts))
            frames = [(step, _average(frame, restarts)) for step, frame in frames]
        distances = self.judge().view(-1, restarts)
        return [
            self._reconstruction(number * restarts + row, float(distances[number, row]), frames)
            for number, row in enumerate(distances.argmin(1).tolist())
        ]

    def judge(self) -> Tensor:
        """Return the distance of each row, infinite where it diverged."""
        finite = self.images.flatten(1).isfinite().all(1)
        distances = torch.where(finite, self.distances(*self.variables), torch.inf)
        return distances.nan_to_num(torch.inf, torch.inf, torch.inf)

    def _reconstruction(self, row: int, distance: float, frames: Frames) -> Reconstruction:
        labels = self.labels.argmax(-1) if self.attack.labels.optimized else self.labels
        values = self._values(self.draws)
        return Reconstruction(
            self.pixels()[row].nan_to_num(0.5).cpu(),
            labels[row].cpu(),
            distance,
            "ok" if distance < float("inf") else "failed: every restart diverged",
            torch.stack([frame[row] for _, frame in frames]) if frames else None,
            tuple(step for step, _ in frames),
            self.attack.view.aims_at,
            {name: value[row].detach().cpu() for name, value in values.items()},
        )


def _sent(seen: Sequence[Observation], restarts: int) -> Statistics:
    """Return the running statistics that each row's client sent, (rows, channels) by name."""
    each = [victim.knowledge.statistics or {} for victim in seen]
    return {
        name: torch.stack([its[name] for its in each]).repeat_interleave(restarts, 0)
        for name in each[0]
    }


def _average(rows: Tensor, restarts: int) -> Tensor:
    """Replace each restart by the mean of the victim's restarts, of those that are not NaN."""
    each: Tensor = rows.unflatten(0, (-1, restarts))
    return each.nanmean(1, keepdim=True).expand_as(each).flatten(0, 1)


@dataclass
class _Count:
    """Tell a progress function of steps, however many rows each moves.

    `look` is called at each step. `unit` rows are those of a step of the search proper; `total` and
    `done` count single rows.
    """

    progress: Progress
    unit: int
    total: int
    look: Callable[[], None]
    done: int = 0

    def add(self, problem: Problem) -> None:
        """Count a step of this problem."""
        self.look()
        before, self.done = self.done, self.done + len(problem.images)
        for number in range(before // self.unit, self.done // self.unit):
            self.progress(number + 1, self.total // self.unit)
