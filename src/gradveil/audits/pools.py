"""The candidates an image is to be identified among, and how often that succeeds without having seen its gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.data import Images
from gradveil.scores import identify

CANDIDATES = 1_000


@dataclass(frozen=True, eq=False)
class Pool:
    """Images of the split, the victims' first; `used` are draws of the same preparation, `original` the images themselves."""

    indices: Tensor
    candidates: Mapping[str, Tensor]  # by truth: (K, C, H, W) in [0, 1]
    chance: Mapping[
        str, float
    ]  # by truth: of identifying an image by its class mean, or by luck where that is better

    def __len__(self) -> int:
        return len(self.indices)

    def identified(self, truth: str, found: Tensor, images: Tensor, true: Tensor) -> Tensor:
        """1 where `found` is nearer to its true image than to any other candidate. The true one replaces its own draw."""
        places = torch.stack([(self.indices == image).nonzero()[0, 0] for image in images])
        candidates = self.candidates[truth].clone()
        candidates[places] = true
        return identify(found, candidates, places)


def make_pool(
    split: Images,
    victims: Tensor,
    prepare: Callable[[Tensor, Generator], Tensor] | None,
    class_means: Tensor,
    batch_size: int,
    seed: int,
) -> Pool:
    """1,000 candidates, all of a smaller split, or the victims alone where they are more."""
    if len(split) < 2:
        raise GradveilError(
            f"{split.name} {split.split} has {len(split)} image: identification needs at least two"
        )
    order = torch.randperm(len(split), generator=generator(seed, "candidates", "order"))
    others = order[~torch.isin(order, victims)]
    indices = torch.cat([victims, others])[: max(CANDIDATES, len(victims))]
    pixels = split.images[indices]
    drawn = pixels if prepare is None else prepare(pixels, generator(seed, "candidates", "prepare"))
    candidates = {"used": drawn.float() / 255, "original": pixels.float() / 255}
    guesses, places = class_means[split.labels[indices]].float(), torch.arange(len(indices))
    rates = {
        truth: float(identify(guesses, images, places).mean())
        for truth, images in candidates.items()
    }
    # Any reconstruction of a batch may be taken for an image, so luck has as many tries.
    chance = {
        truth: min(1.0, batch_size * max(rate, 1 / len(indices))) for truth, rate in rates.items()
    }
    return Pool(indices, candidates, chance)
