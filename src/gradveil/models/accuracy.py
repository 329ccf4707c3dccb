"""The accuracy of a model, measured."""

from typing import Protocol

import torch
from torch import Tensor, nn

from gradveil.core.seeds import following, generator
from gradveil.models.bottleneck import at_rest
from gradveil.models.factories import Split

PASSED_AT_ONCE = 500
MOST = 10_000  # images that an accuracy is measured on


class LabeledSplit(Split, Protocol):
    """Images with their labels; `data.Images` is such."""

    @property
    def labels(self) -> Tensor:
        """The class of each image, (N)."""


def measure_accuracy(
    model: nn.Module, test: LabeledSplit, most: int = MOST, seed: int = 0
) -> tuple[float, int]:
    """Return the share of test images that the model classifies correctly, and their number.

    These are all images, or `most` at even distances. The seed is for a model that draws.
    """
    chosen = torch.linspace(0, len(test.labels) - 1, min(most, len(test.labels))).round().long()
    weight, hits, mode = next(model.parameters()), 0, model.training
    model.eval()
    with torch.no_grad(), at_rest(model), following(generator(seed, "test")):
        for some in chosen.split(PASSED_AT_ONCE):
            answers = model((test.images[some].to(weight.device).float() / 255).to(weight.dtype))
            guesses = answers[:, : len(test.classes)].argmax(1).cpu()
            hits += int((guesses == test.labels[some]).sum())
    model.train(mode)
    return hits / len(chosen), len(chosen)
