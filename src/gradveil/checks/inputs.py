"""Checks of what reaches the model: pixels in [0, 1], normalized once, and enough of them."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from gradveil.checks.subject import Finding, Subject, quiet
from gradveil.checks.weights import look_at_weights
from gradveil.clients import check_batch
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import forked
from gradveil.engine.calls import before_use
from gradveil.engine.gradients import in_mode
from gradveil.engine.shares import Shares
from gradveil.models.bottleneck import at_rest, penalties
from gradveil.models.factories import logits

LEAST_CANDIDATES = 20  # images of a class, the victim among them
MANY = 1_000  # test images from which on a subject holds only a part of them
LEAST_RANKED = 6  # with fewer, no signed-rank test reaches 2.5%: the least p is 1 / 2^5
BYTES = 32  # no usual normalization gives values above this
SLACK = 1e-4  # for rounding

Range = tuple[float, float]


def outside_pixels(subject: Subject) -> Finding | None:
    """Find images that were normalized already, that are bytes, or that are not finite."""
    low = min(float(batch.images.min()) for batch in subject.few)
    high = max(float(batch.images.max()) for batch in subject.few)
    floats = all(batch.images.is_floating_point() for batch in subject.few)
    if floats and low >= 0 and high <= 1:
        return None
    ends = f"the images have values from {low:g} to {high:g}, pixels have 0 to 1"
    if not all(bool(batch.images.isfinite().all()) for batch in subject.few):
        return Finding(
            "error", "pixels", f"{ends}: some are not finite", "mend what makes the images"
        )
    if not floats or (low >= 0 and high > BYTES):
        return Finding("error", "pixels", f"{ends}: they are bytes", "divide them by 255")
    twice = (
        "the model normalizes too, so they are normalized twice"
        if _normalizing(subject.client.model)
        else "they were normalized already"
    )
    return Finding(
        "error",
        "pixels",
        f"{ends}: {twice}",
        "give pixels in [0, 1] and let the model normalize them, once",
    )


def normalized_twice(subject: Subject) -> Finding | None:
    """Find a layer with a mean and a std that gets values outside [0, 1] in a pass."""
    model, (images, _) = subject.client.model, subject.placed(subject.few[0])
    seen: dict[str, Range] = {}
    with ExitStack() as hooks:
        for name, module in _normalizing(model).items():
            hooks.callback(before_use(module, _record(seen, name, images.shape)).remove)
        with in_mode(model, False), forked():
            subject.answers(images, model)
    wrong = {name: ends for name, ends in seen.items() if ends[0] < -SLACK or ends[1] > 1 + SLACK}
    if not wrong:
        return None
    name, (low, high) = next(iter(wrong.items()))
    means = (
        f"{name or 'the model'} normalizes values from {low:.3g} to {high:.3g}, which are no "
        "pixels: they were normalized before"
    )
    return Finding(
        "warning",
        "normalization",
        means,
        "take out one of the two normalizations, in the model or before it",
    )


def few_candidates(subject: Subject) -> Finding | None:
    """Find classes with too few test images for a line-up."""
    if subject.test is None or len(subject.test) >= MANY:
        return None
    counts = subject.test.labels.bincount(minlength=subject.classes)
    least = min(int(counts[label]) for batch in subject.few for label in batch.labels.tolist())
    if least + 1 >= LEAST_CANDIDATES:
        return None
    means = (
        f"a class of the private images has {least} test images: an audit's line-up needs "
        f"{LEAST_CANDIDATES} of a class, and says nothing here"
    )
    return Finding(
        "warning",
        "candidates",
        means,
        "give more images of each class, of the same kind as the private ones; else go by dB over "
        "blind",
    )


def few_images(subject: Subject) -> Finding | None:
    """Find too few images for the tests of an audit."""
    total = sum(map(len, subject.batches))
    if total >= LEAST_RANKED:
        return None
    means = (
        f"{total} image(s): no test by rank can tell an attack on fewer than {LEAST_RANKED} "
        "from a blind guess"
    )
    return Finding(
        "note", "images", means, f"attack {LEAST_RANKED} or more, 32 or more for a figure to quote"
    )


def _normalizing(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold a mean and a std but no weights, unless these change nothing."""
    return {
        name: module
        for name, module in model.named_modules()
        if _constants(module) not in (None, ((0.0,), (1.0,)))
    }


def _constants(module: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    values = [getattr(module, name, None) for name in ("mean", "std")]
    if (
        any(value is None or callable(value) for value in values)
        or next(module.parameters(recurse=False), None) is not None
    ):
        return None
    try:
        mean, std = (
            tuple(sorted(set(torch.as_tensor(value).flatten().tolist()))) for value in values
        )
    except (TypeError, ValueError, RuntimeError):
        return None
    return mean, std


def _record(
    seen: dict[str, Range], name: str, shape: torch.Size
) -> Callable[[nn.Module, object], None]:
    def record(_: nn.Module, inputs: object) -> None:
        if isinstance(inputs, Tensor) and inputs.shape == shape:
            seen[name] = float(inputs.min()), float(inputs.max())

    return record


def unfit(subject: Subject) -> Finding | None:
    """Find images and labels that are no batch, or a model without a logit for each class."""
    client = subject.client
    try:
        for number, batch in enumerate(subject.few):
            check_batch(batch, subject.classes, f"victim {number}")
        images, _ = subject.placed(subject.few[0])
        logits(client.model, images, type(client.model).__name__)
        with quiet():
            Shares(client.model, client.loss, client.protocol).check(
                images, subject.classes + penalties(client.model)
            )
    except GradveilError as error:
        return Finding(
            "error", "model and images", str(error), "choose a model and images that go together"
        )
    return None


def unshared(subject: Subject) -> Finding | None:
    """Find what else keeps the client from sharing, such as a defense that suits another model."""
    try:
        assert subject.shared  # kept: the other checks look at it
    except GradveilError as error:
        return Finding("error", "sharing", str(error), "nothing can be attacked until then")
    return None


MOST_IMAGES = 1_000
IMAGES_AT_ONCE = 250
CERTAIN = 0.01  # with a larger p-value an accuracy may be luck


def at_chance(subject: Subject) -> Finding | None:
    """Find trained weights that seem to be made for other images, or an accuracy at chance.

    It is measured on up to 1,000 images; at chance is what their most frequent class has.
    """
    from scipy.stats import binomtest

    if subject.test is None or not len(subject.test):
        return None
    if subject.trained:
        with subject.passes():
            images, true = subject.test.images, subject.test.labels
            looked = look_at_weights(subject.model, images, true, subject.classes, subject.seed)
        if looked.finding is not None:
            return looked.finding
    labels = subject.test.labels[:MOST_IMAGES]
    hits, n = correct(subject), len(labels)
    chance = max(float(labels.bincount().max()) / n, 1 / subject.classes)
    # Random weights alone may do somewhat better than chance.
    least = min(2 * chance, (1 + chance) / 2)
    if hits / n > least and binomtest(hits, n, chance, alternative="greater").pvalue < CERTAIN:
        return None
    means = (
        f"the model is right on {hits / n:.1%} of {n} test images, "
        f"hardly better than chance ({chance:.1%})"
    )
    if subject.trained:
        do = (
            "check that checkpoint, model, data set and its normalization belong together; "
            "the figures will be those of an untrained model"
        )
        return Finding("warning", "accuracy", means, do)
    do = "give a checkpoint for figures of a trained model: untrained ones leak most"
    return Finding("note", "accuracy", f"{means}, as untrained ones are", do)


def correct(subject: Subject) -> int:
    """Count the test images that the model is right on, with all dropout off."""
    assert subject.test is not None
    images, labels = subject.placed(subject.test)
    images, labels = images[:MOST_IMAGES], labels[:MOST_IMAGES]
    hits = 0
    with subject.passes(), in_mode(subject.model, False), at_rest(subject.model):
        for some, true in zip(
            images.split(IMAGES_AT_ONCE), labels.split(IMAGES_AT_ONCE), strict=True
        ):
            logits = subject.answers(some)[:, : subject.classes]
            hits += int((logits.argmax(1) == true).sum())
    return hits
