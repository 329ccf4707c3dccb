"""Where to compute."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, unknown
from gradveil.engine.gradients import in_mode

CHOICES = ("auto", "cpu", "cuda")


def find_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name not in CHOICES:
        raise unknown("device", name, CHOICES)
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise GradveilError("device cuda: this torch sees no GPU; choose cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and there) else "cpu")


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # from glibc's malloc.h


@cache
def keep_freed_memory() -> bool:
    """Tell glibc, once, not to give large buffers back to the system and fetch them again. Whether it could be told.

    An attack allocates the same tens of megabytes thousands of times. By default each is mapped, filled with zeros page by page
    and unmapped again, which takes most of the time on a CPU.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    wanted = ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28))
    return all(bool(mallopt(option, value)) for option, value in wanted)


SHARE = 0.25  # of the free memory: other things need some, and the estimate is rough
UNKNOWN = 2 * 2**30  # bytes taken as free where the system does not tell
MOST = {"cpu": 42, "cuda": 8_400}  # images: beyond these a pass gets no faster


def images_at_once(model: nn.Module, images: Tensor, *, short: bool = False) -> int:
    """For passes with a gradient for each image, like the first of these. `short`: in two bytes a number, with no patches laid out."""
    with torch.no_grad(), in_mode(model, False):
        outputs, largest = _numbers(model, images[:1])
    need = 4 * outputs if short else (2 * outputs + 2 * largest) * images.element_size()
    most = MOST.get(images.device.type, MOST["cpu"])
    return max(1, min(most, int(SHARE * free_memory(images.device) / need)))


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return (
            int(torch.cuda.mem_get_info(device)[0])
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return UNKNOWN


def _numbers(model: nn.Module, image: Tensor) -> tuple[int, int]:
    """Held for one image: in all layers' outputs (and as many loss gradients there), and in one layer's patches and weight gradient."""
    outputs, largest = 0, 0

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal outputs, largest
        if not isinstance(output, Tensor):
            return
        outputs += output.numel()
        own = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        area = layer.kernel_size[0] * layer.kernel_size[1] if isinstance(layer, nn.Conv2d) else 1
        positions = output[0, 0].numel() if isinstance(layer, nn.Conv2d) else 0
        largest = max(largest, own + positions * area * inputs[0].shape[1] if positions else own)

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


def suits(tensor: Tensor) -> bool:
    """On a GPU, with Triton, in a format of at most 32 bits: the kernels add up in float32."""
    return (
        tensor.is_cuda
        and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and _has_triton()
    )


def load_kernels() -> ModuleType:
    from gradveil.engine import kernels as kernels

    return kernels


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """TF32 for products and convolutions, or not, for a while."""
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if not torch.cuda.is_available():
        yield
        return
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


WARM_UP = (
    3  # plain runs on a side stream before a capture, as torch asks for; they count like any other
)
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
