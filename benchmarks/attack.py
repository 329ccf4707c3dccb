"""Milliseconds per iteration of a cosine-matching attack: one batch against the plain loop.

    python benchmarks/attack.py [--models lenet small-convnet] [--victims 16] [--batch 1]
                                [--train-mode] [--local-steps 1] [--threads 2] [--device auto]
                                [--json FILE]

For real clients: --models small-convnet --batch 8 --train-mode

An iteration moves every victim's image by one signed Adam step with total variation: the preset
`adam-cosine`. The loop is that of other toolkits, one victim after the other through plain
autograd; it is timed on a few victims and scaled up. Both start from the same images; the script
checks that distances and slopes agree there before it times anything.
"""

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.attacks import GradientMatching, find
from gradveil.attacks.starts import Given
from gradveil.clients import Client
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation, Protocol
from gradveil.engine.device import find_device
from gradveil.models import build

TV = 1e-4


def small_convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for wide_in, wide_out, stride in ((3, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [nn.Conv2d(wide_in, wide_out, 3, stride, 1), nn.BatchNorm2d(wide_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 64, 100))


def plain_update(model: nn.Module, x: Tensor, label: Tensor, protocol: Protocol) -> list[Tensor]:
    """Return what a client shares of these images, by plain autograd."""
    start: dict[str, Tensor] = dict(model.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    weights, summed = start, [torch.zeros_like(weight) for weight in start.values()]
    for _ in range(protocol.local_steps):
        loss = F.cross_entropy(functional_call(model, {**buffers, **weights}, (x,)), label)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        summed = [total + slope for total, slope in zip(summed, slopes, strict=True)]
        moved = zip(start.items(), summed, strict=True)
        weights = {name: weight - protocol.local_lr * s for (name, weight), s in moved}
    return summed


def plain_slope(
    model: nn.Module, image: Tensor, label: Tensor, target: list[Tensor], protocol: Protocol
) -> tuple[Tensor, Tensor]:
    """Return the distance of a victim and its slope at the images, by plain autograd."""
    x = image.detach().requires_grad_()
    found = plain_update(model, x, label, protocol)
    dot = torch.stack([(f * t).sum() for f, t in zip(found, target, strict=True)]).sum()
    norms = [
        torch.stack([part.square().sum() for part in parts]).sum().sqrt()
        for parts in (found, target)
    ]
    distance = 1 - dot / (norms[0] * norms[1])
    variation = x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
    return distance.detach(), torch.autograd.grad(distance + TV * variation, x)[0]


def plain_loop(
    model: nn.Module,
    starts: Tensor,
    labels: Tensor,
    targets: list[list[Tensor]],
    steps: int,
    protocol: Protocol,
) -> list[Tensor]:
    """Attack one victim after the other; return the distances of each, (steps,)."""
    trail = []
    for start, label, target in zip(starts, labels, targets, strict=True):
        x = start.clone()
        optimizer = torch.optim.Adam([x], 0.1)
        distances = []
        for _ in range(steps):
            distance, slope = plain_slope(model, x, label, target, protocol)
            distances.append(distance)
            x.grad = slope.sign()
            optimizer.step()
            x.clamp_(0, 1)
        trail.append(torch.stack(distances))
    return trail


def timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def batched_ms(
    attack: GradientMatching,
    seen: list[Observation],
    device: torch.device,
    steps: int,
    repeats: int,
) -> float:
    """Return milliseconds per iteration, from the difference of a long and a short run.

    So set-up, capture and reading back do not count. A run before them compiles what is compiled.
    """
    replace(attack, steps=10)(seen, generator(0))
    taken = []
    for _ in range(repeats):
        short, long = (
            timed(partial(replace(attack, steps=n), seen, generator(0)), device)
            for n in (10, 10 + steps)
        )
        taken.append((long - short) / steps * 1e3)
    return statistics.median(taken)


def compare(
    name: str, victims: int, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    if name == "small-convnet":
        model = small_convnet()
    else:
        model = build(name, channels=3, size=32, classes=100)
    protocol = Protocol(local_steps=options.local_steps, train_mode=options.train_mode)
    model = model.to(device).train(protocol.train_mode)
    rng = generator(0, "benchmark")
    images = torch.rand(victims, options.batch, 3, 32, 32, generator=rng)
    labels = torch.randint(100, (victims, options.batch), generator=rng)
    starts = torch.rand(images.shape, generator=rng)
    attack = find("adam-cosine")
    assert isinstance(attack, GradientMatching)
    attack = replace(attack, start=Given(starts), frames=0, decay=False)
    few = min(options.loop_victims or victims, victims)
    worst = _check(attack, model, protocol, images[:few], labels[:few], starts[:few])
    client = Client(model, classes=100, protocol=protocol)
    batches = [Batch(x.to(device), y.to(device)) for x, y in zip(images, labels, strict=True)]
    seen = [shared.seen for shared in client.share_batches(batches, rng)]
    targets = [list(victim.gradients.values()) for victim in seen[:few]]
    begin, theirs = starts[:few].to(device), labels[:few].to(device)
    plain_loop(model, begin[:1], theirs[:1], targets[:1], 2, protocol)
    work = partial(plain_loop, model, begin, theirs, targets, options.loop_steps, protocol)
    loop = statistics.median(timed(work, device) for _ in range(options.repeats))
    loop_ms = loop / options.loop_steps / few * victims * 1e3
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = batched_ms(attack, seen, device, options.steps, options.repeats)
    precise = None
    if device.type == "cuda":  # where `fast` means TF32 and bf16; the loop is in float32
        slow = replace(attack, fast=False)
        precise = batched_ms(slow, seen, device, options.steps, options.repeats)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "model": name,
        "victims": victims,
        "batch": options.batch,
        "train_mode": protocol.train_mode,
        "local_steps": protocol.local_steps,
        "batched_ms": ms,
        "float32_ms": precise,
        "loop_ms": loop_ms,
        "loop_victims": few,
        "ratio": loop_ms / ms,
        "slope_error": worst,
        "peak_gib": peak,
    }


def _check(
    attack: GradientMatching,
    model: nn.Module,
    protocol: Protocol,
    images: Tensor,
    labels: Tensor,
    starts: Tensor,
) -> float:
    """Return the largest relative error of a victim's slope, both sides in float64.

    In float32 the rounding of each local step is amplified by the next, in the loop as well.
    """
    from gradveil.attacks.matching import Problem

    device = next(model.parameters()).device
    precise = copy.deepcopy(model).double()
    x, y, begin = (part.to(device) for part in (images.double(), labels, starts.double()))
    batches = [Batch(some, its) for some, its in zip(x, y, strict=True)]
    client = Client(precise, classes=100, protocol=protocol)
    seen = [shared.seen for shared in client.share_batches(batches, generator(0))]
    exact = [
        plain_slope(precise, image, its, list(victim.gradients.values()), protocol)
        for image, its, victim in zip(begin, y, seen, strict=True)
    ]
    problem = Problem.draw(replace(attack, start=Given(begin), fast=False), seen, generator(0))
    losses, slopes = problem.evaluate()
    errors = [float((s - e).norm() / e.norm()) for s, (_, e) in zip(slopes[0], exact, strict=True)]
    variation = TV * (
        begin.diff(dim=-1).abs().flatten(1).mean(1) + begin.diff(dim=-2).abs().flatten(1).mean(1)
    )
    torch.testing.assert_close(
        losses - variation, torch.stack([d for d, _ in exact]), rtol=1e-6, atol=1e-9
    )
    if max(errors) > 1e-6:
        raise SystemExit(f"the batched slope differs from the loop's by {max(errors):.1%}")
    return max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["lenet", "small-convnet"])
    parser.add_argument("--victims", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1, help="images of each victim")
    parser.add_argument("--train-mode", action="store_true")
    parser.add_argument("--local-steps", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loop-steps", type=int, default=5)
    parser.add_argument(
        "--loop-victims", type=int, default=0, help="time the loop on so many victims only"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = find_device(options.device)
    rows = [compare(name, options.victims, device, options) for name in options.models]
    for row in rows:
        memory = "" if row["peak_gib"] is None else f", peak {row['peak_gib']:.1f} GiB"
        print(
            f"{row['model']}: {row['victims']} victims of {row['batch']} images"
            f"{', train mode' if row['train_mode'] else ''}, {row['local_steps']} step(s): "
            f"batched {row['batched_ms']:.2f} ms, "
            f"loop {row['loop_ms']:.0f} ms an iteration, "
            f"{row['ratio']:.1f}x (slope error {row['slope_error']:.1e}{memory})"
        )
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    facts = {
        "machine": machine,
        "threads": options.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
