"""A function of no arguments that is captured once as a CUDA graph and then replayed, without a launch for every kernel."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

WARM_UP = 3  # plain runs on a side stream before a capture, as torch asks for; they count like any other
T = TypeVar("T")


class Replayed(Generic[T]):
    """Calls the function a few times, then replays it. It must read tensors that stay where they are.

    What it returned when it was captured is returned from then on: each replay writes new values into the same tensors.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> T:
        if self._calls < WARM_UP:
            self._calls += 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                found = self._function()
            torch.cuda.current_stream().wait_stream(self._stream)
            return found
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._found = self._function()
            torch.cuda.synchronize()  # capturing zeroes the generator's offset on another stream: late, that would undo the replay's
        self._graph.replay()
        return self._found
