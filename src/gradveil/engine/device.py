"""The device and its means: where to compute, how much fits, number formats, CUDA graphs."""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, unknown
from gradveil.engine.gradients import in_mode

DEVICES = ("auto", "cpu", "cuda")
MEMORY_SHARE = 0.25  # of the free memory: others need some, and the estimate is rough
UNKNOWN_MEMORY = 2 * 2**30  # bytes taken as free where the system does not tell
MOST_IMAGES = {"cpu": 42, "cuda": 8_400}  # in a pass: with more it gets no faster
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # from glibc's malloc.h
LOOK = 0.15  # seconds between two looks at how busy the machine is
CROWDED = 0.85  # share of its threads' time that a process alone on its cores has at least
SPARE = 0.25  # of a core may be lacking for a thread of its own
WARM_UP = 3  # plain runs before a capture, as torch asks for; they count like any other

T = TypeVar("T")


def find_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is the GPU where there is one."""
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise GradveilError("device cuda: this torch sees no GPU; choose cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and there) else "cpu")


@cache
def keep_freed_memory() -> bool:
    """Tell glibc, once, to keep large buffers; return whether it could be told.

    An attack allocates the same tens of megabytes thousands of times. By default each is mapped,
    filled with zeros page by page and unmapped again, which takes most of the time on a CPU.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    wanted = ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28))
    return all(bool(mallopt(option, value)) for option, value in wanted)


def images_at_once(model: nn.Module, images: Tensor, *, short: bool = False) -> int:
    """Return how many images like the first fit into a pass with a gradient for each.

    With `short`, numbers take two bytes and no patches are laid out.
    """
    with torch.no_grad(), in_mode(model, False):
        outputs, largest = _numbers(model, images[:1])
    need = 4 * outputs if short else (2 * outputs + 2 * largest) * images.element_size()
    most = MOST_IMAGES.get(images.device.type, MOST_IMAGES["cpu"])
    return max(1, min(most, int(MEMORY_SHARE * free_memory(images.device) / need)))


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the device, torch's reserve included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return UNKNOWN_MEMORY


def _numbers(model: nn.Module, image: Tensor) -> tuple[int, int]:
    """Count the numbers held for an image: in all layers' outputs, and in the largest layer.

    A layer holds its patches and its weight gradient. Loss gradients double the outputs.
    """
    outputs, largest = 0, 0

    def record(layer: nn.Module, _: object, output: Tensor) -> None:
        nonlocal outputs, largest
        if not isinstance(output, Tensor):
            return
        outputs += output.numel()
        held = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        if isinstance(layer, nn.Conv2d):
            area = layer.kernel_size[0] * layer.kernel_size[1]
            held += output[0, 0].numel() * area * layer.in_channels
        largest = max(largest, held)

    handles = [
        module.register_forward_hook(record)
        for module in model.modules()
        if not any(module.children())
    ]
    try:
        model(image)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, largest


@contextmanager
def sharing_cores(device: torch.device) -> Iterator[Callable[[], None]]:
    """Give a function for every iteration on a CPU, which sees whether others use its cores.

    Torch's threads spin while they wait for each other. Alone, they have all their cores' time.
    Beside other programs they wait for a thread that has no core, and one thread is up to 20 times
    as fast. So it begins with as many threads as there are free cores, where the system tells; and
    once they had less than `CROWDED` of their time in two looks in a row, the rest goes on with
    one. Within a long piece of work, each of its parts counts the free cores anew.
    """
    had = torch.get_num_threads()
    most = max(had, _ALLOWED.get())
    if device.type != "cpu" or most == 1:
        yield lambda: None
        return
    allowed = _ALLOWED.set(most)
    threads = max(1, min(most, int((os.cpu_count() or most) - _OTHERS() + SPARE)))
    torch.set_num_threads(threads)
    wall, busy, before = time.perf_counter(), time.process_time(), False

    def look() -> None:
        nonlocal wall, busy, before
        passed = time.perf_counter() - wall
        if passed < LOOK or torch.get_num_threads() == 1:
            return
        used = time.process_time() - busy
        crowded = used < CROWDED * threads * passed
        if crowded and before:
            torch.set_num_threads(1)
        wall, busy, before = wall + passed, busy + used, crowded

    try:
        yield look
    finally:
        torch.set_num_threads(had)
        _ALLOWED.reset(allowed)


_ALLOWED = ContextVar("threads", default=1)
"""How many threads torch had where the outermost piece of work began."""


class _OtherPrograms:
    """How many cores other programs used since the last look; 0 where the system does not tell."""

    def __init__(self) -> None:
        self._cores, self._last = 0.0, self._times()

    def __call__(self) -> float:
        now = self._times()
        passed, spent, ours = (
            after - before for after, before in zip(now, self._last, strict=True)
        )
        if passed >= LOOK:
            self._cores, self._last = max(0.0, (spent - ours) / passed), now
        return self._cores

    @staticmethod
    def _times() -> tuple[float, float, float]:
        """Return the clock, and the seconds of the processor of all programs and of this one."""
        ours = time.process_time()
        try:
            first = Path("/proc/stat").read_text().split("\n", 1)[0]
            user, nice, system, _, _, *others = map(int, first.split()[1:9])
            spent = (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):  # not on Linux
            spent = ours
        return time.perf_counter(), spent, ours


_OTHERS = _OtherPrograms()


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in products and convolutions for a while."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if not torch.cuda.is_available():
        yield
        return
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


class Replayed(Generic[T]):
    """Call the function a few times, then replay it as a CUDA graph.

    The function must read tensors that stay where they are. Each replay writes new values into the
    tensors that the captured call returned, and returns these.
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
            # Capturing zeroes the generator's offset on another stream: late, that would undo the
            # replay's.
            torch.cuda.synchronize()
        self._graph.replay()
        return self._found
