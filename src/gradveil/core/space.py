"""The two spaces an image lives in: pixels in [0, 1], and the normalized values z that a model's layers see; pixel = z * std + mean."""

import torch
from torch import Tensor, nn

Frame = tuple[Tensor, Tensor]
"""(mean, std), each (C, 1, 1)."""


def pixel_frame(model: nn.Module, image_shape: tuple[int, int, int]) -> Frame:
    """The constants of the model's own normalization, or zeros and ones where it has none.

    It is the first module, in the order of registration, whose own buffers are exactly `mean` and `std`, each one number or one for
    each channel.
    """
    channels = image_shape[0]
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if buffers.keys() == {"mean", "std"} and all(buffer.numel() in (1, channels) for buffer in buffers.values()):
            mean, std = (buffers[name].detach().reshape(-1, 1, 1).expand(channels, 1, 1) for name in ("mean", "std"))
            return mean, std
    like = next(model.parameters(), torch.zeros(()))
    return torch.zeros(channels, 1, 1).to(like), torch.ones(channels, 1, 1).to(like)
