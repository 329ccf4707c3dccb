"""A small vision transformer: patches of 4 x 4 pixels, 6 pre-norm layers of width 192 with 3 heads, mean pooling, no class token."""

import math

import torch
from torch import Tensor, nn

from gradveil.core import GradveilError
from gradveil.models.base import Mean, Task

PATCH = 4
WIDTH = 192
HEADS = 3
DEPTH = 6
EXPANSION = 4


class Tokens(nn.Module):
    """One vector for each patch, plus a learned vector for its position."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, WIDTH, PATCH, stride=PATCH)
        self.position = nn.Parameter(torch.empty(1, (size // PATCH) ** 2, WIDTH))
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.patches(images)
        return tokens.flatten(2).transpose(1, 2) + self.position


class Attention(nn.Module):
    """softmax(q k' / sqrt(d)) v for each head, in plain products: fused kernels have no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        query, key, value = self.qkv(x).view(count, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-2, -1) / math.sqrt(width // HEADS)).softmax(dim=-1)
        mixed: Tensor = self.out((weights @ value).transpose(1, 2).reshape(count, length, width))
        return mixed


class Layer(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), Attention())
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPANSION * WIDTH), nn.GELU(), nn.Linear(EXPANSION * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x + self.perceptron(x)
        return out


def vit(task: Task) -> tuple[nn.Sequential, nn.Linear]:
    """Positions start from a truncated normal law (std 0.02), weights from torch's defaults."""
    task.at_least(PATCH, "vit")
    if task.size % PATCH:
        raise GradveilError(f"size is {task.size}: vit cuts images into {PATCH} x {PATCH} patches, so it needs a multiple of {PATCH}")
    layers = [Layer() for _ in range(DEPTH)]
    return nn.Sequential(Tokens(task.channels, task.size), *layers, nn.LayerNorm(WIDTH), Mean(1)), nn.Linear(WIDTH, task.classes)
