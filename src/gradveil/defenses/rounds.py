"""What defended clients share, round after round, with all that is random drawn from streams of their own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain

import torch
from torch import Generator, Tensor, nn

from gradveil.core.draws import Draws, draw, draw_shapes, drawing
from gradveil.core.errors import GradveilError
from gradveil.core.gradients import Gradients, Loss
from gradveil.core.seeds import following
from gradveil.core.shares import Shares, in_mode
from gradveil.core.types import Batch, Protocol
from gradveil.defenses.base import Defense, Moment

MOST_VICTIMS = 64
MOST_IMAGES = 512  # in one pass, so that its memory has a bound


class Rounds:
    """What some victims share round after round, of the same batches at the same weights."""

    def __init__(
        self, model: nn.Module, loss: Loss, protocol: Protocol, defense: Defense, used: Sequence[Batch], streams: Sequence[Generator]
    ) -> None:
        self._model, self._loss, self._protocol, self._defense, self._used, self._streams = model, loss, protocol, defense, used, streams
        self._states = [defense.start() for _ in used]
        self._clean: list[Gradients] | None = None
        with self._mode():
            names = set(drawing(model))
            self._shapes = draw_shapes(model, used[0].images, names) if names else {}
        self._told = protocol.local_steps == 1
        self.shares = Shares(model, loss, protocol, told=self._shapes if self._told else ())

    def next(self) -> list[Gradients]:
        """Of each victim, in the order given."""
        with self._mode():
            drawn = [_drawn(self._model, self._shapes, batch, own) for batch, own in zip(self._used, self._streams, strict=True)]
        if self._clean is None or self._shapes:
            self._clean = self._gradients(drawn)
        found = []
        with self._mode():
            for victim, (gradients, batch, draws) in enumerate(zip(self._clean, self._used, drawn, strict=True)):
                moment = Moment(self._model, batch, self._loss, draws)
                shared = self._defense.protect_gradients(gradients, moment, self._states[victim], self._streams[victim])
                found.append(shared[0])
                self._states[victim] = shared[1]
        return found

    def _gradients(self, drawn: Sequence[Draws]) -> list[Gradients]:
        if self._told or not self._shapes:
            return list(chain.from_iterable(_shared(self.shares, self._used, drawn, some) for some in _chunks(self._used)))
        found: list[Gradients] = []
        for victim, own in enumerate(self._streams):  # each local step draws anew, from torch's generator
            with following(own):
                found += _shared(self.shares, self._used, [{}] * len(drawn), range(victim, victim + 1))
        return found

    def _mode(self) -> AbstractContextManager[None]:
        return in_mode(self._model, self._protocol.train_mode)


def _drawn(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], batch: Batch, rng: Generator) -> dict[str, Tensor]:
    """What the model's modules would draw in a pass of this batch, in the form that `core.draws.given` takes."""
    return {name: draw(model.get_submodule(name), (len(batch), *shape), batch.images, rng) for name, shape in shapes.items()}


def _chunks(batches: Sequence[Batch]) -> Iterator[range]:
    """Some victims at a time, by number."""
    step = max(1, min(MOST_VICTIMS, MOST_IMAGES // len(batches[0])))
    for first in range(0, len(batches), step):
        yield range(first, min(first + step, len(batches)))


def _shared(shares: Shares, batches: Sequence[Batch], drawn: Sequence[Draws], some: range) -> list[Gradients]:
    draws = {name: torch.stack([drawn[victim][name] for victim in some]) for name in drawn[some[0]]}
    images, labels = (torch.stack([getattr(batches[victim], part) for victim in some]) for part in ("images", "labels"))
    found = {name: value.detach() for name, value in shares(images, labels, draws=draws).items()}
    finite = torch.stack([value.flatten(1).isfinite().all(1) for value in found.values()])
    if not bool(finite.all()):
        layer, victim = (~finite).nonzero()[0].tolist()
        raise GradveilError(
            f"victim {some[victim]}: the gradient of {list(found)[layer]!r} is not finite: "
            "the loss or its slope overflows; take other weights, or fewer local steps at a lower rate"
        )
    alive = torch.stack([value.flatten(1).any(1) for value in found.values()]).any(0)
    if not bool(alive.all()):
        victim = int((~alive).nonzero()[0])
        raise GradveilError(f"victim {some[victim]}: the model's gradient is zero: dead or saturated; nothing can be matched")
    return [{name: value[number] for name, value in found.items()} for number in range(len(some))]
