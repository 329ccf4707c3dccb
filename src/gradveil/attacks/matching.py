"""The one optimizer attack: find images whose gradients match the observed ones. Every published variant is a choice of parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Generator

from gradveil.attacks import priors
from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.distances import Distance, cosine
from gradveil.attacks.initial import Initial, Normal
from gradveil.attacks.joint import JointDraws
from gradveil.attacks.labels import Known, Labels
from gradveil.attacks.optimizers import Adam, Optimizer
from gradveil.attacks.priors import Prior
from gradveil.attacks.problems import Problem, Shots
from gradveil.attacks.through import Itself, Through
from gradveil.core.errors import GradveilError
from gradveil.core.gpu import tf32
from gradveil.core.memory import keep_freed_memory
from gradveil.core.types import Observation, Reconstruction


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
        parts = self.distance, self.initial, self.through, *(() if self.joint is None else (self.joint,))
        return (*labels, *(name for part in parts for name in part.needs))

    @property
    def title(self) -> str:
        return "by gradient matching"

    def reconstruct(self, seen: Sequence[Observation], rng: Generator, progress: Progress) -> list[Reconstruction]:
        if self.averaged and seen[0].size > 1:
            raise GradveilError(f"batch of {seen[0].size}: restarts find its images in different orders; only one image can be averaged")
        keep_freed_memory()
        with tf32(self.fast):
            problem = Problem(self, seen, rng)
            shots: Shots = []
            wanted = {round(self.steps * part / self.frames) for part in range(1, self.frames + 1)} if self.frames else set()

            def after(step: int) -> None:
                progress(step, self.steps)
                if step in wanted:
                    shots.append((step, problem.pixels().cpu()))

            first = problem.pixels().cpu()
            self.optimizer.minimize(problem.search(after))
            return problem.best([(0, first), *shots] if self.frames else [])
