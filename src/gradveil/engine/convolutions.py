"""2-D convolutions: the weight gradient of each victim, and a forward that differentiates fast.

The gradient is dW = b patches(a)^T for each victim, for the input a and the loss gradient b at the
output (the blame). The two derivatives that a matching attack needs are products of the same kind.
On a CPU they are grouped convolutions (`each`), a group for each victim. On a GPU the victims'
patches are laid side by side and multiplied; in bf16, kernels read them from the maps where they
lie.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradveil.engine.each import Moves, as_groups, as_rows, convolve_grouped, weight_gradient
from gradveil.engine.fused import load_convolution_kernels, load_kernels, suits, suits_short
from gradveil.engine.patches import (
    PatchLayout,
    by_row,
    by_victim,
    find_edges,
    find_patches,
    fold,
    lay_out,
    two,
    unfold,
)
from gradveil.engine.products import multiply

MANY_PATCHES = 200_000  # numbers in one image's patches

# Torch's public `torch.nn.grad` wraps this operator, but hides which memory format it works in.
_convolution_backward = torch.ops.aten.convolution_backward


def convolution_weight(layer: nn.Conv2d, inputs: Tensor, blame: Tensor, victims: int) -> Tensor:
    """Return (victims, *weight shape), differentiable once more by input and blame."""
    inputs, layout = lay_out(layer, inputs, victims)
    found: Tensor
    outputs, channels, *kernel = layer.weight.shape
    if read_in_place(layer, blame):
        found = _InPlaceProducts.apply(inputs, blame, layout)  # type: ignore[no-untyped-call]
        return found.view(victims, outputs, *kernel, channels).permute(0, 1, 4, 2, 3)
    if grouped(inputs):
        inputs, moves = _moves(inputs, layout)
        maps, blame = as_groups(inputs, victims), as_groups(blame, victims)
        return weight_gradient(maps, blame, (victims, *layer.weight.shape), moves)
    found = _PatchProducts.apply(inputs, blame, layout)  # type: ignore[no-untyped-call]
    return found.view(victims, *layer.weight.shape)


def convolve_each(layer: nn.Conv2d, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the output without bias, with a weight for each victim, (victims, *weight shape).

    It can be differentiated twice, by inputs and weights.
    """
    victims, outputs = len(weight), weight.shape[1]
    inputs, layout = lay_out(layer, inputs, victims)
    if grouped(inputs):
        inputs, moves = _moves(inputs, layout)
        return as_rows(convolve_grouped(as_groups(inputs, victims), weight, moves), victims)
    sizes = zip(
        inputs.shape[2:], layout.edges, layout.kernel, layout.dilation, layout.stride, strict=True
    )
    out = torch.Size(
        (size + sum(edge) - step * (wide - 1) - 1) // stride + 1
        for size, edge, wide, step, stride in sizes
    )
    if read_in_place(layer, inputs):
        taps = weight.permute(0, 1, 3, 4, 2).flatten(2, 3)  # (victims, outputs, area, channels)
        found: Tensor = _EachConvolved.apply(inputs, taps, layout, out)  # type: ignore[no-untyped-call]
        return found
    patches = unfold(inputs, layout, out)
    kernels = weight.reshape(victims * layout.groups, outputs // layout.groups, -1)
    return by_row(multiply(kernels, patches), layout, (len(inputs), outputs, *out))


def read_in_place(layer: nn.Conv2d, maps: Tensor) -> bool:
    """Tell whether kernels can multiply the maps where they lie: in bf16 on a GPU."""
    return suits_short(maps) and layer.groups == 1


def grouped(inputs: Tensor) -> bool:
    """Tell whether a grouped convolution beats a product of patches: on a CPU."""
    return not inputs.is_cuda


def line_products(
    layer: nn.Conv2d, inputs: Tensor, blame: Tensor, lines: int
) -> tuple[Tensor, Tensor]:
    """Return <g, g_last> and <g, g> of each image's weight gradient, on a GPU.

    Both are (lines, images of the line); no gradient is written out.
    """
    (top, _), (left, _) = find_edges(layer)
    settings = two(layer.kernel_size), two(layer.stride), two(layer.dilation), (top, left)
    found: tuple[Tensor, Tensor] = load_kernels().line_products(inputs, blame, lines, *settings)
    return found


def suits_one_by_one(layer: nn.Conv2d, inputs: Tensor, blame: Tensor) -> bool:
    """Tell whether `weights_one_by_one` beats one product of all patches: large layers on a CPU."""
    plain = (
        type(layer) is nn.Conv2d
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )
    patches = inputs.shape[1] * layer.kernel_size[0] * layer.kernel_size[1] * blame[0, 0].numel()
    return plain and not inputs.is_cuda and patches > MANY_PATCHES


def weights_one_by_one(layer: nn.Conv2d, inputs: Tensor, blame: Tensor) -> Tensor:
    """Return (images, *weight shape), by torch's weight gradient, image by image."""
    moves = layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups
    wanted = (False, True, False)  # of the slopes at input, weight and bias
    rows = zip(blame.split(1), inputs.split(1), strict=True)
    return torch.cat(
        [_convolution_backward(b, a, layer.weight, None, *moves, wanted)[1][None] for b, a in rows]
    )


def convolve(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Return the layer's output.

    Where its weight asks for no gradient, differentiating it twice costs nothing for the weight.
    """
    if _left_to_torch(layer):
        return nn.Conv2d.forward(layer, inputs)
    return _convolved(layer, inputs, layer.weight)


def short_convolve(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Return the layer's output in bf16 with channels last, on a GPU.

    Half of the memory is moved, and nothing is laid out anew before a product.
    """
    if _left_to_torch(layer):
        return nn.Conv2d.forward(layer, inputs.to(layer.weight.dtype))
    return _convolved(layer, shortened(inputs), shortened(layer.weight))


def shortened(values: Tensor) -> Tensor:
    """Return maps or weights in bf16 with channels last; those that are so already as they are."""
    return values.to(torch.bfloat16, memory_format=torch.channels_last)


def is_short(layer: nn.Conv2d) -> bool:
    """Tell whether a short pass has rules for the layer: it pads with zeros, on all sides alike."""
    return not isinstance(layer.padding, str) and layer.padding_mode == "zeros"


def _left_to_torch(layer: nn.Conv2d) -> bool:
    """Tell whether the layer needs a slope at its weight, or pads in a way of its own."""
    return layer.weight.requires_grad or not is_short(layer)


def _convolved(layer: nn.Conv2d, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the layer's output with this weight, in its format."""
    settings = layer.stride, layer.padding, layer.dilation, layer.groups
    found: Tensor = _Convolution.apply(inputs, weight, settings)  # type: ignore[no-untyped-call]
    return found if layer.bias is None else found + layer.bias.to(found.dtype).view(-1, 1, 1)


def _moves(inputs: Tensor, layout: PatchLayout) -> tuple[Tensor, Moves]:
    """Return the input, padded where its sides differ, and torch's settings of the layer."""
    (top, bottom), (left, right) = layout.edges
    padding = top, left
    if top != bottom or left != right:
        inputs, padding = F.pad(inputs, (left, right, top, bottom)), (0, 0)
    return inputs, Moves(layout.stride, padding, layout.dilation, layout.groups)


class _InPlaceProducts(torch.autograd.Function):
    """b patches(a)^T for each victim, by kernels that write no patches, on a GPU.

    The weight's gradient comes out as (victims, outputs, kernel area x inputs).
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, blame: Tensor, layout: PatchLayout) -> Tensor:
        ctx.save_for_backward(inputs, blame)
        ctx.layout = layout
        found: Tensor = load_convolution_kernels().weight_products(inputs, blame, layout)
        return found.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, blame = ctx.saved_tensors
        layout: PatchLayout = ctx.layout
        kernels = load_convolution_kernels()
        slope = slope.reshape(*slope.shape[:2], -1, inputs.shape[1])
        to_inputs = kernels.input_slope(blame, slope, tuple(inputs.shape[2:]), layout)
        to_blame = kernels.blame_slope(inputs, slope, tuple(blame.shape[2:]), layout)
        return to_inputs, to_blame, None


class _EachConvolved(torch.autograd.Function):
    """A convolution with weights (victims, outputs, area, channels), on a GPU.

    It is linear in the maps and in the weights, and so are its two derivatives: each of the three
    has the other two as its derivatives.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, layout: PatchLayout, out: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layout = layout
        found: Tensor = load_convolution_kernels().blame_slope(inputs, weight, tuple(out), layout)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        to_inputs, to_weight = ctx.needs_input_grad[:2]
        size = inputs.shape[2:]
        return (
            _EachTransposed.apply(slope, weight, ctx.layout, size) if to_inputs else None,  # type: ignore[no-untyped-call]
            _EachWeight.apply(inputs, slope, ctx.layout) if to_weight else None,  # type: ignore[no-untyped-call]
            None,
            None,
        )


class _EachTransposed(torch.autograd.Function):
    """The slope of `_EachConvolved` at its maps, for the slope at its output."""

    @staticmethod
    def forward(
        ctx: Any, slope: Tensor, weight: Tensor, layout: PatchLayout, size: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(slope, weight)
        ctx.layout = layout
        found: Tensor = load_convolution_kernels().input_slope(slope, weight, tuple(size), layout)
        return found

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        slope, weight = ctx.saved_tensors
        to_slope, to_weight = ctx.needs_input_grad[:2]
        out = slope.shape[2:]
        return (
            _EachConvolved.apply(u, weight, ctx.layout, out) if to_slope else None,  # type: ignore[no-untyped-call]
            _EachWeight.apply(u, slope, ctx.layout) if to_weight else None,  # type: ignore[no-untyped-call]
            None,
            None,
        )


class _EachWeight(torch.autograd.Function):
    """The slope of `_EachConvolved` at its weights, for its maps and the slope at its output."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, slope: Tensor, layout: PatchLayout) -> Tensor:
        ctx.save_for_backward(inputs, slope)
        ctx.layout = layout
        found: Tensor = load_convolution_kernels().weight_products(inputs, slope, layout)
        return found

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        inputs, slope = ctx.saved_tensors
        to_inputs, to_slope = ctx.needs_input_grad[:2]
        size, out = inputs.shape[2:], slope.shape[2:]
        return (
            _EachTransposed.apply(slope, u, ctx.layout, size) if to_inputs else None,  # type: ignore[no-untyped-call]
            _EachConvolved.apply(inputs, u, ctx.layout, out) if to_slope else None,  # type: ignore[no-untyped-call]
            None,
        )


class _PatchProducts(torch.autograd.Function):
    """b patches(a)^T for each victim and group."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, blame: Tensor, layout: PatchLayout) -> Tensor:
        patches = find_patches(inputs, layout, blame.shape[2:])
        flat = by_victim(blame.flatten(2), layout)
        ctx.save_for_backward(patches, flat)
        ctx.layout, ctx.inputs, ctx.blame = layout, inputs.shape, blame.shape
        return torch.bmm(flat, patches.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        patches, flat = ctx.saved_tensors
        layout: PatchLayout = ctx.layout
        to_blame = by_row(torch.bmm(slope, patches), layout, ctx.blame)
        if suits(flat) and layout.stride == (1, 1):
            rows = by_row(flat, layout, ctx.blame)
            return _spread(slope, rows, layout, ctx.inputs), to_blame, None
        to_patches = torch.bmm(slope.transpose(1, 2), flat)
        return fold(to_patches, layout, ctx.inputs), to_blame, None


def _spread(slope: Tensor, blame: Tensor, layout: PatchLayout, inputs: torch.Size) -> Tensor:
    """Return the slope at the input: the transposed kernel times mirrored patches of the blame.

    `F.fold` is slow on a GPU.
    """
    (kernel_h, kernel_w), (step_h, step_w) = layout.kernel, layout.dilation
    (top, _), (left, _) = layout.edges
    corner = (kernel_h - 1) * step_h - top, (kernel_w - 1) * step_w - left
    patches = load_kernels().patches(
        blame, layout.kernel, (1, 1), layout.dilation, corner, inputs[2:], mirrored=True
    )
    parts = slope.view(len(slope), slope.shape[1], -1, kernel_h * kernel_w)
    turned = parts.transpose(1, 2).reshape(len(slope), parts.shape[2], -1)
    return by_row(torch.bmm(turned, by_victim(patches, layout)), layout, inputs)


class _Convolution(torch.autograd.Function):
    """A convolution as a function of its input alone.

    Torch's second derivative works out the weight's as well, asked for or not: a third of the
    time.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.settings = settings
        return F.conv2d(inputs, weight, None, *settings)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        saved = (*ctx.saved_tensors, ctx.settings)
        return _Transposed.apply(slope, *saved), None, None  # type: ignore[no-untyped-call]


class _Transposed(torch.autograd.Function):
    """The adjoint of a convolution, whose adjoint is the convolution again."""

    @staticmethod
    def forward(
        ctx: Any, slope: Tensor, inputs: Tensor, weight: Tensor, settings: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.settings = settings
        stride, padding, dilation, groups = settings
        moves = stride, padding, dilation, False, (0, 0), groups
        wanted = (True, False, False)  # of the slopes at input, weight and bias
        found: Tensor = _convolution_backward(slope, inputs, weight, None, *moves, wanted)[0]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return F.conv2d(slope, weight, None, *ctx.settings), None, None, None
