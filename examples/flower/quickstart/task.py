"""The model, the images of each client, and local training: plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.data import load


class Net(nn.Module):
    """The CNN of Flower's quickstart, for images (N, 1, 28, 28) in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = (
            nn.Linear(16 * 4 * 4, 120),
            nn.Linear(120, 84),
            nn.Linear(84, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(images)))
        x = self.pool(F.relu(self.conv2(x))).flatten(1)
        answers: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return answers


def make(_: object = None) -> nn.Module:
    """Make the model: for `gradveil reconstruct --model quickstart.task:make`."""
    torch.manual_seed(0)
    return Net()


def load_share(client: int, count: int) -> tuple[Tensor, Tensor]:
    """Return a client's images, (count, 1, 28, 28) in [0, 1], and their labels."""
    split = load("fashion-mnist-mini", "train")
    some = slice(client * count, (client + 1) * count)
    return split.images[some].float() / 255, split.labels[some]


def train(
    model: nn.Module, images: Tensor, labels: Tensor, epochs: int, size: int, lr: float
) -> None:
    """Train the model in place with SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    model.train()
    for _ in range(epochs):
        for some in torch.randperm(len(images)).split(size):
            optimizer.zero_grad()
            F.cross_entropy(model(images[some]), labels[some]).backward()
            optimizer.step()


def test(model: nn.Module) -> float:
    """Return the accuracy on the test images."""
    split = load("fashion-mnist-mini", "test")
    with torch.no_grad():
        answers = model.eval()(split.images.float() / 255)
    return float((answers.argmax(1) == split.labels).float().mean())
