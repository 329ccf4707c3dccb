"""The LeNet of DLG and PRECODE: four 5x5 convolutions of 12 channels with sigmoids, and one linear layer."""

from torch import nn

from gradveil.models.base import Task

WIDTH = 12
STRIDES = (2, 2, 1, 1)


def lenet(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Weights and biases start uniform in [-0.5, 0.5]: with torch's smaller ones the sigmoids' gradients vanish and no attack works."""
    task.at_least(4, "lenet")
    layers: list[nn.Module] = []
    width_in, side = task.channels, task.size
    for stride in STRIDES:
        layers += [nn.Conv2d(width_in, WIDTH, 5, stride, padding=2), nn.Sigmoid()]
        width_in = WIDTH
        side = (side - 1) // stride + 1
    features, head = nn.Sequential(*layers, nn.Flatten()), nn.Linear(WIDTH * side * side, task.classes)
    for parameter in (*features.parameters(), *head.parameters()):
        nn.init.uniform_(parameter, -0.5, 0.5)
    return features, head
