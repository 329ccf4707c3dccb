"""Networks of the experiments that are not built in.

The built-in networks with CIFAR-10's constants of normalization, which the paper's code has:
it trains and attacks models of CIFAR-100 with the mean and deviation of CIFAR-10. A training names
these as `gradveil.papers.networks:resnet20_4`, and so on; their weights at the start are those of
the built-in network of the same seed. And ResNet-18, as a user would bring it.
"""

from torch import nn

from gradveil.data.cifar import CIFAR10
from gradveil.models import ARCHITECTURES, Classifier, Normalize, Task
from gradveil.models.zoo import Block

OF_DATA, CIFAR10_CONSTANTS = "data", "cifar10"
RESNET18 = f"{__name__}:resnet18"
CONSTANTS = (OF_DATA, CIFAR10_CONSTANTS)


def with_constants(model: str, constants: str) -> str:
    """Return the name of a network that normalizes by the constants of its data, or cifar10."""
    if constants == OF_DATA:
        return model
    return f"{__name__}:{model.replace('-', '_')}"


def resnet20_4(channels: int, size: int, classes: int) -> nn.Module:
    """Make resnet20-4 for images of 3 channels."""
    return _make("resnet20-4", Task(channels, size, classes))


def convnet(channels: int, size: int, classes: int) -> nn.Module:
    """Make the convnet of eight layers for images of 3 channels."""
    return _make("convnet", Task(channels, size, classes))


def convnet_9(channels: int, size: int, classes: int) -> nn.Module:
    """Make the convnet of nine layers for images of 3 channels."""
    return _make("convnet-9", Task(channels, size, classes))


def lenet(channels: int, size: int, classes: int) -> nn.Module:
    """Make lenet for images of 3 channels."""
    return _make("lenet", Task(channels, size, classes))


def resnet18(channels: int, classes: int) -> nn.Module:
    """Make a ResNet-18 (He et al. 2016): a quarter of the pixels is left after its first layers."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    before = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(before, wide, stride), Block(wide, wide, 1)]
        before = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def _make(name: str, task: Task) -> nn.Module:
    normalize = Normalize(task.channels, CIFAR10.mean, CIFAR10.std)
    return Classifier(normalize, *ARCHITECTURES[name](task))


def cnn_with_norm(channels: int, size: int, classes: int) -> nn.Module:
    """Make the network of Flower's quickstart with batch norm behind its convolutions."""
    layers: list[nn.Module] = []
    for before, after in ((channels, 6), (6, 16)):
        layers += [nn.Conv2d(before, after, 5), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        size = (size - 4) // 2
    dense = nn.Linear(16 * size**2, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), *dense, nn.Linear(84, classes))
