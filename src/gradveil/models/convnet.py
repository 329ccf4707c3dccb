"""ConvNet: nine 3x3 convolutions, each with batch norm and ReLU, and two max-pools of 3 (the paper's `8-layer` network)."""

from torch import nn

from gradveil.models.base import Task

WIDTHS = ((64, 128, 128, 256, 256, 256), (256, 256, 256))
POOL = 3


def convnet(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Weights start from torch's defaults."""
    task.at_least(POOL ** len(WIDTHS), "convnet")
    layers: list[nn.Module] = []
    width_in, side = task.channels, task.size
    for widths in WIDTHS:
        for width in widths:
            layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            width_in = width
        layers.append(nn.MaxPool2d(POOL))
        side //= POOL
    return nn.Sequential(*layers, nn.Flatten()), nn.Linear(width_in * side * side, task.classes)
