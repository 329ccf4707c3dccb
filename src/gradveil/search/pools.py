"""Actors of a Ray cluster that share out work: each piece goes to whichever is free, and again to another when that one is lost."""

import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from gradveil.core.errors import GradveilError, GradveilWarning, one_line

LOSSES = 3  # of workers on the same piece of work, after which it is to blame
LONGEST = 200  # letters of Ray's own words
START = 120.0  # seconds for the first worker to be there


class Pool:
    """`make` gives an actor with the methods `ready` and `work`."""

    def __init__(self, make: Callable[[], Any], size: int) -> None:
        self._make = make
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[Any, int | None]] = {}  # by the reference of a result: the actor, and which piece it is at
        self._lost: Counter[int | None] = Counter()
        for _ in range(size):
            self._add()

    def run(self, work: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`actor.work(*piece)` for each piece, in their order. After an error the pool can only be closed."""
        import ray

        todo = deque(range(len(work)))
        results: dict[int, Any] = {}
        self._lost.clear()
        while len(results) < len(work):
            while todo and self._idle:
                actor, piece = self._idle.pop(), todo.popleft()
                self._running[actor.work.remote(*work[piece])] = actor, piece
            for reference in self._wait():
                actor, done = self._running.pop(reference)
                try:
                    found = ray.get(reference)
                except ray.exceptions.RayError as error:
                    self._replace(done, error)
                    todo.extendleft([] if done is None else [done])
                    continue
                self._idle.append(actor)
                if done is not None:
                    results[done] = found
        return [results[piece] for piece in range(len(work))]

    def close(self) -> None:
        import ray

        for actor in [*self._idle, *(actor for actor, _ in self._running.values())]:
            ray.kill(actor)
        self._idle, self._running = [], {}

    def _add(self) -> None:
        actor = self._make()
        self._running[actor.ready.remote()] = actor, None

    def _wait(self) -> list[Any]:
        """What is done, at least one."""
        import ray

        starting = all(piece is None for _, piece in self._running.values()) and not self._idle
        done, _ = ray.wait(list(self._running), timeout=START if starting else None)
        if not done:
            raise GradveilError(f"no worker of the Ray cluster started within {START:.0f} s: its GPUs or cores are taken by others")
        return list(done)

    def _replace(self, piece: int | None, error: Exception) -> None:
        """A lost worker by another; an error of the work itself is raised."""
        if not is_loss(error):
            raise own_error(error) from None
        self._lost[piece] += 1
        if self._lost[piece] > LOSSES:
            raise own_error(error) from None
        warnings.warn("a worker of the Ray cluster was lost: its work is done again by another", GradveilWarning, stacklevel=3)
        self._add()


def is_loss(error: Exception) -> bool:
    """Whether a process or machine went away, rather than the work or the start of a worker failing by itself."""
    import ray

    gone = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError)
    return isinstance(error, gone) and not getattr(error, "actor_init_failed", False)


def own_error(error: Exception) -> Exception:
    """What the work itself raised, as it was raised there; else Ray's error as one line."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        return error.cause if isinstance(error.cause, GradveilError) else error
    return GradveilError(f"the Ray cluster failed: {one_line(error, LONGEST)}")
