"""Why trained weights are often wrong: another normalization, order of classes or of colors.

Each guess is tried out. It is said only where the same weights do far better with it, on images
that the guess was not made from; weights that are merely little trained do not.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.checks.subject import Finding
from gradveil.core.seeds import following, generator
from gradveil.engine.gradients import in_mode, pixel_frame
from gradveil.models.bottleneck import at_rest
from gradveil.models.normalized import KNOWN, Constants

LOOKED_AT = 400  # test images
PASSED_AT_ONCE = 100
RIGHT = 0.9  # nothing is tried where the weights have at least this accuracy
GAIN = 0.25  # by which the accuracy must rise with another normalization or order of colors
REORDERED_GAIN = 0.4  # by which it must rise with another order of classes
MOST_CLASSES = 0.5  # share of the classes of which it must then be right on more than half

TRAINED = 0.5  # share of log(classes), the loss of random answers, that trained weights stay below
SEVERAL = 4  # classes below which no normalization is judged: two may be told apart in a few steps
FITTED_ON = 60  # images that constants are fitted on, where none of the known ones is right
ROUNDS = 4  # of the fit: the steps begin at 0.1 and a factor of 1.4, and are halved in each
STALE = 0.01  # share of the first values in running statistics above which nothing is concluded

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Weights:
    """The accuracy of weights on `n` test images, and what they were perhaps made for."""

    accuracy: float
    n: int
    finding: Finding | None = None

    def __str__(self) -> str:
        return f"right on {self.accuracy:.1%} of {self.n} test images"


def look_at_weights(
    model: nn.Module, images: Tensor, labels: Tensor, classes: int, seed: int = 0
) -> Weights:
    """Measure the accuracy on up to 400 images; where it is low, try what may be wrong.

    The images are (N, C, H, W), uint8 or floats in [0, 1].
    """
    count = min(LOOKED_AT, len(labels))
    # Drawn: every n-th image would leave classes out where these take turns.
    chosen = torch.randperm(len(labels), generator=generator(seed, "looked at"))[:count]
    images, labels = images[chosen], labels[chosen].cpu()
    images = images if images.is_floating_point() else images.float() / 255

    def answers(change: Change, images: Tensor = images) -> Tensor:
        """Return the logits of the images after a change, (N, classes)."""
        like = next(model.parameters())
        with (
            torch.no_grad(),
            in_mode(model, False),
            at_rest(model),
            following(generator(seed, "weights")),
        ):
            parts = [
                model(change(some.to(like)))[:, :classes].float().cpu()
                for some in images.split(PASSED_AT_ONCE)
            ]
        return torch.cat(parts)

    given = answers(lambda pixels: pixels)
    accuracy = _share(given.argmax(1), labels)
    if accuracy >= RIGHT or count < 2 * classes or _has_stale_norms(model):
        return Weights(accuracy, count)
    found = _wrong_order(given, labels, accuracy)
    if found is None and classes >= SEVERAL:
        tried = {name: answers(change) for name, change in _changes(model, images)}
        shares = {name: _share(logits.argmax(1), labels) for name, logits in tried.items()}
        sure = [name for name, logits in tried.items() if _knows(logits, labels)]
        best = max(sure or shares, key=lambda name: shares[name])
        if shares[best] >= accuracy + GAIN:
            if sure:
                found = _wrong_input(best, shares[best], accuracy)
            elif best != COLORS:  # the constants are near these, and others
                start = _constants(images)[best]
                found = _fit_normalization(model, answers, images, labels, accuracy, start)
    return Weights(accuracy, count, found)


def _fit_normalization(
    model: nn.Module,
    answers: Callable[[Change, Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    accuracy: float,
    start: Constants,
) -> Finding | None:
    """Look for a mean and a std, the same for all channels, with which the weights do far better.

    They are fitted from `start` by the loss on some of the images, and judged by the others.
    """
    frame = pixel_frame(model, (images.shape[1], images.shape[2], images.shape[3]))
    shuffled = torch.randperm(len(labels), generator=generator(0, "normalization"))
    size = min(FITTED_ON, len(labels) // 2)
    ours, others = shuffled[:size], shuffled[size:]

    def logits(constants: tuple[float, float], which: Tensor) -> Tensor:
        mean, std = (torch.tensor(value).to(frame[0]) for value in constants)
        return answers(partial(_normalized_anew, mean, std, *frame), images[which])

    def loss(constants: tuple[float, float]) -> float:
        return float(F.cross_entropy(logits(constants, ours), labels[ours]))

    best = sum(start[0]) / len(start[0]), sum(start[1]) / len(start[1])
    reached = loss(best)
    for number in range(ROUNDS):
        step, factor = 0.1 / 2**number, 1.4 ** (0.5**number)
        better = True
        while better:
            mean, std = best
            near = [
                (mean - step, std),
                (mean + step, std),
                (mean, std / factor),
                (mean, std * factor),
            ]
            least, nearest = min((loss(constants), constants) for constants in near)
            better = least < reached - 1e-3
            if better:
                reached, best = least, nearest
    found = logits(best, others)
    share = _share(found.argmax(1), labels[others])
    if share < accuracy + GAIN or not _knows(found, labels[others]):
        return None
    text = f"{best[0]:.2g},{best[1]:.2g}"
    means = (
        f"this looks like a wrong normalization: the weights are right on {accuracy:.1%} of the "
        f"test images, and with images normalized by about {text} on {share:.1%}"
    )
    return Finding("warning", "normalization", means, "give normalize MEAN,STD as your loader has")


def _share(guesses: Tensor, labels: Tensor) -> float:
    return float((guesses == labels).double().mean())


def _knows(logits: Tensor, labels: Tensor) -> bool:
    """Tell whether the loss is that of a trained model, far below that of answers at random.

    Early in a training another scale of the images can give most answers right, and none surely.
    """
    return float(F.cross_entropy(logits, labels)) <= TRAINED * math.log(logits.shape[1])


def _has_stale_norms(model: nn.Module) -> bool:
    """Tell whether running statistics still hold much of what they began with.

    Images normalized in another way may then suit them better, early in an honest training.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None:
            kept = 1 - (1.0 if module.momentum is None else module.momentum)
            steps = int(module.num_batches_tracked)
            if steps and kept**steps > STALE:
                return True
    return False


def _changes(model: nn.Module, images: Tensor) -> Iterator[tuple[str, Change]]:
    """Give what may have been done to the images in training, by its name.

    What the model itself normalizes by is undone before.
    """
    channels, height, width = images.shape[1:]
    mean, std = pixel_frame(model, (channels, height, width))
    for name, constants in _constants(images).items():
        means, stds = (_for_channels(values, channels).to(mean) for values in constants)
        yield name, partial(_normalized_anew, means, stds, mean, std)
    if channels == 3:
        yield COLORS, lambda x: x.flip(1)


def _constants(images: Tensor) -> dict[str, Constants]:
    """Return means and stds that images like these are often normalized by, by their names."""
    theirs = images.mean(dim=(0, 2, 3)), images.std(dim=(0, 2, 3)).clamp_min(1e-3)
    return {
        **KNOWN,
        DATA: (tuple(theirs[0].tolist()), tuple(theirs[1].tolist())),
        PIXELS: ((0.0,), (1.0,)),
        BYTES: ((0.0,), (1 / 255,)),
    }


def _normalized_anew(m: Tensor, s: Tensor, mean: Tensor, std: Tensor, pixels: Tensor) -> Tensor:
    """Return what the model would normalize, by `mean` and `std`, to (pixels - m) / s."""
    return (pixels - m) / s * std + mean


DATA, PIXELS, BYTES, COLORS = "data", "pixels", "bytes", "colors"


def _for_channels(values: tuple[float, ...], channels: int) -> Tensor:
    found = torch.tensor(values)
    return (found if len(found) == channels else found.mean().repeat(channels)).view(-1, 1, 1)


def _wrong_input(name: str, reached: float, accuracy: float) -> Finding:
    """Say which change of the images the weights seem to be made for."""
    do = {
        DATA: "let the model normalize by the mean and std of these images: give normalize "
        "MEAN,STD",
        PIXELS: "the images are normalized twice, or should not be: leave normalize out, or take "
        "it out of the model",
        BYTES: "let the model multiply its images by 255: give normalize 0,0.0039216",
        COLORS: "let the model reverse its channels: x.flip(1)",
    }.get(name, f"give normalize {name}, or what your loader has, MEAN,STD")
    changed = {
        DATA: "images normalized by their own mean and std",
        PIXELS: "images that are not normalized",
        BYTES: "pixels from 0 to 255",
        COLORS: "blue, green, red in place of red, green, blue",
    }.get(name, f"images normalized as for {name}")
    kind = "order of channels" if name == COLORS else "normalization"
    means = (
        f"this looks like a wrong {kind}: the weights are right on {accuracy:.1%} of the test "
        f"images, and with {changed} on {reached:.1%}"
    )
    return Finding("warning", kind, means, do)


def _wrong_order(logits: Tensor, labels: Tensor, accuracy: float) -> Finding | None:
    """Find an order of the classes with which the weights do far better.

    The order is found on one half of the images, and judged by the other. An untrained model tells
    a few classes apart, too: with the right order, weights must be right on most classes.
    """
    from scipy.optimize import linear_sum_assignment

    guesses, classes = logits.argmax(1), logits.shape[1]
    shuffled = torch.randperm(len(labels), generator=generator(0, "halves"))
    ours, others = shuffled.chunk(2)
    counts = torch.zeros(classes, classes)
    counts.index_put_((guesses[ours], labels[ours]), torch.ones(len(ours)), accumulate=True)
    _, order = linear_sum_assignment(counts.numpy(), maximize=True)
    meant, true = torch.as_tensor(order)[guesses[others]], labels[others]
    reached = _share(meant, true)
    hits = [_share(meant[true == label], true[true == label]) for label in true.unique()]
    told = sum(share > 0.5 for share in hits) / len(hits)
    if reached < accuracy + REORDERED_GAIN or told <= MOST_CLASSES:
        return None
    reordered = torch.empty_like(logits)
    reordered[:, torch.as_tensor(order)] = logits
    if not _knows(reordered, labels):
        return None
    moved = [number for number in range(classes) if int(order[number]) != number]
    first = moved[0]
    means = (
        f"this looks like another order of the classes: the weights are right on {accuracy:.1%} of "
        f"the test images, and on {reached:.1%} if {len(moved)} classes trade places, such as "
        f"{first}, which is {int(order[first])} here"
    )
    do = "number your classes as here, by the order of their names, or reorder the last layer"
    return Finding("warning", "class order", means, do)
