"""Independent streams of random numbers, each a function of one seed and a path of names."""

import hashlib

import torch
from torch import Generator


def generator(seed: int, *path: int | str) -> Generator:
    """A CPU generator for this seed and path, such as `generator(7, "train", epoch)`: other paths, other streams."""
    return Generator().manual_seed(derived(seed, *path))


def derived(seed: int, *path: int | str) -> int:
    """A 63-bit seed that depends on every part of the path."""
    digest = hashlib.sha256(repr((seed, *path)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def signs(count: int, rng: Generator | None) -> torch.Tensor:
    """`count` independent draws of -1 or +1, on the generator's device."""
    device = "cpu" if rng is None else rng.device
    return torch.randint(0, 2, (count,), generator=rng, device=device) * 2 - 1
