"""Seconds to score a policy (100 images, 21 points): in one batch, and by the plain loop.

    python benchmarks/search.py [--model small-convnet] [--policies 4] [--loop-images 2]
        [--threads 2] [--device auto] [--json FILE]

The loop does what the published code does, one gradient after the other through plain autograd; it
is timed on a few images and scaled up. The script first checks that both give the same score for
those images. On a GPU the fast form (bf16) is timed beside the one in float32, and its score is
compared. The accuracy score (10 batches of 100 images) is timed alone.
Images are random, or CIFAR-100's with --data-root; weights are untrained: neither changes the time.
"""

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attack import (  # type: ignore[import-not-found,unused-ignore]  # the script beside this one
    small_convnet,
    timed,
)
from torch import Tensor, nn

from gradveil.core.seeds import generator
from gradveil.data import load
from gradveil.engine.device import find_device
from gradveil.models import build
from gradveil.scores.accuracy import AccuracyScorer
from gradveil.scores.privacy import PrivacyScorer
from gradveil.scores.scorer import prepared
from gradveil.transforms import LIBRARY, Policy

IMAGES, POINTS = 100, 20


def plain_score(model: nn.Module, image: Tensor, label: Tensor, noise: Tensor) -> float:
    """S_pri of one image by plain autograd: per-tensor cosines, 21 points, trapezoid rule."""

    def slopes(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            F.cross_entropy(model(x[None]), label[None]), list(model.parameters())
        )

    target = slopes(image)
    heights = []
    for point in range(POINTS + 1):
        found = slopes(torch.lerp(noise, image, point / POINTS))
        pairs = zip(found, target, strict=True)
        heights.append(
            float(
                torch.stack(
                    [F.cosine_similarity(f.flatten(), t.flatten(), dim=0) for f, t in pairs]
                ).mean()
            )
        )
    return sum((a + b) / 2 for a, b in itertools.pairwise(heights)) / POINTS


def plain_scores(scorer: PrivacyScorer, policy: Policy, count: int) -> list[float]:
    """The first `count` images of the first block, with the same draws."""
    size = scorer.blocks[0]
    device = next(scorer.model.parameters()).device
    used = (
        prepared(scorer.images[:size].to(device), [policy], scorer.seed, 0, scorer.augment)[
            0
        ].float()
        / 255
    )
    noise = torch.rand(used.shape, generator=generator(scorer.seed, "noise", 0)).to(device)
    labels = scorer.labels.to(device)
    return [plain_score(scorer.model, used[i], labels[i], noise[i]) for i in range(count)]


def batched(scorer: Any, policies: list[Policy]) -> Callable[[], None]:
    def work() -> None:
        for first in range(0, len(policies), scorer.unit):
            for block in range(len(scorer.blocks)):
                scorer.score(policies[first : first + scorer.unit], block)

    return work


def find_images(root: Path | None, count: int) -> tuple[Tensor, Tensor]:
    if root is None:
        rng = generator(0, "images")
        return torch.randint(
            256, (count, 3, 32, 32), generator=rng, dtype=torch.uint8
        ), torch.randint(100, (count,), generator=rng)
    test = load("cifar100", "test", root=root)
    return test.images[200 : 200 + count], test.labels[200 : 200 + count]


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    images, labels = find_images(arguments.data_root, 1_000)
    model = (
        small_convnet()
        if arguments.model == "small-convnet"
        else build(arguments.model, channels=3, size=32, classes=100, seed=0)
    )
    model.to(device).eval()
    rng = generator(0, "policies")
    policies = [
        Policy.parse("-".join(map(str, torch.randint(len(LIBRARY), (3,), generator=rng).tolist())))
        for _ in range(arguments.policies)
    ]
    exact = PrivacyScorer(model, images[:IMAGES], labels[:IMAGES], fast=False)
    loop: list[float] = []
    plain_scores(exact, policies[0], 1)
    loop_time = timed(
        lambda: loop.extend(plain_scores(exact, policies[0], arguments.loop_images)), device
    )
    found = exact.score(policies[:1], 0)["privacy"][0, : len(loop)].tolist()
    worst = max(abs(a / b - 1) for a, b in zip(found, loop, strict=True))
    assert worst < 1e-3, f"batched and loop scores differ by {worst:.1e}"
    result = {
        "model": arguments.model,
        "loop_s_per_policy": loop_time / len(loop) * IMAGES,
        "loop_images_timed": len(loop),
        "largest_relative_difference_to_the_loop": worst,
    }
    forms = (
        {"float32": exact, "fast": replace(exact, fast=True)}
        if device.type == "cuda"
        else {"float32": exact}
    )
    for name, scorer in forms.items():
        batched(scorer, policies[: scorer.unit])()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        result[f"{name}_s_per_policy"] = timed(batched(scorer, policies), device) / len(policies)
        result[f"{name}_ratio"] = result["loop_s_per_policy"] / result[f"{name}_s_per_policy"]
        if device.type == "cuda":
            result[f"{name}_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if "fast" in forms:
        short, long = (
            torch.cat([s.score(policies[:8], b)["privacy"] for b in range(len(s.blocks))], 1)
            for s in forms.values()
        )
        result["fast_difference_per_image"] = float((short - long).abs().mean())
        result["fast_difference_per_policy"] = float((short - long).mean(1).abs().mean())
        result["spread_of_policies"] = float(long.mean(1).std())
    accuracy = AccuracyScorer(model, images, labels)
    batched(accuracy, policies[: accuracy.unit])()
    result["accuracy_s_per_policy"] = timed(batched(accuracy, policies), device) / len(policies)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small-convnet")
    parser.add_argument("--policies", type=int, default=4)
    parser.add_argument("--loop-images", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = find_device(arguments.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    facts = {
        "device": name,
        "torch": torch.__version__,
        "threads": arguments.threads,
        "date": time.strftime("%Y-%m-%d"),
    }
    result = (
        facts
        | {"images": IMAGES, "points": POINTS + 1, "policies": arguments.policies}
        | measure(arguments, device)
    )
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
