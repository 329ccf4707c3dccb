"""The built-in architectures, each a function of the task: (features, head).

ResNet20-4 is a CIFAR residual network of 3 stages of 3 basic blocks, four times the usual width.
ConvNet stacks 8 or 9 convolutions; LeNet is the small sigmoid network of the first attacks; MLP has
four hidden layers; ViT is a small vision transformer.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.models.base import Mean, Task

RESNET_WIDTHS = (64, 128, 256)
RESNET_BLOCKS = 3
CONVNET_WIDTHS = ((64, 128, 128, 256, 256, 256), (256, 256))
CONVNET_9_WIDTHS = ((64, 128, 128, 256, 256, 256), (256, 256, 256))
CONVNET_POOL = 3
LENET_WIDTH = 12
LENET_STRIDES = (2, 2, 1, 1)
MLP_WIDTH = 1024
MLP_LAYERS = 4
VIT_PATCH = 4
VIT_WIDTH = 192
VIT_HEADS = 3
VIT_LAYERS = 6
VIT_EXPANSION = 4


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)).

    The shortcut is a 1x1 convolution where the shape changes.
    """

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return out


def resnet20_4(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Start convolutions from Kaiming's normal law (fan out), the rest from torch's defaults."""
    task.at_least(4, "resnet20-4")
    layers: list[nn.Module] = [
        nn.Conv2d(task.channels, RESNET_WIDTHS[0], 3, padding=1, bias=False),
        nn.BatchNorm2d(RESNET_WIDTHS[0]),
        nn.ReLU(),
    ]
    width_in = RESNET_WIDTHS[0]
    for width in RESNET_WIDTHS:
        for block in range(RESNET_BLOCKS):
            stride = 2 if block == 0 and width != RESNET_WIDTHS[0] else 1
            layers.append(Block(width_in, width, stride))
            width_in = width
    features = nn.Sequential(*layers, Mean(2, 3))
    for module in features.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return features, nn.Linear(RESNET_WIDTHS[-1], task.classes)


def convnet(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Make the paper's eight convolutions. Start weights from torch's defaults.

    The paper's code gives two layers the same name, so that one takes the other's place.
    """
    return _convnet(task, CONVNET_WIDTHS, "convnet")


def convnet_9(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Make the replication's nine convolutions: three of 256 between the pools."""
    return _convnet(task, CONVNET_9_WIDTHS, "convnet-9")


def _convnet(
    task: Task, stages: Sequence[Sequence[int]], name: str
) -> tuple[nn.Sequential, nn.Linear]:
    task.at_least(CONVNET_POOL ** len(stages), name)
    layers: list[nn.Module] = []
    width_in, side = task.channels, task.size
    for widths in stages:
        for width in widths:
            layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            width_in = width
        layers.append(nn.MaxPool2d(CONVNET_POOL))
        side //= CONVNET_POOL
    return nn.Sequential(*layers, nn.Flatten()), nn.Linear(width_in * side * side, task.classes)


def lenet(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Start weights and biases uniform in [-0.5, 0.5].

    With torch's smaller ones the sigmoids' gradients vanish and no attack works.
    """
    task.at_least(4, "lenet")
    layers: list[nn.Module] = []
    width_in, side = task.channels, task.size
    for stride in LENET_STRIDES:
        layers += [nn.Conv2d(width_in, LENET_WIDTH, 5, stride, padding=2), nn.Sigmoid()]
        width_in = LENET_WIDTH
        side = (side - 1) // stride + 1
    features = nn.Sequential(*layers, nn.Flatten())
    head = nn.Linear(LENET_WIDTH * side * side, task.classes)
    for parameter in (*features.parameters(), *head.parameters()):
        nn.init.uniform_(parameter, -0.5, 0.5)
    return features, head


def mlp(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Start weights from torch's defaults."""
    layers: list[nn.Module] = [nn.Flatten()]
    width_in = task.channels * task.size**2
    for _ in range(MLP_LAYERS):
        layers += [nn.Linear(width_in, MLP_WIDTH), nn.ReLU()]
        width_in = MLP_WIDTH
    return nn.Sequential(*layers), nn.Linear(MLP_WIDTH, task.classes)


class Tokens(nn.Module):
    """A vector for each patch, plus a learned vector for its position."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, VIT_WIDTH, VIT_PATCH, stride=VIT_PATCH)
        self.position = nn.Parameter(torch.empty(1, (size // VIT_PATCH) ** 2, VIT_WIDTH))
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.patches(images)
        return tokens.flatten(2).transpose(1, 2) + self.position


class Attention(nn.Module):
    """softmax(q k' / sqrt(d)) v for each head.

    It is written in plain products: fused kernels have no second derivative.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(VIT_WIDTH, 3 * VIT_WIDTH)
        self.out = nn.Linear(VIT_WIDTH, VIT_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        query, key, value = (
            self.qkv(x).view(count, length, 3, VIT_HEADS, width // VIT_HEADS).permute(2, 0, 3, 1, 4)
        )
        weights = (query @ key.transpose(-2, -1) / math.sqrt(width // VIT_HEADS)).softmax(dim=-1)
        mixed: Tensor = self.out((weights @ value).transpose(1, 2).reshape(count, length, width))
        return mixed


class Layer(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(VIT_WIDTH), Attention())
        self.perceptron = nn.Sequential(
            nn.LayerNorm(VIT_WIDTH),
            nn.Linear(VIT_WIDTH, VIT_EXPANSION * VIT_WIDTH),
            nn.GELU(),
            nn.Linear(VIT_EXPANSION * VIT_WIDTH, VIT_WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x + self.perceptron(x)
        return out


def vit(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Start positions from a truncated normal law (std 0.02), weights from torch's defaults."""
    task.at_least(VIT_PATCH, "vit")
    if task.size % VIT_PATCH:
        raise GradveilError(
            f"size is {task.size}: vit cuts images into {VIT_PATCH} x {VIT_PATCH} patches, "
            f"so it needs a multiple of {VIT_PATCH}"
        )
    layers = [Layer() for _ in range(VIT_LAYERS)]  # first: weights are drawn in this order
    tokens = Tokens(task.channels, task.size)
    features = nn.Sequential(tokens, *layers, nn.LayerNorm(VIT_WIDTH), Mean(1))
    return features, nn.Linear(VIT_WIDTH, task.classes)
