"""ResNet20-4, a CIFAR residual network: 3 stages of 3 basic blocks, four times the usual width."""

from torch import Tensor, nn

from gradveil.models.base import Mean, Task

WIDTHS = (64, 128, 256)
BLOCKS = 3


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)); the shortcut is a 1x1 convolution where the shape changes."""

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
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return out


def resnet20_4(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Convolutions start from Kaiming's normal law (fan out), the rest from torch's defaults."""
    task.at_least(4, "resnet20-4")
    layers: list[nn.Module] = [nn.Conv2d(task.channels, WIDTHS[0], 3, padding=1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()]
    width_in = WIDTHS[0]
    for width in WIDTHS:
        for block in range(BLOCKS):
            stride = 2 if block == 0 and width != WIDTHS[0] else 1
            layers.append(Block(width_in, width, stride))
            width_in = width
    features = nn.Sequential(*layers, Mean(2, 3))
    for module in features.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return features, nn.Linear(WIDTHS[-1], task.classes)
