"""Does it work on this machine? A model that is known to leak, attacked as Zhu et al. 2019 did, on an image inside the package."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from gradveil.attacks.presets import SECOND_ORDER
from gradveil.checks.findings import Finding
from gradveil.clients import Client
from gradveil.core.devices import find_device
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.models import build
from gradveil.scores import psnr

DATA = "fashion-mnist-mini"
STEPS = 15
ENOUGH = 25.0  # dB: far above any blind guess


def self_check(device: str | torch.device = "auto", *, steps: int = STEPS) -> Finding:
    """A note with the figure, or an error where the image was not reconstructed."""
    place = find_device(device) if isinstance(device, str) else device
    split = load(DATA, "test")
    facts = {"channels": split.channels, "size": split.size, "classes": len(split.classes)}
    model = build("lenet", **facts, mean=split.mean, std=split.std).to(place)
    batch = Batch(split.images[:1].float() / 255, split.labels[:1])
    started = time.perf_counter()
    with _one_thread():
        seen = [one for one, _ in Client(model, len(split.classes)).share([batch], generator(0, "self-check"))]
        (found,) = replace(SECOND_ORDER, steps=steps, frames=0)(seen, generator(0, "self-check", "attack"))
    reached, seconds = float(psnr(found.images.cpu(), batch.images)), time.perf_counter() - started
    effort = f"{steps} steps of dlg, {seconds:.1f} s, {place.type}"
    means = f"an untrained lenet's gradient gave an embedded image back at {reached:.1f} dB ({effort})"
    if reached > ENOUGH:
        return Finding("note", "self-check", means, "nothing to do: attacks work on this machine")
    do = f"above {ENOUGH:.0f} dB is expected: trust no low figure from this machine; reinstall torch, or try --device cpu"
    return Finding("error", "self-check", means, do)


@contextmanager
def _one_thread() -> Iterator[None]:
    """So small a model gains nothing from more, and beside a busy process more are many times slower."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)
