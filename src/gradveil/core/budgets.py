"""How many images may share a pass: what the memory takes that is there now."""

import os

import torch
from torch import Tensor, nn

from gradveil.core.shares import in_mode

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
        return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
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

    handles = [module.register_forward_hook(record) for module in model.modules() if not any(module.children())]
    try:
        model(image)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, largest
