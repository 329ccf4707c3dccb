"""Inner products between gradients along lines of images, without holding all the gradients.

A line is some images with one label; the others are compared with its last image. Cosines between
gradients need <g, g_last> and <g, g> alone, layer by layer, so a layer's gradients are dropped as
soon as these are known. Where a layer's gradient is a product of two factors (b a^T), the products
follow from the factors: <b a^T, d c^T> = <b, d> <a, c>.
"""

import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilWarning
from gradveil.core.types import Gradients, Loss
from gradveil.engine.batched import BatchedGradients, NotBatchableError, detached
from gradveil.engine.convolutions import line_products as convolution_products
from gradveil.engine.convolutions import suits_one_by_one, weights_one_by_one
from gradveil.engine.fused import suits_short
from gradveil.engine.gradients import gradient, trainable
from gradveil.engine.layers import RULES, SHORT_FORWARDS
from gradveil.engine.passes import Pass, copied, find_blames, forward
from gradveil.engine.products import DotAndSquare

CACHED_ENTRIES = 8192  # of each gradient, multiplied in one call on a CPU


@dataclass(frozen=True, eq=False)
class Products:
    """`dots` <g, g_last> and `squares` <g, g>, each (parameters, lines, images of the line)."""

    dots: Tensor
    squares: Tensor


class LineProducts:
    """The products of images (lines, images, C, H, W) in [0, 1] with a label for each line.

    Build it once for a model and a loss, then call it. Lines share a pass where the model allows
    it; else they go one image at a time, after one warning. `fast` lets a GPU compute in bf16 with
    products in float32.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, fast: bool = False) -> None:
        self._model, self._loss, self._fast = model, loss, fast
        self._batched = BatchedGradients(model, loss)
        self._warned = False

    def __call__(self, images: Tensor, labels: Tensor) -> Products:
        lines, points = images.shape[:2]
        rows = images.detach().flatten(0, 1)
        targets = labels.repeat_interleave(points)[:, None]
        fast = self._fast and rows.is_cuda
        if fast and rows.dim() == 4:
            rows = rows.contiguous(memory_format=torch.channels_last)
        try:
            self._batched.check(rows[:, None], targets)
        except NotBatchableError as reason:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{reason}; taking them one at a time, which is slow",
                    GradveilWarning,
                    stacklevel=2,
                )
            return loop_products(self._model, self._loss, images, labels)
        frozen = detached(self._model)
        forwards = SHORT_FORWARDS if fast else {}
        with (
            torch.enable_grad(),
            torch.autocast(rows.device.type, torch.bfloat16, enabled=fast, cache_enabled=False),
        ):
            done = forward(self._model, self._loss, rows[:, None], targets, frozen, forwards)
            blames = find_blames(done, len(rows), differentiable=False)
        with torch.no_grad():
            return _stacked(_pairs(self._model, done, blames, lines))


def loop_products(model: nn.Module, loss: Loss, images: Tensor, labels: Tensor) -> Products:
    """Return the same, one image after the other: for models that cannot be batched, and tests."""
    pairs = [
        _line_pairs(model, loss, line, label[None])
        for line, label in zip(images, labels, strict=True)
    ]
    dots, squares = torch.stack(pairs, dim=2).unbind()  # (kinds, parameters, lines, images)
    return Products(dots, squares)


def layer_products(
    layer: nn.Module, inputs: Tensor, blame: Tensor, lines: int
) -> dict[str, DotAndSquare]:
    """Return the products of each parameter of a layer used once, (lines, images of the line).

    They follow from the layer's input and the loss gradient at its output, (lines x images, ...).
    """
    if type(layer) is nn.Linear:
        return _linear(layer, inputs, blame, lines)
    short = suits_short(blame) and blame.dim() == 4
    if short and type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
        found = {"weight": convolution_products(layer, inputs, blame, lines)}
        if layer.bias is not None:
            found["bias"] = products(blame.float().sum((2, 3)), lines)
        return found
    if isinstance(layer, nn.Conv2d) and suits_one_by_one(layer, inputs, blame):
        rows = inputs.shape[0] // lines
        each = [
            products(weights_one_by_one(layer, a, b), 1)
            for a, b in zip(inputs.split(rows), blame.split(rows), strict=True)
        ]
        dots, squares = (torch.cat(parts) for parts in zip(*each, strict=True))
        found = {"weight": (dots, squares)}
        if layer.bias is not None:
            found["bias"] = products(blame.sum((2, 3)), lines)
        return found
    return {
        name: products(part, lines)
        for name, part in RULES[type(layer)](layer, inputs, blame, len(blame)).items()
    }


def products(gradients: Tensor, lines: int) -> DotAndSquare:
    """Return <g, g_last> and <g, g>, (lines, images of the line).

    The gradients are those of all images, (lines x images, *parameter shape).
    """
    rows = gradients.reshape(lines, len(gradients) // lines, -1)
    rows = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    if rows.is_cuda:
        return (rows * rows[:, -1:]).sum(2), rows.square().sum(2)
    parts = [_cached_products(part) for part in rows.split(CACHED_ENTRIES, dim=2)]
    dots, squares = (torch.stack(kind).sum(0) for kind in zip(*parts, strict=True))
    return dots, squares


def _cached_products(rows: Tensor) -> DotAndSquare:
    """Return the products of a part that stays in the cache: long sums of floats lose two digits.

    A batched product of this shape is slow on a CPU.
    """
    dots = torch.stack([torch.mv(line, line[-1]) for line in rows])
    return dots, torch.linalg.vector_norm(rows, dim=2).square()


def _linear(layer: nn.Linear, inputs: Tensor, blame: Tensor, lines: int) -> dict[str, DotAndSquare]:
    """Use <sum_s b_s a_s^T, sum_t d_t c_t^T> = sum_st <b_s, d_t> <a_s, c_t>.

    The sums go over the positions of an image, often a single one.
    """
    wide = torch.float32 if blame.dtype in (torch.bfloat16, torch.float16) else blame.dtype
    outer = blame.to(wide).reshape(len(blame), -1, blame.shape[-1])
    inner = inputs.to(wide).reshape(len(inputs), -1, inputs.shape[-1])
    dots, squares = (
        (_grams(outer, last) * _grams(inner, last)).sum((1, 2)).view(lines, -1)
        for last in (lines, 0)
    )
    found = {"weight": (dots, squares)}
    if layer.bias is not None:
        found["bias"] = products(outer.sum(1), lines)
    return found


def _grams(rows: Tensor, lines: int) -> Tensor:
    """Return (images, positions, positions) of products with the last image of each line.

    With `lines` 0 they are the products of each image with itself.
    """
    other = rows
    if lines:
        last = rows.view(lines, -1, *rows.shape[1:])[:, -1:]
        other = last.expand(-1, len(rows) // lines, -1, -1).flatten(0, 1)
    if rows.shape[1] == 1:
        return (rows * other).sum(2, keepdim=True)
    return rows @ other.transpose(1, 2)


def _pairs(
    model: nn.Module, done: Pass, blames: tuple[Tensor, ...], lines: int
) -> dict[str, DotAndSquare]:
    """Return the products of each parameter, in the model's order.

    A parameter used more than once is summed over its uses first.
    """
    names = {parameter: name for name, parameter in trainable(model).items()}
    used = [
        {key: names[p] for key, p in tap.layer.named_parameters(recurse=False) if p in names}
        for tap in done.taps
    ]
    uses = Counter(name for keys in used for name in keys.values())
    pairs: dict[str, DotAndSquare] = {}
    sums: Gradients = {}
    for tap, blame, keys in zip(done.taps, blames, used, strict=False):
        inputs = tap.inputs.to(blame.dtype)
        if all(uses[name] == 1 for name in keys.values()):
            found = layer_products(tap.layer, inputs, blame, lines)
            pairs |= {name: found[key] for key, name in keys.items()}
        else:
            for key, part in RULES[type(tap.layer)](tap.layer, inputs, blame, len(blame)).items():
                if key in keys:
                    sums[keys[key]] = sums[keys[key]] + part if keys[key] in sums else part
    sums |= {
        name: copied(blame, len(done.rows), model.get_parameter(name).dim())
        for name, blame in zip(done.copies, blames[len(done.taps) :], strict=True)
    }
    pairs |= {name: products(part, lines) for name, part in sums.items()}
    images = len(done.rows) // lines
    absent = torch.zeros(lines, images, device=done.rows.device, dtype=done.rows.dtype)
    return {name: pairs.get(name, (absent, absent)) for name in names.values()}


def _stacked(pairs: dict[str, DotAndSquare]) -> Products:
    return Products(*(torch.stack([pair[part] for pair in pairs.values()]) for part in (0, 1)))


def _line_pairs(model: nn.Module, loss: Loss, line: Tensor, label: Tensor) -> Tensor:
    """Return (2, parameters, images): the dots, then the squares."""
    last = gradient(model, loss, line[-1:], label)
    columns = []
    for image in line:
        found = gradient(model, loss, image[None], label)
        columns.append(
            [
                [(found[name] * last[name]).sum() for name in last],
                [found[name].square().sum() for name in last],
            ]
        )
    return torch.tensor(columns, device=line.device, dtype=line.dtype).permute(1, 2, 0)
