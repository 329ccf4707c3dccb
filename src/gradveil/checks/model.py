"""Checks of the model: weights, gradients, modes, random draws, and whether it can be batched."""

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

FLAT = 0.01  # a slope below this share of an activation's steepest is none
MOST_FLAT = 0.95  # a layer with this share of flat units is saturated
FADED = 1e-3  # a gradient below this share of the usual one has vanished

SLOPES: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: lambda y: (y > 0).double(),
    nn.ReLU6: lambda y: ((y > 0) & (y < 6)).double(),
    nn.Sigmoid: lambda y: 4 * y * (1 - y),
    nn.Tanh: lambda y: 1 - y.square(),
}
"""The slope of an activation, as a share of its steepest, as a function of its output."""


def weights_not_finite(subject: Subject) -> Finding | None:
    """Find a weight or running statistic that is not finite."""
    try:
        check_weights(subject.client.model)
    except GradveilError as error:
        return Finding("error", "weights", str(error), "nothing can be shared until then")
    return None


def gradients_not_finite(subject: Subject) -> Finding | None:
    """Find a gradient that is not finite."""
    for number, found in enumerate(subject.plain):
        for name, value in found.items():
            if not bool(value.isfinite().all()):
                means = (
                    f"the gradient of {name!r} of victim {number} is not finite: "
                    "the loss or its slope overflows"
                )
                return Finding(
                    "error",
                    "gradient",
                    means,
                    "take other weights, or a loss that stays finite on these images",
                )
    return None


def gradients_zero(subject: Subject) -> Finding | None:
    """Find victims whose whole gradient is zero."""
    norms = [_norm(found) for found in subject.plain]
    dead = sum(norm == 0 for norm in norms)
    if not dead:
        return None
    means = (
        f"the gradient of {dead} of {len(norms)} victims is zero: the model is dead or saturated "
        "there, and nothing can be matched"
    )
    return Finding(
        "error", "gradient", means, "take weights from earlier in training, or other images"
    )


def saturated(subject: Subject) -> Finding | None:
    """Find a layer with almost all units flat for almost all images, such as dead ReLUs."""
    flat: dict[str, float] = {}
    with subject.passes(), ExitStack() as hooks:
        for name, module in subject.model.named_modules():
            if slope := SLOPES.get(type(module)):
                hooks.callback(module.register_forward_hook(_measure(flat, name, slope)).remove)
        subject.answers(torch.cat([subject.placed(batch)[0] for batch in subject.few]))
    worst = max(flat, key=lambda name: flat[name], default=None)
    if worst is None or flat[worst] < MOST_FLAT:
        return None
    kind = type(subject.model.get_submodule(worst)).__name__
    means = (
        f"{flat[worst]:.1%} of the units of {worst} ({kind}) have no slope: "
        "hardly any gradient gets through them"
    )
    return Finding(
        "warning",
        "saturation",
        means,
        "take other weights or a lower learning rate; a low figure here is no defense",
    )


def faded(subject: Subject) -> Finding | None:
    """Find gradients that are far too small: the first layer's beside those of the other layers,
    or those of these images beside those of noise.
    """
    if not subject.plain:
        return None
    depths = [_depth(found) for found in subject.plain]
    if (depth := median(depths)) < FADED:
        means = (
            f"the first layer's gradient is {depth:.0e} of the largest layer's: "
            "what it says of the pixels drowns in the rest"
        )
        return Finding(
            "warning",
            "vanishing",
            means,
            "take larger initial weights, normalization layers or other activations; no defense",
        )
    noise = torch.rand(
        subject.few[0].images.shape, generator=generator(subject.seed, "checks", "noise")
    ).to(subject.example)
    with subject.passes():
        usual = _norm(
            gradient(subject.model, subject.loss, noise, subject.placed(subject.few[0])[1])
        )
    norm = median(map(_norm, subject.plain))
    if not norm < FADED * usual:
        return None
    means = (
        f"the gradients' norm is {norm:.1e}, that of noise images {usual:.1e}: "
        "the model is certain of these images"
    )
    return Finding(
        "warning",
        "vanishing",
        means,
        "audit images it was not trained on, or earlier weights; read low figures with care",
    )


def _norm(found: Gradients) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in found.values()))


def _depth(found: Gradients) -> float:
    """The root mean square of the first weight's gradient, as a share of the largest."""
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


def dropout_on(subject: Subject) -> Finding | None:
    """Find dropout that is on: its masks hide part of the model from the attacker."""
    with in_mode(subject.model, subject.client.protocol.train_mode):
        on = {
            n: m
            for n, m in subject.model.named_modules()
            if isinstance(m, _DropoutNd) and m.training and m.p > 0
        }
    if not on:
        return None
    means = (
        f"dropout is on in {_few(on)}: each gradient is that of a thinned model whose masks "
        "the attacker does not know"
    )
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
        "keep it where your clients train so, and add the attack joint-masks, which looks for the "
        "masks too",
    )


def batch_statistics(subject: Subject) -> Finding | None:
    """Find batch norm that takes its statistics from the batch, which mixes the batch's images."""
    with in_mode(subject.model, subject.client.protocol.train_mode):
        norms = {n: m for n, m in subject.model.named_modules() if isinstance(m, _BatchNorm)}
        on = {n: m for n, m in norms.items() if m.training or m.running_mean is None}
    if not on:
        return None
    size = len(subject.few[0])
    alone = (
        ", and a batch of one image is normalized by itself alone"
        if size == 1
        else f", the {size} images of a victim mixed"
    )
    means = f"batch norm takes its statistics from the batch in {_few(on)}{alone}"
    if any(module.running_mean is None for module in on.values()):
        do = "keep it where your clients' model is so; else give it track_running_stats=True"
    else:
        do = "keep it where your clients train so: an audit is to have the mode that they have"
    return Finding("note", "batch norm", means, do)


def _few(named: Mapping[str, nn.Module]) -> str:
    first, *more = named
    kind = type(named[first]).__name__
    return f"{first or 'the model'} ({kind})" + (f" and {len(more)} more" if more else "")


SAME = 1e-4  # relative: larger than what the order of sums on a GPU makes


def shares_differ(subject: Subject) -> Finding | None:
    """Find shares of one batch that differ: a note under a random defense, else a warning."""
    change = relative_change(subject.shared, subject.share(1))
    if change <= SAME:
        return None
    acting = subject.client.acting
    if acting.random:
        means = (
            f"two shares of one batch differ by {change:.0%} of their size, "
            f"since {acting} draws anew each time"
        )
        do = (
            "audit many images, with --attack auto, which adds the attacks that undo it: "
            "one lucky draw proves nothing"
        )
        return Finding("note", "random shares", means, do)
    means = (
        f"two shares of one batch differ by {change:.0%} of their size, "
        f"though the defense ({acting}) draws nothing: the model does"
    )
    return Finding(
        "warning",
        "random shares",
        means,
        "turn off what is random in the model (dropout, noise), or name it as a defense",
    )


def relative_change(shared: list[Shared], again: list[Shared]) -> float:
    """|g - g'| / |g| over all victims together."""
    difference = total = 0.0
    for (first, _), (second, _) in zip(shared, again, strict=True):
        for name, value in first.gradients.items():
            difference += float((second.gradients[name] - value).double().square().sum())
            total += float(value.double().square().sum())
    return math.sqrt(difference / total) if total else 0.0


def not_batchable(subject: Subject) -> Finding | None:
    """Find a model whose victims must be taken one by one, and measure how much slower that is.

    The measure is the time of a few victims beside that of one plain pass of all their images.
    """
    used = [batch for _, batch in subject.shared]
    streams = [generator(subject.seed, "checks", "engine", number) for number in range(len(used))]
    shared = Rounds(subject.model, subject.loss, subject.client.protocol, Defense(), used, streams)
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
        for _ in range(subject.client.protocol.local_epochs * subject.client.protocol.local_steps):
            gradient(subject.model, subject.loss, images, labels)

    with quiet(), subject.passes():
        slowly = seconds(
            lambda: Rounds(
                subject.model, subject.loss, subject.client.protocol, Defense(), used, streams
            ).next()
        )
        times = slowly / seconds(together)
    means = (
        f"victims are taken one at a time, as {reason}: {len(used)} of them take {times:.1f} times "
        "as long as one pass of their images"
    )
    return Finding(
        "warning",
        "engine",
        means,
        "use layers that the batched engine has rules for, or fewer images and more patience",
    )


def seconds(work: Callable[[], object]) -> float:
    """The seconds that the work takes: the shorter of two runs."""
    found = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found)
