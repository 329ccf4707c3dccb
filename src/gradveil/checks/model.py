"""Weights and gradients that no attack can work with: not finite, zero, or so small that they say little."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradveil.checks.subject import Finding, Subject, quiet
from gradveil.clients import Rounds, Shared, check_weights
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import forked, generator
from gradveil.core.types import Gradients
from gradveil.defenses import Defense
from gradveil.engine.gradients import gradient, in_mode
from gradveil.models.bottleneck import AlwaysDropout

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


def weights_not_finite(case: Subject) -> Finding | None:
    try:
        check_weights(case.client.model)
    except GradveilError as error:
        return Finding("error", "weights", str(error), "nothing can be shared until then")
    return None


def gradients_not_finite(case: Subject) -> Finding | None:
    for number, found in enumerate(case.plain):
        for name, value in found.items():
            if not bool(value.isfinite().all()):
                means = f"the gradient of {name!r} of victim {number} is not finite: the loss or its slope overflows"
                return Finding(
                    "error",
                    "gradient",
                    means,
                    "take other weights, or a loss that stays finite on these images",
                )
    return None


def gradients_zero(case: Subject) -> Finding | None:
    norms = [_norm(found) for found in case.plain]
    dead = sum(norm == 0 for norm in norms)
    if not dead:
        return None
    means = f"the gradient of {dead} of {len(norms)} victims is zero: the model is dead or saturated there, and nothing can be matched"
    return Finding(
        "error", "gradient", means, "take weights from earlier in training, or other images"
    )


def saturated(case: Subject) -> Finding | None:
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
    return Finding(
        "warning",
        "saturation",
        means,
        "take other weights or a lower learning rate; a low figure here is no defense",
    )


def faded(case: Subject) -> Finding | None:
    """Gradients far below what is usual: those of early layers beside the others, or these images' beside noise's."""
    if not case.plain:
        return None
    depths = [_depth(found) for found in case.plain]
    if (depth := median(depths)) < FADED:
        means = f"the first layer's gradient is {depth:.0e} of the largest layer's: what it says of the pixels drowns in the rest"
        return Finding(
            "warning",
            "vanishing",
            means,
            "take larger initial weights, normalization layers or other activations; no defense",
        )
    noise = torch.rand(
        case.few[0].images.shape, generator=generator(case.seed, "checks", "noise")
    ).to(case.example)
    with case.passes():
        usual = _norm(gradient(case.model, case.loss, noise, case.placed(case.few[0])[1]))
    own = median(map(_norm, case.plain))
    if not own < FADED * usual:
        return None
    means = f"the gradients' norm is {own:.1e}, that of noise images {usual:.1e}: the model is certain of these images"
    return Finding(
        "warning",
        "vanishing",
        means,
        "audit images it was not trained on, or earlier weights; read low figures with care",
    )


def _norm(found: Gradients) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in found.values()))


def _depth(found: Gradients) -> float:
    """The root mean square of the first weight's gradient beside the largest."""
    sizes = [
        float(value.double().square().mean().sqrt()) for value in found.values() if value.dim() > 1
    ]
    return sizes[0] / max(sizes) if sizes and max(sizes) > 0 else 1.0


def _measure(
    flat: dict[str, float], name: str, slope: Callable[[Tensor], Tensor]
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def measure(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        flat[name] = float((slope(output) < FLAT).double().mean())

    return measure


def dropout_on(case: Subject) -> Finding | None:
    """Masks hide part of the model from the attacker, who must find them too."""
    with in_mode(case.model, case.client.protocol.train_mode):
        on = {
            n: m
            for n, m in case.model.named_modules()
            if isinstance(m, _DropoutNd) and m.training and m.p > 0
        }
    if not on:
        return None
    means = f"dropout is on in {_few(on)}: each gradient is that of a thinned model whose masks the attacker does not know"
    if all(isinstance(module, AlwaysDropout) for module in on.values()):
        return Finding(
            "note",
            "dropout",
            means,
            "it is the defense's own: add the attack joint-masks, which looks for the masks too",
        )
    return Finding(
        "warning",
        "dropout",
        means,
        "leave train mode out, or add the attack joint-masks, which looks for the masks too",
    )


def batch_statistics(case: Subject) -> Finding | None:
    """Then the images of a batch depend on each other."""
    with in_mode(case.model, case.client.protocol.train_mode):
        norms = {n: m for n, m in case.model.named_modules() if isinstance(m, _BatchNorm)}
        on = {n: m for n, m in norms.items() if m.training or m.running_mean is None}
    if not on:
        return None
    size = len(case.few[0])
    alone = (
        ", and a batch of one image is normalized by itself alone"
        if size == 1
        else f", the {size} images of a victim mixed"
    )
    means = f"batch norm takes its statistics from the batch in {_few(on)}{alone}; victims are attacked one at a time, which is slow"
    if any(module.running_mean is None for module in on.values()):
        return Finding(
            "warning",
            "batch norm",
            means,
            "give those layers track_running_stats=True, or GroupNorm in their place",
        )
    return Finding(
        "warning",
        "batch norm",
        means,
        "leave train mode out, unless your clients share such gradients: then keep it",
    )


def _few(named: Mapping[str, nn.Module]) -> str:
    first, *more = named
    kind = type(named[first]).__name__
    return f"{first or 'the model'} ({kind})" + (f" and {len(more)} more" if more else "")


SAME = 1e-4  # relative, above what the order of sums on a GPU makes


def shares_differ(case: Subject) -> Finding | None:
    """A note where the defense is meant to draw, a warning where nothing should."""
    change = relative_change(case.shared, case.share(1))
    if change <= SAME:
        return None
    acting = case.client.acting
    if acting.random:
        who = str(acting)
        means = f"two shares of one batch differ by {change:.0%} of their size, since {who} draws anew each time"
        do = "audit many images, with --attack auto, which adds the attacks that undo it: one lucky draw proves nothing"
        return Finding("note", "random shares", means, do)
    means = f"two shares of one batch differ by {change:.0%} of their size, though the defense ({acting}) draws nothing: the model does"
    return Finding(
        "warning",
        "random shares",
        means,
        "turn off what is random in the model (dropout, noise), or name it as a defense",
    )


def relative_change(one: list[Shared], other: list[Shared]) -> float:
    """|g - g'| / |g| over all victims together."""
    difference = total = 0.0
    for (first, _), (second, _) in zip(one, other, strict=True):
        for name, value in first.gradients.items():
            difference += float((second.gradients[name] - value).double().square().sum())
            total += float(value.double().square().sum())
    return math.sqrt(difference / total) if total else 0.0


def not_batchable(case: Subject) -> Finding | None:
    """The slowdown is that of a few victims one by one, against one plain pass of all their images."""
    used = [batch for _, batch in case.shared]
    streams = [generator(case.seed, "checks", "engine", number) for number in range(len(used))]
    shared = Rounds(case.model, case.loss, case.client.protocol, Defense(), used, streams)
    with quiet(), forked():
        shared.next()
    reason = shared.shares.why_not
    if reason is None:
        return None
    images, labels = (
        torch.cat([batch.images for batch in used]),
        torch.cat([batch.labels for batch in used]),
    )

    def together() -> None:
        for _ in range(case.client.protocol.local_steps):
            gradient(case.model, case.loss, images, labels)

    with quiet(), case.passes():
        slowly = seconds(
            lambda: Rounds(
                case.model, case.loss, case.client.protocol, Defense(), used, streams
            ).next()
        )
        times = slowly / seconds(together)
    means = f"victims are taken one at a time, as {reason}: {len(used)} of them take {times:.1f} times as long as one pass of their images"
    return Finding(
        "warning",
        "engine",
        means,
        "use layers that the batched engine has rules for, or fewer images and more patience",
    )


def seconds(work: Callable[[], object]) -> float:
    """The shorter of two runs."""
    found = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found)
