"""Layers that behave otherwise in training: dropout, and batch norm that uses the batch's own statistics."""

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradveil.checks.cases import Case
from gradveil.checks.findings import Finding
from gradveil.core.shares import in_mode
from gradveil.models.bottleneck import AlwaysDropout


def dropout_on(case: Case) -> Finding | None:
    """Masks hide part of the model from the attacker, who must find them too."""
    with in_mode(case.model, case.client.protocol.train_mode):
        on = {n: m for n, m in case.model.named_modules() if isinstance(m, _DropoutNd) and m.training and m.p > 0}
    if not on:
        return None
    means = f"dropout is on in {_few(on)}: each gradient is that of a thinned model whose masks the attacker does not know"
    if all(isinstance(module, AlwaysDropout) for module in on.values()):
        return Finding("note", "dropout", means, "it is the defense's own: add the attack joint-masks, which looks for the masks too")
    return Finding("warning", "dropout", means, "leave train mode out, or add the attack joint-masks, which looks for the masks too")


def batch_statistics(case: Case) -> Finding | None:
    """Then the images of a batch depend on each other."""
    with in_mode(case.model, case.client.protocol.train_mode):
        norms = {n: m for n, m in case.model.named_modules() if isinstance(m, _BatchNorm)}
        on = {n: m for n, m in norms.items() if m.training or m.running_mean is None}
    if not on:
        return None
    size = len(case.few[0])
    alone = ", and a batch of one image is normalized by itself alone" if size == 1 else f", the {size} images of a victim mixed"
    means = f"batch norm takes its statistics from the batch in {_few(on)}{alone}; victims are attacked one at a time, which is slow"
    if any(module.running_mean is None for module in on.values()):
        return Finding("warning", "batch norm", means, "give those layers track_running_stats=True, or GroupNorm in their place")
    return Finding("warning", "batch norm", means, "leave train mode out, unless your clients share such gradients: then keep it")


def _few(named: Mapping[str, nn.Module]) -> str:
    first, *more = named
    kind = type(named[first]).__name__
    return f"{first or 'the model'} ({kind})" + (f" and {len(more)} more" if more else "")
