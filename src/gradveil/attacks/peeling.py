"""Peel a batch, image by image, from the gradient of a first linear layer that a ReLU follows.

The gradient of unit j is sum_b d_bj x_b by the weights and sum_b d_bj by the bias, over the images
that activate the unit. Where a single image does, their ratio is that image, exactly. Once an image
is known, its part of the gradient can be computed and taken out, and units that it shared with one
other image give that one: Shariati and Meybodi 2026; SPEAR, Dimitrov et al., NeurIPS 2024.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from gradveil.attacks.base import Attack, Progress
from gradveil.attacks.linear import find_first_layer
from gradveil.core.errors import GradveilError
from gradveil.core.types import Loss, Observation, Reconstruction
from gradveil.engine.gradients import in_mode, pixel_frame

LEVELS = 255
OFF_GRID = 0.1  # of a level: as far as rounding in float32 moves an exact pixel
FITTING = 1e-2  # relative error of a bias gradient that a label explains
MOST_TRIED = 2_048  # images x labels in one pass
MOST_COMPARED = 256  # units whose ratios are compared, those of the largest slopes
PRUNED = "entries of the first layer's gradient are exactly zero, as pruning leaves them, and "
CUT = PRUNED + "no unit has all of its own"
WHOLE = PRUNED + "the units that are whole show no single image"
SCALED = (
    "units of the first layer show images on the grid of 1/255, and no label explains the size of "
    "their slopes: the gradient was scaled, as clipping does, or the loss is another"
)
OFF_THE_GRID = (
    "units of the first layer agree on images that lie off the grid of 1/255, so none is known "
    "to be exact: the images are no multiples of 1/255, or are normalized in another way"
)
CHANGED = (
    "the ratios of the first layer's units disagree, which those of one image alone cannot: noise "
    "was added, or the gradient changed in another way"
)
MIXED = (
    "no unit of the first layer shows a single image, and no two agree: so it is under noise, and "
    "in batches too large for the layer or of one class; here these look alike"
)
EMPTY = "no unit of the first layer has a gradient of its bias"


@dataclass(frozen=True)
class Peeling(Attack):
    """Recover images of a batch exactly, and know without the truth which are exact.

    Pixels of real images are multiples of 1/255, those of a mixture of images are not: an image
    counts as found only where every pixel lies on that grid, and `certain` says which do. Labels
    are found along; -1 where an image is not. The images that are not found come out as the mean of
    what is left. Entries that pruning set to zero make a unit useless, the other units still work.
    Needs one gradient of a model in which images of a batch do not interact.
    """

    easy_model: ClassVar[str] = "mlp"

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        layer = find_first_layer(seen[0], "peeling")
        protocol, size = seen[0].protocol, seen[0].size
        if protocol.moves(size):
            raise GradveilError(
                f"{protocol.in_words(size)}: peeling needs the gradient of 1; "
                "choose a matching attack"
            )
        network = Network(seen[0], layer)
        found = []
        for done, victim in enumerate(seen, 1):
            found.append(Peel(network, victim, layer).run())
            progress(done, len(seen))
        return found

    def __str__(self) -> str:
        return "peeling"


class Network:
    """The model in float64, to compute what an image and a label give to the first layer."""

    def __init__(self, victim: Observation, layer: tuple[str, str]) -> None:
        self.model = copy.deepcopy(victim.model).cpu().double()
        self.loss: Loss = victim.loss
        self.train_mode, self.classes = victim.protocol.train_mode, victim.classes
        self.shape = victim.image_shape
        name = layer[0].rpartition(".")[0]
        self.layer = self.model.get_submodule(name)
        assert isinstance(self.layer, nn.Linear)
        mean, std = pixel_frame(victim.model, victim.image_shape)
        whole = torch.zeros(victim.image_shape, dtype=torch.float64)
        self.mean = (whole + mean.cpu().double()).flatten()
        self.std = (whole + std.cpu().double()).flatten()

    def activated(self, pixels: Tensor) -> Tensor:
        """Return which units each image (images, pixels) activates."""
        assert isinstance(self.layer, nn.Linear)
        inputs = (pixels - self.mean) / self.std
        return F.linear(inputs, self.layer.weight, self.layer.bias) > 0

    def pulls(self, pixels: Tensor) -> Tensor:
        """Return the slope by each unit's sum, (images, classes, units), for every label."""
        each = max(1, MOST_TRIED // self.classes)
        return torch.cat([self._pulls(some) for some in pixels.split(each)])

    def _pulls(self, pixels: Tensor) -> Tensor:
        images = pixels.view(-1, *self.shape).repeat_interleave(self.classes, 0)
        labels = torch.arange(self.classes).repeat(len(pixels))
        sums: list[Tensor] = []
        handle = self.layer.register_forward_hook(lambda _layer, _inputs, made: sums.append(made))
        try:
            with in_mode(self.model, self.train_mode), torch.enable_grad():
                losses = self.loss(self.model(images), labels).sum()
                (slopes,) = torch.autograd.grad(losses, sums[0])
        finally:
            handle.remove()
        return slopes.view(len(pixels), self.classes, -1)


class Peel:
    """The gradient of a victim, and what has been taken out of it."""

    def __init__(self, network: Network, victim: Observation, layer: tuple[str, str]) -> None:
        self.network, self.victim = network, victim
        self.weight, self.bias = (victim.gradients[name].cpu().double() for name in layer)
        self.size = self.weight.norm()  # before anything is taken out
        self.whole = self.weight.isfinite().all(1) & self._unpruned()
        self.images: list[Tensor] = []  # levels from 0 to 255
        self.labels: list[int] = []
        self.unexplained = False  # whether an image showed that no label explains

    def _unpruned(self) -> Tensor:
        """Return which units have lost no entry of their weights.

        Without pruning a unit whose weights have a gradient has one of its bias, and zeros are
        those of black pixels; with it, a zero in a row is one that was cut off.
        """
        cut = bool(((self.bias == 0) & (self.weight != 0).any(1)).any())
        return (self.weight != 0).all(1) if cut else torch.ones_like(self.bias, dtype=torch.bool)

    def run(self) -> Reconstruction:
        """Take out images until none shows."""
        size = self.victim.size
        while len(self.images) < size and self._peel():
            pass
        if not self.images:
            gray = torch.full((size, *self.victim.image_shape), 0.5)
            return Reconstruction(gray, None, math.inf, f"failed: {self._why_not()}")
        rest = self._rest()
        images = [*(image / LEVELS for image in self.images), *[rest] * (size - len(self.images))]
        labels = [*self.labels, *[-1] * (size - len(self.labels))]
        certain = torch.arange(size) < len(self.images)
        return Reconstruction(
            torch.stack(images).float().view(size, *self.victim.image_shape),
            torch.tensor(labels),
            self._left(),
            certain=certain,
        )

    def _peel(self) -> bool:
        """Take out the images that single units show; return whether there were new ones."""
        images, units = self._candidates()
        if not len(images):
            return False
        pulls = self.network.pulls(images / LEVELS) / self.victim.size
        taken = False
        for image, alone, slopes in zip(images, units, pulls, strict=True):
            if len(self.images) == self.victim.size:
                break
            seen = self.bias[alone]
            errors = ((slopes[:, alone] - seen) / seen).abs().median(1).values
            label = int(errors.argmin())
            if float(errors[label]) > FITTING:
                self.unexplained = True
                continue
            self.images.append(image)
            self.labels.append(label)
            self.bias = self.bias - slopes[label]
            inputs = (image / LEVELS - self.network.mean) / self.network.std
            self.weight = self.weight - torch.outer(slopes[label], inputs)
            taken = True
        return taken

    def _candidates(self) -> tuple[Tensor, list[Tensor]]:
        """Return images in levels, each once, and for each the units that show it alone."""
        usable = self._usable()
        levels = self._levels(usable)
        near = levels.round()
        exact = ((levels - near).abs().amax(1) < OFF_GRID) & (
            ((near >= 0) & (near <= LEVELS)).all(1)
        )
        usable, near = usable[exact], near[exact]
        active = self.network.activated(near / LEVELS)[torch.arange(len(near)), usable]
        usable, near = usable[active], near[active]
        if not len(near):
            return near, []
        images, which = near.unique(dim=0, return_inverse=True)
        return images, [usable[which == number] for number in range(len(images))]

    def _usable(self) -> Tensor:
        """Return the units that have a ratio, by their numbers."""
        return torch.nonzero(self.whole & (self.bias != 0)).flatten()

    def _levels(self, units: Tensor) -> Tensor:
        """Return each unit's ratio as an image in levels, (units, pixels)."""
        ratios = self.weight[units] / self.bias[units, None]
        return (ratios * self.network.std + self.network.mean) * LEVELS

    def _why_not(self) -> str:
        """Say why no image came out, as far as the gradient alone tells."""
        usable = self._usable()
        if self.unexplained:
            return SCALED
        if self._pruned():
            return WHOLE if len(usable) else CUT
        if not len(usable):
            return EMPTY
        largest = self.bias[usable].abs().topk(min(MOST_COMPARED, len(usable))).indices
        levels = self._levels(usable[largest])
        apart = torch.cdist(levels, levels, p=math.inf).fill_diagonal_(math.inf)
        if bool((apart < OFF_GRID / 2).any()):
            return OFF_THE_GRID
        return CHANGED if self.victim.size == 1 and len(usable) > 1 else MIXED

    def _pruned(self) -> bool:
        """Tell whether there are zeros that images do not give.

        A bias without a slope whose weights have one; or a weight without one in a unit that has
        others, where even a black pixel enters as another number than zero.
        """
        active = (self.weight != 0).any(1)
        zeros = (self.weight == 0) & active[:, None] & (self.network.mean != 0)
        return bool(((self.bias == 0) & active).any() or zeros.any())

    def _rest(self) -> Tensor:
        """Return the mean of what is left, each unit weighted by the square of its slope."""
        z = (self.bias @ self.weight) / self.bias.square().sum()
        return (z * self.network.std + self.network.mean).clamp(0, 1).nan_to_num(0.5)

    def _left(self) -> float:
        """Return the share of the first layer's gradient that no found image explains."""
        return float(self.weight.norm() / self.size)
