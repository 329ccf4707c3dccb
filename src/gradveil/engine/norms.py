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


def is_normalized(layer: nn.Module) -> bool:
    """Tell whether `normalize` stands for the layer, with the statistics of each victim."""
    return type(layer) in NORMALIZED and takes_statistics(layer)


def normalize(layer: Norm, inputs: Tensor, victims: int) -> Tensor:
    """Return (a - mean) / std with the statistics of each victim's rows, without scale and shift.

    The result can be differentiated twice.
    """
    values = _grouped(layer, inputs, victims)
    if values.shape[1] * values.shape[3] == 1:
        raise GradveilError(
            f"{type(layer).__name__} in training mode got a single value for each channel, from "
            f"an input of shape {tuple(inputs.shape)} for {victims} victim(s): it needs several; "
            "take larger batches, or eval mode"
        )
    normal: Tensor
    normal, _ = _Standardized.apply(values, layer.eps)  # type: ignore[no-untyped-call]
    return normal.view(inputs.shape)


def scale_by_channel(values: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Return scale x + shift, channel by channel; both have one row for all, or one a victim."""
    if scale is None:
        return values
    rows: Tensor = values.unflatten(0, (scale.shape[0] if scale.dim() == 2 else 1, -1))
    shape = (rows.shape[0], 1, -1, *(1,) * (values.dim() - 2))
    scale = scale.to(values.dtype).view(shape)
    if shift is None:
        return (rows * scale).flatten(0, 1)
    return torch.addcmul(shift.to(values.dtype).view(shape), rows, scale).flatten(0, 1)


def _grouped(layer: nn.Module, inputs: Tensor, victims: int) -> Tensor:
    """Return a view (groups, rows, channels, positions); statistics are those of a group."""
    groups = len(inputs) if isinstance(layer, INSTANCE_NORMS) else victims
    return inputs.reshape(groups, len(inputs) // groups, inputs.shape[1], -1)


class _Standardized(torch.autograd.Function):
    """z = (x - mean) / std and 1 / std of (groups, rows, channels, positions).

    With n values in a group and r = 1 / std, dz/dx = r (I - 1 1' / n - z z' / n), which is
    symmetric, and dr/dx = -r^2 z / n. Short formats add up in float32.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = _wide(values)
        centered = wide - _mean(wide)
        scale = (_mean(centered.square()) + eps).rsqrt()
        normal = centered.mul_(scale).to(values.dtype)
        ctx.save_for_backward(normal, scale)
        ctx.set_materialize_grads(False)
        return normal, scale

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None, to_scale: Tensor | None) -> tuple[Any, None]:
        normal, scale = ctx.saved_tensors
        found: Tensor | None = None
        if slope is not None:
            found = _Slope.apply(slope, normal, scale)  # type: ignore[no-untyped-call]
        if to_scale is not None:  # of the second derivative alone
            part = normal * (to_scale * scale.square() / -_count(normal)).to(normal.dtype)
            found = part if found is None else found + part
        return found, None


class _Slope(torch.autograd.Function):
    """r (g - mean(g) - z mean(g z)), the slope at x for the slope g at z."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, normal: Tensor, scale: Tensor) -> Tensor:
        wide, z = _wide(slope), _wide(normal)
        plain, mixed = _mean(wide), _mean(wide * z)
        ctx.save_for_backward(slope, normal, scale, plain, mixed)
        return torch.addcmul(wide - plain, z, mixed, value=-1).mul_(scale).to(slope.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope, normal, scale, plain, mixed = ctx.saved_tensors
        u, g, z = _wide(to_found), _wide(slope), _wide(normal)
        mean, with_normal = _mean(u), _mean(u * z)
        with_slope = _mean(u * g)
        to_slope = torch.addcmul(u - mean, z, with_normal, value=-1).mul_(scale)
        to_normal = (u * (-scale * mixed)).addcmul_(g, -scale * with_normal)
        to_scale = _count(z) * (with_slope - mean * plain - with_normal * mixed)
        return to_slope.to(slope.dtype), to_normal.to(normal.dtype), to_scale


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
                hooks.callback(layer.register_forward_pre_hook(self._update).remove)
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

    def _update(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._updates[layer] += 1
        rate = update_rate(layer, self._updates[layer])
        values = _wide(_grouped(layer, inputs[0], self._victims))
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


def _keeps(layer: nn.Module) -> bool:
    return isinstance(layer, NORMS) and layer.training and layer.running_mean is not None


def _running(layer: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(layer, NORMS)
    assert layer.running_mean is not None and layer.running_var is not None
    return layer.running_mean, layer.running_var
