"""Weights and gradients that no attack can work with: not finite, zero, or so small that they say little."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import torch
from torch import Tensor, nn

from gradveil.checks.cases import Case
from gradveil.checks.findings import Finding
from gradveil.clients import check_weights
from gradveil.core.errors import GradveilError
from gradveil.core.gradients import Gradients, gradient
from gradveil.core.seeds import generator

FLAT = 0.01  # of the steepest slope of a sigmoid or tanh
MOST_FLAT = 0.95  # share of a layer's units
FADED = 1e-3  # of what is usual

SLOPES: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: lambda y: (y > 0).double(),
    nn.ReLU6: lambda y: ((y > 0) & (y < 6)).double(),
    nn.Sigmoid: lambda y: 4 * y * (1 - y),
    nn.Tanh: lambda y: 1 - y.square(),
}
"""From an activation's output to its slope there, as a share of the steepest."""


def weights_not_finite(case: Case) -> Finding | None:
    try:
        check_weights(case.client.model)
    except GradveilError as error:
        return Finding("error", "weights", str(error), "nothing can be shared until then")
    return None


def gradients_not_finite(case: Case) -> Finding | None:
    for number, found in enumerate(case.plain):
        for name, value in found.items():
            if not bool(value.isfinite().all()):
                means = f"the gradient of {name!r} of victim {number} is not finite: the loss or its slope overflows"
                return Finding("error", "gradient", means, "take other weights, or a loss that stays finite on these images")
    return None


def gradients_zero(case: Case) -> Finding | None:
    norms = [_norm(found) for found in case.plain]
    dead = sum(norm == 0 for norm in norms)
    if not dead:
        return None
    means = f"the gradient of {dead} of {len(norms)} victims is zero: the model is dead or saturated there, and nothing can be matched"
    return Finding("error", "gradient", means, "take weights from earlier in training, or other images")


def saturated(case: Case) -> Finding | None:
    """Almost all units of a layer are flat for almost all images: dead ReLUs, sigmoids at 0 or 1."""
    flat: dict[str, float] = {}
    with case.passes(), ExitStack() as hooks:
        for name, module in case.model.named_modules():
            if slope := SLOPES.get(type(module)):
                hooks.callback(module.register_forward_hook(_measure(flat, name, slope)).remove)
        case.answers(torch.cat([case.placed(batch)[0] for batch in case.few]))
    worst = max(flat, key=lambda name: flat[name], default=None)
    if worst is None or flat[worst] < MOST_FLAT:
        return None
    kind = type(case.model.get_submodule(worst)).__name__
    means = f"{flat[worst]:.1%} of the units of {worst} ({kind}) have no slope: hardly any gradient gets through them"
    return Finding("warning", "saturation", means, "take other weights or a lower learning rate; a low figure here is no defense")


def faded(case: Case) -> Finding | None:
    """Gradients far below what is usual: those of early layers beside the others, or these images' beside noise's."""
    if not case.plain:
        return None
    depths = [_depth(found) for found in case.plain]
    if (depth := median(depths)) < FADED:
        means = f"the first layer's gradient is {depth:.0e} of the largest layer's: what it says of the pixels drowns in the rest"
        return Finding("warning", "vanishing", means, "take larger initial weights, normalization layers or other activations; no defense")
    noise = torch.rand(case.few[0].images.shape, generator=generator(case.seed, "checks", "noise")).to(case.example)
    with case.passes():
        usual = _norm(gradient(case.model, case.loss, noise, case.placed(case.few[0])[1]))
    own = median(map(_norm, case.plain))
    if not own < FADED * usual:
        return None
    means = f"the gradients' norm is {own:.1e}, that of noise images {usual:.1e}: the model is certain of these images"
    return Finding("warning", "vanishing", means, "audit images it was not trained on, or earlier weights; read low figures with care")


def _norm(found: Gradients) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in found.values()))


def _depth(found: Gradients) -> float:
    """The root mean square of the first weight's gradient beside the largest."""
    sizes = [float(value.double().square().mean().sqrt()) for value in found.values() if value.dim() > 1]
    return sizes[0] / max(sizes) if sizes and max(sizes) > 0 else 1.0


def _measure(
    flat: dict[str, float], name: str, slope: Callable[[Tensor], Tensor]
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def measure(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        flat[name] = float((slope(output) < FLAT).double().mean())

    return measure
