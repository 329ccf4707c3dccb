"""The interface of an attack: observations of some victims in, a reconstruction of each out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final, overload

from torch import Generator

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import as_generator
from gradveil.core.types import Observation, Reconstruction

Progress = Callable[[int, int], None]
"""Called with (iterations done, iterations in all), for a progress bar."""


class Attack(ABC):
    """Reconstruct images from what clients share.

    A subclass is a frozen dataclass whose fields are its settings, and implements `reconstruct`;
    callers call the attack itself. Its number of iterations, if it iterates, is a field `steps`,
    and its number of attempts a field `restarts`, so that checks can run a short version of it.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the `Knowledge` fields without which the attack cannot run."""
        return ()

    @property
    def title(self) -> str:
        """The name of the attack in messages."""
        return str(self)

    @overload
    def __call__(
        self, seen: Observation, seed: int | Generator, progress: Progress | None = None
    ) -> Reconstruction: ...

    @overload
    def __call__(
        self, seen: Sequence[Observation], seed: int | Generator, progress: Progress | None = None
    ) -> list[Reconstruction]: ...

    @final
    def __call__(
        self,
        seen: Observation | Sequence[Observation],
        seed: int | Generator,
        progress: Progress | None = None,
    ) -> Reconstruction | list[Reconstruction]:
        """Return one reconstruction for one observation, or a list of them in the order of many.

        All victims must share one model, one batch size and one protocol. A generator given as
        `seed` is used as it is, and moves on.
        """
        if isinstance(seed, bool) or not isinstance(seed, int | Generator):
            raise GradveilError(f"seed {seed!r}: expected an int or a torch.Generator")
        victims = _victims(seen)
        for victim in victims:
            victim.knowledge.need(*self.needs, by=self.title)
        rng = as_generator(seed, "attack")
        found = self.reconstruct(victims, rng, progress or _ignore) if victims else []
        assert len(found) == len(victims)
        return found[0] if isinstance(seen, Observation) else found

    @abstractmethod
    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        """Return one reconstruction for each victim, in their order; there is at least one."""


def _victims(seen: object) -> list[Observation]:
    """Return the observations as a list; refuse anything else, and victims that do not fit."""
    if isinstance(seen, Observation):
        return [seen]
    if not isinstance(seen, Sequence) or isinstance(seen, str):
        raise _not_seen(seen)
    victims = []
    for victim in seen:
        if not isinstance(victim, Observation):
            raise _not_seen(victim)
        victims.append(victim)
    for victim in victims:
        if (
            victim.model is not victims[0].model
            or victim.size != victims[0].size
            or victim.protocol != victims[0].protocol
        ):
            raise GradveilError(
                "victims attacked together must share one model, one batch size and one protocol"
            )
    return victims


def _not_seen(value: object) -> GradveilError:
    return GradveilError(
        f"an attack got a value of type {type(value).__name__}: expected an Observation or a "
        "sequence of them, such as the `.seen` of what a client shares"
    )


def _ignore(done: int, total: int) -> None:
    """Show no progress."""
