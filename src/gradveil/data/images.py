"""Decoded images of one split, made from a user's own pixels, and the batches they come in."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, kind_of, one_line
from gradveil.core.files import digest
from gradveil.core.seeds import forked, generator
from gradveil.core.types import Batch
from gradveil.data.decode import in_test, statistics

SPLITS = ("train", "test")
CHANNELS = (1, 3)  # of gray and of color images
MOST_CLASSES = 1_000_000  # each has a name, and so takes memory
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow converts to gray
CONVERTED_AT_ONCE = 1_000
BATCHES_AHEAD = 64  # prepared in one call: enough to keep a GPU busy, few enough for its memory


@dataclass(frozen=True, eq=False)
class Images:
    """One split as uint8 NCHW, usually mapped from the cache.

    `mean` and `std` are those of the training split, for each channel, in [0, 1].
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        return self.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width in pixels: images are square after loading."""
        return self.images.shape[2]

    def __len__(self) -> int:
        return len(self.images)

    def digest(self) -> str:
        """Return the SHA-256 of all pixels and labels, in hexadecimal digits."""
        return digest({"images": self.images, "labels": self.labels})

    def select(self, indices: Tensor | Sequence[int]) -> "Images":
        """Return these images alone, in the order of the indices, as a copy in memory."""
        chosen = torch.as_tensor(indices)
        if not len(chosen):
            chosen = chosen.long()
        # torch would read booleans as a mask and refuse floats in other words
        if chosen.dtype not in (torch.int64, torch.int32):
            raise GradveilError(
                f"indices of type {chosen.dtype} cannot select images: give whole numbers from 0 "
                f"to {len(self) - 1}"
            )
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(outside):
            raise GradveilError(
                f"no image {int(outside[0])} in {self.name} {self.split}: choose from 0 to "
                f"{len(self) - 1}"
            )
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])


@public
def as_images(
    images: object,
    labels: object = None,
    *,
    name: str = "images",
    split: str = "train",
    classes: int | Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Images:
    """Make one split of a user's own images; `name` is what errors and files call them.

    `images` is a tensor (N, C, H, W) with square images, uint8 or floats in [0, 1] that are rounded
    to multiples of 1/255, or such a NumPy array, (N, C, H, W) or (N, H, W, C); `labels` has N class
    indices. Without `labels`, `images` is a pair of both, a Dataset or DataLoader of such pairs of
    tensors, or `Images`. `classes` is their number or their names, by default the largest label
    plus 1; `mean` and `std` for each channel, in [0, 1], are by default those of the images.
    """
    if isinstance(images, Images):
        if labels is not None:
            raise GradveilError(f"{name}: labels are given beside an Images, which has its own")
        return _replaced(images, classes, mean, std, name)
    if labels is None:
        images, labels = _pair(images, name)
    pixels = _pixels(images, name)
    indices = _indices(labels, len(pixels), name)
    if classes is None:
        classes = int(indices.max()) + 1
    given = Images(name, split, pixels, indices, _class_names(classes, name), (), ())
    if mean is None or std is None:
        found = statistics(pixels.numpy())
        mean, std = found[0] if mean is None else mean, found[1] if std is None else std
    return _replaced(given, None, mean, std, name)


def _replaced(
    images: Images,
    classes: int | Sequence[str] | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    name: str,
) -> Images:
    """Return the same images with what is not None in its stead, after a look at every part."""
    pixels, labels = _pixels(images.images, name), images.labels
    made = replace(
        images,
        images=pixels,
        labels=_indices(labels, len(pixels), name),
        classes=images.classes if classes is None else _class_names(classes, name),
        mean=images.mean if mean is None else tuple(mean),
        std=images.std if std is None else tuple(std),
    )
    largest = int(made.labels.max())
    if largest >= len(made.classes):
        raise GradveilError(
            f"{name}: label {largest}; there are {len(made.classes)} classes, "
            f"0 to {len(made.classes) - 1}"
        )
    return made


def _class_names(classes: int | Sequence[str], name: str) -> tuple[str, ...]:
    if not isinstance(classes, int):
        return tuple(classes)
    if not 1 <= classes <= MOST_CLASSES:
        raise GradveilError(f"{name}: {classes:,} classes; expected 1 to {MOST_CLASSES:,}")
    return tuple(map(str, range(classes)))


def _pixels(images: object, name: str) -> Tensor:
    """Return images as uint8 NCHW on the CPU, or say what is wrong with them."""
    if isinstance(images, np.ndarray):
        images = _from_numpy(images, name)
    if not isinstance(images, Tensor):
        raise GradveilError(
            f"{name}: {kind_of(images)}; expected a tensor (N, C, H, W) or NumPy array, a pair of "
            "images and labels, a Dataset or DataLoader of such pairs, or Images"
        )
    if images.dim() != 4 or 0 in images.shape:
        raise GradveilError(
            f"{name}: images of shape {tuple(images.shape)}; expected (N, C, H, W), N at least 1"
        )
    height, width = images.shape[2:]
    if height != width:
        raise GradveilError(
            f"{name}: images of {height} x {width} pixels; expected square ones: cut or pad them"
        )
    if images.dtype == torch.uint8:
        return images.detach().cpu()
    if not images.is_floating_point():
        raise GradveilError(
            f"{name}: images of type {images.dtype}; expected uint8, or floating point in [0, 1]"
        )
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):  # nan is neither
        raise GradveilError(
            f"{name}: images with values from {low:g} to {high:g}; expected [0, 1], or uint8 from "
            "0 to 255: the model normalizes"
        )
    return (images.detach().cpu().to(torch.float64) * 255).round().to(torch.uint8)


def _from_numpy(images: NDArray[Any], name: str) -> Tensor:
    """Return an array of images as a tensor, with the channels first where they came last."""
    try:
        found = torch.from_numpy(np.require(images, requirements=["C", "W"]))
    except (TypeError, ValueError):
        raise GradveilError(
            f"{name}: images of type {images.dtype}; expected uint8, or floating point in [0, 1]"
        ) from None
    if found.dim() == 4 and found.shape[3] in CHANNELS and found.shape[1] not in CHANNELS:
        return found.permute(0, 3, 1, 2).contiguous()
    return found


def _indices(labels: object, count: int, name: str) -> Tensor:
    """Return labels as int64 on the CPU, or say what is wrong with them."""
    try:
        found = labels if isinstance(labels, Tensor) else torch.tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise GradveilError(
            f"{name}: labels are {kind_of(labels)}; expected a tensor of class indices"
        ) from None
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise GradveilError(
            f"{name}: labels of type {found.dtype}; expected class indices, integers"
        )
    if tuple(found.shape) != (count,):
        raise GradveilError(
            f"{name}: {count} images and labels of shape {tuple(found.shape)}; "
            "expected one class index for each image"
        )
    found = found.detach().cpu().long()
    if int(found.min()) < 0:
        raise GradveilError(f"{name}: label {int(found.min())}; class indices start at 0")
    return found


def _pair(given: object, name: str) -> tuple[object, object]:
    """Return images and labels of a pair, or of all pairs of a Dataset or DataLoader."""
    pixels = Tensor | np.ndarray
    if isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], pixels):
        return given[0], given[1]
    if isinstance(given, pixels):
        kind = "a tensor" if isinstance(given, Tensor) else kind_of(given)
        raise GradveilError(f"{name}: {kind} of images without labels; give labels too")
    if isinstance(given, str | bytes | dict) or not (
        hasattr(given, "__iter__") or hasattr(given, "__getitem__")
    ):
        return given, None
    images: list[Tensor] = []
    labels: list[Tensor] = []
    try:
        with forked():
            torch.manual_seed(0)  # a loader that shuffles gives the same order each time
            for number, item in enumerate(_items(given)):
                image, label = _item(item, number, name)
                images.append(image)
                labels.append(label)
    except GradveilError:
        raise
    except Exception as error:  # the data set may be anyone's
        raise GradveilError(f"{name}: it cannot be read: {one_line(error, 200)}") from error
    if not images:
        raise GradveilError(f"{name}: it holds no images")
    if len({image.shape[1:] for image in images}) > 1:
        shapes = sorted({tuple(image.shape[1:]) for image in images})
        raise GradveilError(
            f"{name}: images of shapes {shapes[0]} and {shapes[1]}; expected all alike"
        )
    return torch.cat(images), torch.cat(labels)


def _items(given: Any) -> Iterator[object]:
    """Go through a loader, or through a data set by index: not all of these end by themselves."""
    if hasattr(given, "__iter__"):
        return iter(given)
    return (given[number] for number in range(len(given)))


def _item(item: object, number: int, name: str) -> tuple[Tensor, Tensor]:
    """Return one image, or one batch of them, as images (N, C, H, W) and N labels."""
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Tensor):
        image, label = item[0], torch.as_tensor(item[1])
        if image.dim() == 3 and label.dim() == 0:
            return image[None], label[None]
        if image.dim() == 4 and label.shape == image.shape[:1]:
            return image, label
        kind = f"shapes {tuple(image.shape)} and {tuple(label.shape)}"
    else:
        parts = item if isinstance(item, tuple | list) else (item,)
        kind = " and ".join(type(part).__name__ for part in parts[:3])
    raise GradveilError(
        f"{name}: item {number} is {kind}; expected an image tensor (C, H, W) and its label, or a "
        "batch of both"
    )


def with_channels(images: Images, channels: int) -> Images:
    """Return gray images as color ones of three equal planes, or color ones as gray."""
    if channels not in CHANNELS:
        raise GradveilError(f"channels {channels}: choose 1, gray, or 3, color")
    if channels == images.channels:
        return images
    if {channels, images.channels} != {1, 3}:
        raise GradveilError(
            f"channels {channels}: {images.name} has {images.channels}; only gray and color "
            "images can be turned into each other"
        )
    if channels == 3:
        made = images.images.expand(-1, 3, -1, -1)
        return replace(images, images=made, mean=images.mean * 3, std=images.std * 3)
    weights = torch.tensor(LUMA).view(1, 3, 1, 1)
    parts = [
        (some.float() * weights).sum(1, keepdim=True).round().byte()
        for some in images.images.split(CONVERTED_AT_ONCE)
    ]
    gray = torch.cat(parts)
    mean, std = statistics(gray.numpy())
    return replace(images, images=gray, mean=mean, std=std)


def divided(images: Images) -> tuple[Images, Images]:
    """Divide images into a training and a test split, about 80 to 20, by the content of each.

    Equal images fall on the same side. A folder of images is divided in the same way.
    """
    rows = images.images.numpy()
    tested = torch.tensor([in_test(repr(row.shape).encode() + row.tobytes()) for row in rows])
    if bool(tested.all()) or not bool(tested.any()):
        raise GradveilError(
            f"{images.name}: {len(images)} images, too few to set some apart for testing; "
            "give test images too"
        )
    train, test = (images.select(side.nonzero().flatten()) for side in (~tested, tested))
    return replace(train, split="train"), replace(test, split="test")


def balanced(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Choose a random part of every class, in order: round(fraction * count), at least one.

    With the same seed a smaller fraction is a subset of a larger one.
    """
    kept = []
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator(seed, "fraction", label))
        kept.append(members[order[: max(1, round(fraction * len(members)))]])
    return torch.cat(kept).sort().values


@dataclass(frozen=True, eq=False)
class Batches:
    """Go once over uint8 images and labels, in float batches in [0, 1] on the images' device.

    With a generator the order is shuffled and `prepare` (crop, flip, policy) changes the images;
    both are drawn from it, in the same way on every device. Without one the order is kept and
    `prepare` must be None.
    """

    images: Tensor
    labels: Tensor
    size: int
    rng: Generator | None = None
    prepare: Callable[[Tensor, Generator], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise GradveilError(f"batch size {self.size}: it must be at least 1")
        if len(self.images) != len(self.labels) or not len(self.images):
            raise GradveilError(
                f"{len(self.images)} images and {len(self.labels)} labels: there must be as many, "
                "and at least one"
            )
        if self.prepare and not self.rng:
            raise GradveilError("random preparation of images needs a generator")

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.images)
        size = min(self.size, count)
        if self.rng is None:
            order = torch.arange(count)
        else:
            order = torch.randperm(count, generator=self.rng)
        for rows in order.to(self.images.device).split(size * BATCHES_AHEAD):
            images = self.images[rows]
            if self.prepare and self.rng:
                images = self.prepare(images, self.rng)
            labels = self.labels[rows]
            for some, theirs in zip(images.split(size), labels.split(size), strict=True):
                yield Batch(some.float().div_(255), theirs)
