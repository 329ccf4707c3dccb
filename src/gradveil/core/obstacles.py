"""Why the victims of a model cannot share one batched pass, read from its modules."""

from collections.abc import Collection

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradveil.core.layers import RULES


def obstacle(model: nn.Module, told: Collection[str] = ()) -> str | None:
    """The first module that stands in the way, and why, in one line; None when none is known to.

    `told` are modules that do not draw themselves, since their draws are handed in.
    """
    for name, module in model.named_modules():
        reason = None if name in told else _reason(module)
        if reason is not None:
            return f"{name or 'the model'} ({type(module).__name__}) {reason}"
    return None


def direct(model: nn.Module) -> set[str]:
    """The trainable parameters used by no layer with a rule: position embeddings, class tokens."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if type(module) not in RULES
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }


def _reason(module: nn.Module) -> str | None:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "has hooks of its own, which may not treat rows alike"
    if isinstance(module, _BatchNorm) and (module.running_mean is None or module.running_var is None):
        return "keeps no running statistics, so it mixes the rows of a batch"
    if isinstance(module, _BatchNorm) and module.training:
        return "is in training mode, so it mixes the rows of a batch; model.eval() would allow it"
    if isinstance(module, _DropoutNd) and module.training and module.p > 0:
        return "is in training mode: dropout is on; model.eval() would allow it"
    return None if type(module) in RULES else _without_rule(module)


def _without_rule(module: nn.Module) -> str | None:
    """A parameter (1, ...) can be given to each row as a copy of its own; other shapes tell nothing about how they meet the rows."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and (parameter.dim() < 2 or len(parameter) != 1):
            return f"holds {name!r} of shape {tuple(parameter.shape)}, for which there is no rule"
    return None
