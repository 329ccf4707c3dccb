"""Independent streams of random numbers, each a function of one seed and a path of names."""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Generator


def generator(seed: int, *path: int | str) -> Generator:
    """Return a CPU generator for this seed and path, such as `generator(7, "train", epoch)`.

    Other paths give other streams.
    """
    return Generator().manual_seed(derived(seed, *path))


def as_generator(seed: int | Generator, *path: int | str) -> Generator:
    """Return the generator itself, or the one that an int stands for (see `generator`)."""
    return seed if isinstance(seed, Generator) else generator(seed, *path)


def derived(seed: int, *path: int | str) -> int:
    """Return a 63-bit seed that depends on every part of the path."""
    digest = hashlib.sha256(repr((seed, *path)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def drawn_seed(rng: Generator) -> int:
    """Draw a seed for another stream."""
    return int(torch.randint(2**62, (), generator=rng, device=rng.device))


def forked() -> AbstractContextManager[None]:
    """Leave torch's global generators, of every device, as they were before the block."""
    return torch.random.fork_rng(range(torch.cuda.device_count()))


@contextmanager
def following(rng: Generator) -> Iterator[None]:
    """Let torch's global generators follow `rng` for a while, then put them back as they were.

    Models that draw in a pass (dropout, PRECODE) use the global ones.
    """
    seed = drawn_seed(rng)
    with forked():
        if torch.cuda.is_available():
            torch.manual_seed(seed)
        else:  # the same draws; for GPUs that are not there, the other notes the stack each time
            torch.default_generator.manual_seed(seed)
        yield


def signs(count: int, rng: Generator | None) -> torch.Tensor:
    """Draw -1 or +1, (count,), on the generator's device."""
    device = "cpu" if rng is None else rng.device
    return torch.randint(0, 2, (count,), generator=rng, device=device) * 2 - 1
