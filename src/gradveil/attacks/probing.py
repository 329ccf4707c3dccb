"""Passes of a model that leave it as it is, and what an attacker without data learns of its answers from pictures of noise."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import GradveilError
from gradveil.core.gradients import per_sample
from gradveil.core.shares import in_mode
from gradveil.core.types import Observation


def outputs(model: nn.Module, images: Tensor, train_mode: bool) -> Tensor:
    """The model's answer in this mode, which leaves it as it is: buffers that a layer in training mode would update are copies."""
    with in_mode(model, train_mode):
        found: Tensor = functional_call(model, {name: buffer.clone() for name, buffer in model.named_buffers()}, (images,))
    return found


def probe(one: Observation, layer: nn.Linear, count: int, rng: Generator) -> tuple[Tensor, Tensor]:
    """The logits of `count` images of uniform noise, and the mean over them of the sum of the layer's inputs."""
    noise = torch.rand(count, *one.image_shape, generator=rng, device=rng.device).to(layer.weight)
    features: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    try:
        with torch.no_grad(), _seeded(rng, noise.device):
            logits = outputs(one.model, noise, one.protocol.train_mode)
    finally:
        hook.remove()
    if not features:
        raise GradveilError("the last linear layer plays no part in the model's output, so labels cannot be counted; give the labels")
    return logits, features[-1].sum(-1).mean()


def expected_pulls(one: Observation, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The mean slope of the loss at each logit when its class is absent, and how much lower it is when it is the label.

    For cross-entropy these are the mean probabilities and 1. Taken from the client's own loss, they fit a scaled or smoothed one too.
    """
    first, second = (_slopes(one, logits, label) for label in (0, 1))
    absent = torch.cat([second[:1], first[1:]])
    return absent, absent[0] - first[0]


def _slopes(one: Observation, logits: Tensor, label: int) -> Tensor:
    logits = logits.detach().requires_grad_()
    labels = torch.full((len(logits),), label, device=logits.device)
    with torch.enable_grad():
        (found,) = torch.autograd.grad(per_sample(one.loss, logits, labels).sum(), logits)
    return found.mean(0)


@contextmanager
def _seeded(rng: Generator, device: torch.device) -> Iterator[None]:
    """Models that draw in their forward pass (dropout, PRECODE) use torch's global generator: it follows rng, and is put back."""
    with torch.random.fork_rng(range(torch.cuda.device_count()) if device.type == "cuda" else []):
        torch.manual_seed(int(torch.randint(2**62, (), generator=rng, device=rng.device)))
        yield
