"""The client's side: from private batches to what the server sees of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.gradients import Gradients, Loss, cross_entropy, trainable
from gradveil.core.shares import Shares
from gradveil.core.types import Batch, Knowledge, Observation, Protocol

MOST_VICTIMS = 64
MOST_IMAGES = 512  # in one pass, so that its memory has a bound


@dataclass(frozen=True, eq=False)
class Client:
    """`prepare` (crop, flip, policy) changes a victim's images, as uint8, before the model sees them."""

    model: nn.Module
    classes: int
    loss: Loss = cross_entropy
    protocol: Protocol = field(default_factory=Protocol)
    prepare: Callable[[Tensor, Generator], Tensor] | None = None

    def share(self, batches: Sequence[Batch], rng: Generator, *, tell_labels: bool = True) -> list[tuple[Observation, Batch]]:
        """For each victim what is seen, and the batch truly used: floats in [0, 1] on the model's device.

        Victims draw from `rng` in turn, so sharing many is the same as sharing one after the other.
        """
        if not batches:
            return []
        example = next(iter(trainable(self.model).values()))
        check_weights(self.model)
        for number, batch in enumerate(batches):
            check_batch(batch, self.classes, f"victim {number}")
        used = [self._used(batch, example, rng) for batch in batches]
        _check_alike(used)
        shares = Shares(self.model, self.loss, self.protocol)
        shares.check(used[0].images, self.classes)
        gradients = chain.from_iterable(_shared(shares, some, first) for first, some in _chunks(used))
        return [(self._seen(found, batch, tell_labels), batch) for found, batch in zip(gradients, used, strict=True)]

    def _used(self, batch: Batch, example: Tensor, rng: Generator) -> Batch:
        images, labels = batch.images.detach().to(example.device), batch.labels.to(example.device, torch.long)
        if self.prepare is not None:
            prepared = self.prepare((images * 255).round().to(torch.uint8), rng)
            if prepared.dtype != torch.uint8 or prepared.dim() != 4 or len(prepared) != len(batch):
                kind = f"{prepared.dtype} of shape {tuple(prepared.shape)}"
                raise GradveilError(f"prepare gave {kind} for {len(batch)} image(s): expected torch.uint8, as many images, NCHW")
            images = prepared.to(example.dtype) / 255
        return Batch(images.to(example.dtype), labels)

    def _seen(self, gradients: Gradients, used: Batch, tell_labels: bool) -> Observation:
        _, channels, height, width = used.images.shape
        return Observation(
            self.model,
            self.loss,
            gradients,
            (channels, height, width),
            len(used),
            self.classes,
            self.protocol,
            Knowledge(labels=used.labels if tell_labels else None),
        )


def check_batch(batch: Batch, classes: int, name: str) -> None:
    """Refuse what is not NCHW floats in [0, 1] with a class index for each image."""
    images, labels = batch.images, batch.labels
    if images.dim() != 4 or 0 in images.shape or labels.shape != images.shape[:1]:
        shapes = f"images of shape {tuple(images.shape)} and labels of shape {tuple(labels.shape)}"
        raise GradveilError(f"{name}: {shapes}; expected images (N, C, H, W) and N labels, N at least 1")
    if not images.is_floating_point():
        raise GradveilError(f"{name}: images of type {images.dtype}; expected floating point in [0, 1], such as images / 255")
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):
        raise GradveilError(f"{name}: images with values from {low:g} to {high:g}; expected [0, 1], the model normalizes")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise GradveilError(f"{name}: labels of type {labels.dtype}; expected class indices, integers")
    if not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        wrong = next(label for label in labels.tolist() if not 0 <= label < classes)
        raise GradveilError(f"{name}: label {wrong}; there are {classes} classes, 0 to {classes - 1}")


def check_weights(model: nn.Module) -> None:
    """Refuse a model with a weight or statistic that is not finite."""
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise GradveilError(f"the model's {name!r} has values that are not finite: its training diverged; load other weights")


def _check_alike(batches: Sequence[Batch]) -> None:
    first = batches[0].images.shape
    for number, batch in enumerate(batches):
        if batch.images.shape != first:
            shapes = f"victim 0 has images of shape {tuple(first)}, victim {number} {tuple(batch.images.shape)}"
            raise GradveilError(f"{shapes}: share victims of one batch size and one image shape together")


def _chunks(batches: Sequence[Batch]) -> Iterator[tuple[int, Sequence[Batch]]]:
    """Some victims at a time, and the number of the first."""
    step = max(1, min(MOST_VICTIMS, MOST_IMAGES // len(batches[0])))
    for first in range(0, len(batches), step):
        yield first, batches[first : first + step]


def _shared(shares: Shares, batches: Sequence[Batch], first: int) -> list[Gradients]:
    found = shares(torch.stack([batch.images for batch in batches]), torch.stack([batch.labels for batch in batches]))
    found = {name: value.detach() for name, value in found.items()}
    finite = torch.stack([value.flatten(1).isfinite().all(1) for value in found.values()])
    if not bool(finite.all()):
        layer, victim = (~finite).nonzero()[0].tolist()
        raise GradveilError(
            f"victim {first + victim}: the gradient of {list(found)[layer]!r} is not finite: "
            "the loss or its slope overflows; take other weights, or fewer local steps at a lower rate"
        )
    alive = torch.stack([value.flatten(1).any(1) for value in found.values()]).any(0)
    if not bool(alive.all()):
        victim = int((~alive).nonzero()[0])
        raise GradveilError(f"victim {first + victim}: the model's gradient is zero: dead or saturated; nothing can be matched")
    return [{name: value[victim] for name, value in found.items()} for victim in range(len(batches))]
