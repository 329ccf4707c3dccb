"""A replayed function on a GPU draws what a plain one would."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gradveil.engine.device import Replayed

A_WHILE = 200_000_000  # cycles of the GPU's clock: a tenth of a second


@contextmanager
def late(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """A capture whose stream is held up, as happens on a GPU that other processes use too."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(A_WHILE)
        graph.capture_begin()
        yield
        graph.capture_end()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_draws_of_replays_are_those_of_plain_calls_however_late_the_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drawn() -> torch.Tensor:
        torch.cuda._sleep(2 * A_WHILE)  # meanwhile the capture's stream catches up
        return torch.rand(4, device="cuda")

    before = Replayed(drawn)  # a process's first capture waits for the GPU by itself
    for _ in range(5):
        before()
    torch.cuda.manual_seed(0)
    plain = [drawn() for _ in range(6)]
    torch.cuda.manual_seed(0)
    monkeypatch.setattr(torch.cuda, "graph", late)
    replayed = Replayed(drawn)
    for call, expected in enumerate(plain):
        assert torch.equal(replayed().clone(), expected), call
