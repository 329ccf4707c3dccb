"""Normalization by the statistics of a batch, victim by victim, and the statistics layers keep.

A batch norm in training mode mixes the images of a victim and no others: the rows of each victim
have a mean and a variance of their own. In an instance norm each row has.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradveil.core.errors import GradveilError
from gradveil.core.types import Statistics
from gradveil.engine.calls import before_use
from gradveil.engine.fused import load_norm_kernels, suits, suits_short

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The layers that mix the rows of a batch in training mode."""

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

NORMS = (*BATCH_NORMS, *INSTANCE_NORMS)

Norm = (
    nn.BatchNorm1d
    | nn.BatchNorm2d
    | nn.BatchNorm3d
    | nn.InstanceNorm1d
    | nn.InstanceNorm2d
    | nn.InstanceNorm3d
)

NORMALIZED: tuple[type[nn.Module], ...] = (*BATCH_NORMS[:3], *INSTANCE_NORMS)
"""The types that `normalize` knows, exactly: a subclass may compute something else."""


def takes_statistics(layer: nn.Module) -> bool:
    """Tell whether a layer normalizes by the statistics of its input in its present mode."""
    return isinstance(layer, NORMS) and (layer.training or layer.running_mean is None)


def mixes_rows(model: nn.Module) -> bool:
    """Tell whether a layer takes its statistics from the batch in the model's present mode."""
    return any(isinstance(m, BATCH_NORMS) and takes_statistics(m) for m in model.modules())


def is_normalized(layer: nn.Module) -> bool:
    """Tell whether `normalize` stands for the layer, with the statistics of each victim."""
    return type(layer) in NORMALIZED and takes_statistics(layer)


def normalize(
    layer: Norm, inputs: Tensor, victims: int, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return w (a - mean) / std + b with the statistics of each victim's rows.

    `weight` and `bias` are (victims, channels) or None. The result can be differentiated twice, by
    all three.
    """
    values = _grouped(layer, inputs, victims)
    if values.shape[1] * values.shape[3] == 1:
        raise GradveilError(
            f"{type(layer).__name__} in training mode got a single value for each channel, from "
            f"an input of shape {tuple(inputs.shape)} for {victims} victim(s): it needs several; "
            "take larger batches, or eval mode"
        )
    if weight is not None and len(values) > victims:  # every row is a group
        weight = weight.repeat_interleave(len(values) // victims, 0)
        bias = None if bias is None else bias.repeat_interleave(len(values) // victims, 0)
    values = _dense(values) if suits(values) else values
    found: Tensor
    found, _ = _Normalized.apply(values, weight, bias, layer.eps)  # type: ignore[no-untyped-call]
    return found.view(inputs.shape)


def for_each(parameter: Tensor | None, dims: int, victims: int) -> Tensor | None:
    """Return (victims, *shape) of a parameter; one that all share has `dims` dimensions alone."""
    if parameter is None or parameter.dim() > dims:
        return parameter
    return parameter.expand(victims, *parameter.shape)


def scale_by_channel(values: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Return scale x + shift, channel by channel; both have one row for all, or one a victim."""
    if scale is None:
        return values
    if suits_short(values) and scale.dim() == 2:
        each = _dense(values.reshape(len(scale), len(values) // len(scale), values.shape[1], -1))
        found: Tensor = _Scaled.apply(each, scale, shift)  # type: ignore[no-untyped-call]
        return found.view(values.shape)
    rows: Tensor = values.unflatten(0, (scale.shape[0] if scale.dim() == 2 else 1, -1))
    shape = (rows.shape[0], 1, -1, *(1,) * (values.dim() - 2))
    scale = scale.to(values.dtype).view(shape)
    if shift is None:
        return (rows * scale).flatten(0, 1)
    return multiply_add(rows, scale, shift.to(values.dtype).view(shape)).flatten(0, 1)


def multiply_add(values: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return scale x + shift, where scale or shift have a number for each channel.

    On a CPU torch multiplies and adds such numbers four times as fast in two calls as in one.
    """
    if values.is_cuda:
        return torch.addcmul(shift, values, scale)
    return (values * scale).add_(shift)


def _grouped(layer: nn.Module, inputs: Tensor, victims: int) -> Tensor:
    """Return a view (groups, rows, channels, positions); statistics are those of a group."""
    groups = len(inputs) if isinstance(layer, INSTANCE_NORMS) else victims
    return inputs.reshape(groups, len(inputs) // groups, inputs.shape[1], -1)


def _dense(values: Tensor) -> Tensor:
    """Return maps whose memory has no gaps: the kernels write new ones with the same strides."""
    same = torch.empty_like(values).stride() == values.stride()
    return values if same else values.contiguous()


class _Scaled(torch.autograd.Function):
    """scale x + shift with numbers (groups, channels), on a GPU."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, scale)
        found: Tensor = load_norm_kernels().scale(values, scale, shift)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        values, scale = ctx.saved_tensors
        slope = _dense(slope)
        to_values = _Scaled.apply(slope, scale, None)  # type: ignore[no-untyped-call]
        if not any(ctx.needs_input_grad[1:]):
            return to_values, None, None
        to_numbers = _ScaledSums.apply(slope, values)  # type: ignore[no-untyped-call]
        wanted = zip(to_numbers, ctx.needs_input_grad[1:], strict=True)
        return (to_values, *(part if needed else None for part, needed in wanted))


class _ScaledSums(torch.autograd.Function):
    """The slopes of `_Scaled` at its numbers: sum g x and sum g."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(slope, values)
        found: tuple[Tensor, Tensor] = load_norm_kernels().sums(slope, values)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_scale: Tensor, to_shift: Tensor) -> tuple[Tensor, Tensor]:
        slope, values = ctx.saved_tensors
        kernels = load_norm_kernels()
        return kernels.scale(values, to_scale, to_shift), kernels.scale(slope, to_scale, None)


class _Normalized(torch.autograd.Function):
    """y = w z + b with z = (x - mean) r, r = 1 / std, of x (groups, rows, channels, positions).

    Also returns mean and r, (2, groups, channels). Short formats add up in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        found, moments = _forward(values, weight, bias, eps)
        ctx.save_for_backward(values, weight, moments)
        ctx.mark_non_differentiable(moments)
        return found, moments

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Any, ...]:
        found = _Slopes.apply(slope, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        wanted = zip(found, ctx.needs_input_grad, strict=False)
        return (*(part if needed else None for part, needed in wanted), None)


class _Slopes(torch.autograd.Function):
    """The slopes at x, w and b for the slope g at y, with means over the n values of a channel.

    They are w r (g - mean(g) - z mean(g z)), n mean(g z) and n mean(g).
    """

    @staticmethod
    def forward(
        ctx: Any, slope: Tensor, values: Tensor, weight: Tensor | None, moments: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        found, mixed, plain = _backward(slope, values, weight, moments)
        ctx.save_for_backward(slope, values, weight, moments, mixed, plain)
        return found, mixed.to(slope.dtype), plain.to(slope.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, u: Tensor, to_mixed: Tensor, to_plain: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Differentiate <u, slope at x> + <to_mixed, slope at w> + <to_plain, slope at b>.

        The slope at x of that is r (k_u u + k_g g + k_z z + k_1), with numbers k for each channel.
        """
        slope, values, weight, (mean, r), mixed, plain = ctx.saved_tensors
        if suits(values):
            first, moments = (mixed, plain), ctx.saved_tensors[3]
            *maps, to_weight = load_norm_kernels().second(
                u, slope, values, weight, moments, first, (to_mixed, to_plain)
            )
            return (*maps, None if weight is None else to_weight.to(weight.dtype), None)
        n = _count(values)
        to_slope, u_mixed, u_plain = _backward(u, values, weight, ctx.saved_tensors[3])
        together = _sum(_wide(u) * _wide(slope))
        w = torch.ones_like(r) if weight is None else weight.to(r.dtype)
        to_mixed, to_plain = to_mixed.to(r.dtype), to_plain.to(r.dtype)
        common = together - u_plain * plain / n - u_mixed * mixed / n
        k_u = -w * r * mixed / n
        k_g = to_mixed - w * r * u_mixed / n
        k_1 = -(k_u * u_plain + k_g * plain) / n
        k_z = -(k_u * u_mixed + k_g * mixed + w * r * common) / n
        # z = (x - mean) r, so that nothing but x is kept.
        to_slope = _linear(
            (to_plain - to_mixed * mean * r, None), (to_mixed * r, values), (None, to_slope)
        )
        to_values = _linear(
            (r * (k_1 - k_z * mean * r), None),
            (r * k_u, u),
            (r * k_g, slope),
            (r * r * k_z, values),
        )
        to_weight = None if weight is None else (r * common).to(weight.dtype)
        return to_slope.to(slope.dtype), to_values.to(values.dtype), to_weight, None


def _forward(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return w z + b, and mean and r, (2, groups, channels)."""
    if suits(values):
        fused: tuple[Tensor, Tensor] = load_norm_kernels().forward(values, weight, bias, eps)
        return fused
    wide = _wide(values)
    mean = _sum(wide) / _count(wide)
    centered = wide - mean[:, None, :, None]
    r = (_sum(centered.square()) / _count(wide) + eps).rsqrt()
    scale = r if weight is None else r * weight
    found = centered.mul_(scale[:, None, :, None])
    found = found if bias is None else found.add_(bias[:, None, :, None])
    return found.to(values.dtype), torch.stack([mean, r])


def _backward(
    slope: Tensor, values: Tensor, weight: Tensor | None, moments: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slopes at x, (groups, rows, channels, positions), and at w and b."""
    if suits(values):
        kernels = load_norm_kernels()
        fused: tuple[Tensor, Tensor, Tensor] = kernels.backward(slope, values, weight, moments)
        return fused
    mean, r = moments
    g, x, n = _wide(slope), _wide(values), _count(values)
    plain = _sum(g)
    mixed = (_sum(g * x) - mean * plain) * r
    scale = r if weight is None else r * weight
    constant = scale * (mean * r * mixed - plain) / n
    found = _linear((constant, None), (scale, g), (-scale * r * mixed / n, x))
    return found.to(slope.dtype), mixed, plain


def _linear(*parts: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """Return the sum of k m, with numbers k (groups, channels) for the maps m.

    Without a map it is the number alone, first; without a number the map alone.
    """
    found: Tensor | None = None
    for factor, maps in parts:
        spread = None if factor is None else factor[:, None, :, None]
        if found is None:
            found = spread
        elif maps is not None:
            wide = _wide(maps)
            found = found + wide if spread is None else multiply_add(wide, spread, found)
    assert found is not None
    return found


def _sum(values: Tensor) -> Tensor:
    """Return the sum for each group and channel."""
    return values.sum(3).sum(1)


def _mean(values: Tensor) -> Tensor:
    """Return the mean of each group and channel, (groups, 1, channels, 1)."""
    return values.sum(3, keepdim=True).sum(1, keepdim=True) / _count(values)


def _count(values: Tensor) -> int:
    return values.shape[1] * values.shape[3]


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


class Running:
    """The running statistics that each victim's layers keep, carried from step to step.

    They start as those of the model, which stays as it is. Pass the rows of all victims through
    the model inside `watch`; slopes go through the statistics, to the images.
    """

    def __init__(self, model: nn.Module, victims: int = 1) -> None:
        self._victims = victims
        self._names = {m: name for name, m in model.named_modules() if _keeps(m)}
        self._kept = {
            layer: tuple(value.expand(victims, -1) for value in (mean, variance))
            for layer in self._names
            for mean, variance in [_running(layer)]
        }
        self._updates = dict.fromkeys(self._names, 0)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Update the statistics by each use of a layer, for a while."""
        with ExitStack() as hooks:
            for layer in self._names:
                hooks.callback(before_use(layer, self._update).remove)
            yield

    def values(self) -> Statistics:
        """Return (victims, channels) by the name of the buffer, such as `norm.running_mean`."""
        found = {}
        for layer, name in self._names.items():
            for part, value in zip(("running_mean", "running_var"), self._kept[layer], strict=True):
                found[f"{name}.{part}" if name else part] = value
        return found

    def take(self, each: Sequence["Running"]) -> None:
        """Take over the statistics of victims that were passed one by one."""
        for layer in self._names:
            parts = zip(*(other._kept[layer] for other in each), strict=True)
            self._kept[layer] = tuple(torch.cat(part) for part in parts)

    def _update(self, layer: nn.Module, inputs: Tensor) -> None:
        self._updates[layer] += 1
        rate = update_rate(layer, self._updates[layer])
        values = _wide(_grouped(layer, inputs, self._victims))
        mean, count = _mean(values), _count(values)
        variance = _mean((values - mean).square()) * (count / max(1, count - 1))
        self._kept[layer] = tuple(
            (1 - rate) * kept + rate * value.view(self._victims, -1, value.shape[2]).mean(1)
            for kept, value in zip(self._kept[layer], (mean, variance), strict=True)
        )


def update_rate(layer: nn.Module, number: int) -> float | Tensor:
    """Return the weight of a batch in the layer's running statistics, at its update `number`.

    Without a momentum, a batch norm keeps the mean over all batches, an instance norm what it has.
    """
    assert isinstance(layer, NORMS)
    if layer.momentum is not None:
        return layer.momentum
    if isinstance(layer, INSTANCE_NORMS):
        return 0.0
    assert layer.num_batches_tracked is not None
    return 1 / (layer.num_batches_tracked + number).double()  # a whole number would give float32


def share_of_updates(layer: nn.Module, number: int) -> float | Tensor:
    """Return the weight that so many batches together have in the layer's running statistics."""
    left: float | Tensor = 1.0
    for update in range(1, number + 1):
        left = left * (1 - update_rate(layer, update))
    return 1 - left


def _keeps(layer: nn.Module) -> bool:
    return isinstance(layer, NORMS) and layer.training and layer.running_mean is not None


def _running(layer: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(layer, NORMS)
    assert layer.running_mean is not None and layer.running_var is not None
    return layer.running_mean, layer.running_var
