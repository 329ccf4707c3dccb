"""Controls that look at no gradient: what a picture scores that anyone could have drawn."""

import torch
from torch import Tensor

from gradveil.attacks import Attack
from gradveil.attacks.blind import BlindClassMean, BlindGrey, BlindImage, BlindNoise
from gradveil.data import Images
from gradveil.scores import mean_image


def blind_attacks(means: Tensor | None, color: Tensor | None) -> dict[str, Attack]:
    """By the names they have in the table, from the class means and the mean color of the training images."""
    attacks: list[Attack] = [BlindNoise(), BlindGrey()]
    if color is not None:
        attacks.append(BlindImage("mean color", color))
    if means is not None:
        attacks.append(BlindClassMean(means))
    return {str(attack): attack for attack in attacks}


def class_means(train: Images) -> tuple[Tensor, Tensor]:
    """(classes, C, H, W) and the mean color (C, H, W), class by class: a whole split as floats may not fit the memory.

    A class without images gets the mean of all.
    """
    counts = torch.bincount(train.labels, minlength=len(train.classes))
    means = torch.zeros(len(counts), *train.images.shape[1:], dtype=torch.float64)
    for label in counts.nonzero().flatten().tolist():
        means[label] = mean_image(train.images[train.labels == label].double())[0] / 255
    everything = torch.einsum("k,kchw->chw", counts.double() / counts.sum(), means)
    means[counts == 0] = everything
    return means.float(), everything.mean(dim=(1, 2), keepdim=True).expand_as(
        everything
    ).float().clone()
