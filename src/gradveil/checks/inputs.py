"""What reaches the model: pixels in [0, 1], normalized once; and enough images to tell one from another."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.checks.cases import Case
from gradveil.checks.findings import Finding
from gradveil.core.seeds import forked
from gradveil.core.shares import in_mode

LEAST_CANDIDATES = 100  # below, chance alone identifies more than 1 in 100
LEAST_RANKED = 6  # below, no signed-rank test reaches 2.5%: 1 / 2^5
BYTES = 32  # no usual normalization gives larger values
SLACK = 1e-4  # rounding

Range = tuple[float, float]


def outside_pixels(case: Case) -> Finding | None:
    """Images that were normalized before they were handed in, bytes, or numbers that are none."""
    low = min(float(batch.images.min()) for batch in case.few)
    high = max(float(batch.images.max()) for batch in case.few)
    floats = all(batch.images.is_floating_point() for batch in case.few)
    if floats and low >= 0 and high <= 1:
        return None
    ends = f"the images have values from {low:g} to {high:g}, pixels have 0 to 1"
    if not all(bool(batch.images.isfinite().all()) for batch in case.few):
        return Finding("error", "pixels", f"{ends}: some are not finite", "mend what makes the images")
    if not floats or (low >= 0 and high > BYTES):
        return Finding("error", "pixels", f"{ends}: they are bytes", "divide them by 255")
    twice = "the model normalizes too, so they are normalized twice" if _normalizing(case.client.model) else "they were normalized already"
    return Finding("error", "pixels", f"{ends}: {twice}", "give pixels in [0, 1] and let the model normalize them, once")


def normalized_twice(case: Case) -> Finding | None:
    """A layer with mean and std whose input is no longer in [0, 1], seen in a pass."""
    model, (images, _) = case.client.model, case.placed(case.few[0])
    seen: dict[str, Range] = {}
    with ExitStack() as hooks:
        for name, module in _normalizing(model).items():
            hooks.callback(module.register_forward_pre_hook(_record(seen, name, images.shape)).remove)
        with in_mode(model, False), forked():
            case.answers(images, model)
    wrong = {name: ends for name, ends in seen.items() if ends[0] < -SLACK or ends[1] > 1 + SLACK}
    if not wrong:
        return None
    name, (low, high) = next(iter(wrong.items()))
    means = f"{name or 'the model'} normalizes values from {low:.3g} to {high:.3g}, which are no pixels: they were normalized before"
    return Finding("warning", "normalization", means, "take out one of the two normalizations, in the model or before it")


def few_candidates(case: Case) -> Finding | None:
    """Identification means little among few."""
    if case.test is None or len(case.test) >= LEAST_CANDIDATES:
        return None
    there = len(case.test)
    means = f"there are {there} images to identify a reconstruction among: luck alone finds {1 / max(there, 1):.0%}"
    return Finding("warning", "candidates", means, f"give {LEAST_CANDIDATES} images or more, 1,000 if you can; else go by dB over blind")


def few_images(case: Case) -> Finding | None:
    """The tests of an audit need some."""
    total = sum(map(len, case.batches))
    if total >= LEAST_RANKED:
        return None
    means = f"{total} image(s): no test by rank can tell an attack on fewer than {LEAST_RANKED} from a blind guess"
    return Finding("note", "images", means, f"attack {LEAST_RANKED} or more, 32 or more for a figure to quote")


def _normalizing(model: nn.Module) -> dict[str, nn.Module]:
    """The modules without weights that hold a mean and a std, unless these change nothing."""
    return {name: module for name, module in model.named_modules() if _constants(module) not in (None, ((0.0,), (1.0,)))}


def _constants(module: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    values = [getattr(module, name, None) for name in ("mean", "std")]
    if any(value is None or callable(value) for value in values) or next(module.parameters(recurse=False), None) is not None:
        return None
    try:
        mean, std = (tuple(sorted(set(torch.as_tensor(value).flatten().tolist()))) for value in values)
    except (TypeError, ValueError, RuntimeError):
        return None
    return mean, std


def _record(seen: dict[str, Range], name: str, shape: torch.Size) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def record(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].shape == shape:
            seen[name] = float(inputs[0].min()), float(inputs[0].max())

    return record
