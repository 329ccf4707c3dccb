"""How an image is prepared before the model sees it: random crop and flip, then the policy.

No paper states the crop and the flip, but every published run has them, in training and before the
victim's policy.
"""

from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from gradveil.core.errors import GradveilError
from gradveil.transforms.policy import Policy


@dataclass(frozen=True)
class Preparation:
    """Crop from a black border of `padding` pixels, mirror one image in two, apply the policy.

    It takes uint8 images (N, C, H, W) on any device.
    """

    padding: int = 4
    flip: bool = True
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise GradveilError(f"padding {self.padding}: it cannot be negative")

    def __call__(self, images: Tensor, rng: Generator) -> Tensor:
        return self.policy(crop_and_flip(images, self.padding, self.flip, rng), rng)


def crop_and_flip(
    images: Tensor, padding: int, flip: bool, rng: Generator, *, alike: int = 1
) -> Tensor:
    """Move each image by its random offset and, with `flip`, mirror it with probability 1/2.

    Every `alike` images in a row share their draws.
    """
    count, channels, height, width = images.shape
    draws = count // alike
    rows = _window(draws, height, padding, rng)
    columns = _window(draws, width, padding, rng)
    if flip:
        mirrored = torch.randint(0, 2, (draws, 1), generator=rng, device=rng.device).bool()
        columns = torch.where(mirrored, columns.flip(1), columns)
    if not padding and not flip:
        return images
    rows, columns = (
        index.repeat_interleave(alike, dim=0).to(images.device, non_blocking=True)
        for index in (rows, columns)
    )
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    image = torch.arange(count, device=images.device)[:, None, None, None]
    plane = torch.arange(channels, device=images.device)[None, :, None, None]
    return padded[image, plane, rows[:, None, :, None], columns[:, None, None, :]]


def _window(count: int, size: int, padding: int, rng: Generator) -> Tensor:
    """Draw for each image `size` neighboring positions in a line of `size + 2 * padding`."""
    start = torch.randint(0, 2 * padding + 1, (count, 1), generator=rng, device=rng.device)
    return start + torch.arange(size, device=rng.device)
