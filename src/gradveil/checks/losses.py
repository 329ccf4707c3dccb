"""The loss of the client and that of the attacker."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.checks.cases import Case
from gradveil.checks.findings import Finding
from gradveil.core.gradients import Loss, cross_entropy, per_sample

SAME = 1e-4  # relative, above the rounding of float32 and below any scale that matters


@dataclass(frozen=True)
class ScaledCrossEntropy:
    """As a client shares that trains with a scaled loss."""

    scale: float = 1.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.scale * cross_entropy(logits, labels)


def losses_differ(case: Case) -> Finding | None:
    """Compares what the two pull each logit by: constants do not matter, gradients do."""
    if case.attacker_loss is None:
        return None
    images, labels = case.placed(case.few[0])
    with case.passes():
        answers = case.answers(images)
    attacker = case.client.acting.protect_loss(case.attacker_loss)
    own, theirs = (_slopes(loss, answers, labels) for loss in (case.loss, attacker))
    if float((own - theirs).norm()) <= SAME * max(float(own.norm()), float(theirs.norm())):
        return None
    factor = float((own * theirs).sum() / theirs.square().sum().clamp_min(1e-30))
    do = "give the attacker the client's own loss; Client.share puts it into the observation"
    if float((own - factor * theirs).norm()) <= SAME * float(own.norm()):
        scaled = f"the client's loss is {factor:.4g} times the attacker's: a distance by angle (cosine) does not see it, L1 and L2 do"
        return Finding("warning", "loss", f"{scaled} and then look for images with the wrong gradient", do)
    alike = float(torch.nn.functional.cosine_similarity(own.flatten(), theirs.flatten(), dim=0))
    means = f"the losses of client and attacker differ (cosine of their slopes {alike:.3f}): even the true images do not match"
    return Finding("warning", "loss", means, do)


def _slopes(loss: Loss, answers: Tensor, labels: Tensor) -> Tensor:
    leaf = answers.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(per_sample(loss, leaf, labels).sum(), leaf, materialize_grads=True)
    return found
