"""What an attack is: from what the server sees of some victims to what it makes of their images."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from torch import Generator

from gradveil.core.errors import GradveilError
from gradveil.core.types import Observation, Reconstruction

Progress = Callable[[int, int], None]
"""(iterations done, of how many), for a progress bar."""


class Attack(ABC):
    """A frozen dataclass whose fields are its settings. Subclasses write `reconstruct`; callers call the attack."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of `Knowledge` fields that it cannot do without."""
        return ()

    @property
    def title(self) -> str:
        """What messages call it."""
        return str(self)

    @final
    def __call__(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress | None = None
    ) -> list[Reconstruction]:
        """One reconstruction for each victim. All must be victims of one model, with batches of one size."""
        if not seen:
            return []
        first = seen[0]
        for one in seen:
            if (
                one.model is not first.model
                or one.size != first.size
                or one.protocol != first.protocol
            ):
                raise GradveilError(
                    "victims attacked together must share one model, one batch size and one protocol"
                )
            one.knowledge.need(*self.needs, by=self.title)
        found = self.reconstruct(seen, rng, progress or _silent)
        assert len(found) == len(seen)
        return found

    @abstractmethod
    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        """The attack itself."""


def _silent(done: int, total: int) -> None:
    """No progress is shown."""
