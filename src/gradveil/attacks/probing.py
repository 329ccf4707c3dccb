"""Passes of a model that leave it as it is, and what an attacker without data learns of its answers from pictures of noise."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import GradveilError
from gradveil.core.gradients import Gradients, per_sample
from gradveil.core.seeds import following
from gradveil.core.shares import in_mode
from gradveil.core.types import Observation


def outputs(model: nn.Module, images: Tensor, train_mode: bool, weights: Gradients | None = None) -> Tensor:
    """The model's answer in this mode, with other weights if given, which leaves it as it is: buffers that a pass may update are copies."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with in_mode(model, train_mode):
        found: Tensor = functional_call(model, {**buffers, **(weights or {})}, (images,))
    return found


@dataclass(frozen=True, eq=False)
class Expected:
    """What the gradients of the last layer are made of, by the mean over noise images.

    `absent` (classes,): the slope of the loss at a logit whose class is not the label; `drop` (1,): how much lower it is at the
    label's own; `features` (1,): the sum of the layer's inputs. For cross-entropy `absent` holds the mean probabilities and
    `drop` is 1. Taken from the client's own loss, they fit a scaled or a smoothed one too.
    """

    absent: Tensor
    drop: Tensor
    features: Tensor


def expect(one: Observation, layer: nn.Linear, count: int, rng: Generator) -> Expected:
    """From `count` images of uniform noise; with several local steps, before the first and before the last of them."""
    noise = torch.rand(count, *one.image_shape, generator=rng, device=rng.device).to(layer.weight)
    features: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    try:
        with torch.no_grad(), following(rng):
            logits = torch.cat([outputs(one.model, noise, one.protocol.train_mode, weights) for weights in _stages(one)])
    finally:
        hook.remove()
    if not features:
        raise GradveilError("the last linear layer plays no part in the model's output, so labels cannot be counted; give the labels")
    first, second = (_slopes(one, logits, label) for label in (0, 1))
    absent = torch.cat([second[:1], first[1:]])
    return Expected(absent, absent[:1] - first[:1], torch.cat(features).sum(-1).mean().view(1))


def _stages(one: Observation) -> list[Gradients]:
    """The weights before the first local step and, about, before the last: W_0 - rate (k - 1) / k times the shared sum of gradients."""
    steps = one.protocol.local_steps
    if steps == 1:
        return [{}]
    rate = one.protocol.local_lr * (steps - 1) / steps
    return [{}, {name: p - rate * one.gradients[name] for name, p in one.model.named_parameters() if name in one.gradients}]


def _slopes(one: Observation, logits: Tensor, label: int) -> Tensor:
    logits = logits.detach().requires_grad_()
    labels = torch.full((len(logits),), label, device=logits.device)
    with torch.enable_grad():
        (found,) = torch.autograd.grad(per_sample(one.loss, logits, labels).sum(), logits)
    return found[:, : one.classes].mean(0)  # a model may answer with penalties behind the logits
