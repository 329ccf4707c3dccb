"""PRECODE's deep MLP (DMLP): four hidden layers of 1,024 units with ReLU."""

from torch import nn

from gradveil.models.base import Task

WIDTH = 1024
HIDDEN = 4


def mlp(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Weights start from torch's defaults."""
    layers: list[nn.Module] = [nn.Flatten()]
    width_in = task.channels * task.size**2
    for _ in range(HIDDEN):
        layers += [nn.Linear(width_in, WIDTH), nn.ReLU()]
        width_in = WIDTH
    return nn.Sequential(*layers), nn.Linear(WIDTH, task.classes)
