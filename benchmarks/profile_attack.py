"""Time of an attack iteration on a GPU, kernel by kernel, by torch's profiler.

    python benchmarks/profile_attack.py [--model resnet20-4] [--victims 64] [--attack adam-cosine]
                                        [--steps 30] [--top 40] [--json FILE]

A run of fewer steps comes before it, so compiling and library set-up are not in the profile; the
capture of the CUDA graph is. Each line has the kernel's share of the time, its microseconds in an
iteration and in a call, and its calls.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gradveil.attacks import GradientMatching, find
from gradveil.clients import Client
from gradveil.core.seeds import generator
from gradveil.models import build

WARM_UP = 12  # steps


def profiled(options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Return the kernels, the slowest first, and milliseconds of an iteration without a profiler.

    The latter is from the difference of a long and a short run, so set-up does not count.
    """
    model = build(options.model, channels=3, size=32, classes=100).cuda().eval()
    rng = generator(0, "benchmark")
    images = torch.rand(options.victims, 3, 32, 32, generator=rng).cuda()
    labels = torch.randint(100, (options.victims,), generator=rng).cuda()
    seen = [shared.seen for shared in Client(model, classes=100).share_each(images, labels, 0)]
    attack = find(options.attack)
    if not isinstance(attack, GradientMatching):
        raise SystemExit(f"--attack {options.attack}: it matches no gradients step by step")
    attack = replace(attack, restarts=1, frames=0)

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        replace(attack, steps=steps)(seen, generator(0))
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(WARM_UP)
    short, long = (seconds(steps) for steps in (WARM_UP, WARM_UP + options.steps))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds(options.steps)
    lines = [
        {"kernel": event.key, "us": event.self_device_time_total, "calls": event.count}
        for event in found.key_averages()
        if event.self_device_time_total > 0
    ]
    lines.sort(key=lambda line: -line["us"])
    return lines, (long - short) / options.steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet20-4")
    parser.add_argument("--victims", type=int, default=64)
    parser.add_argument("--attack", default="adam-cosine")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--top", type=int, default=40, help="kernels to print")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/profile_attack.py needs a GPU: this torch sees none")
    lines, ms = profiled(options)
    total = sum(line["us"] for line in lines)
    print(
        f"{options.attack} on {options.model}, {options.victims} victims: {ms:.2f} ms a step; "
        f"in kernels {total / options.steps / 1e3:.2f} ms, profiled"
    )
    print("share   us an iteration    us a call    calls  kernel")
    for line in lines[: options.top]:
        print(
            f"{line['us'] / total:5.1%} {line['us'] / options.steps:17.1f} "
            f"{line['us'] / line['calls']:12.1f} {line['calls']:8d}  {line['kernel'][:100]}"
        )
    facts = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ms": ms,
        "settings": {key: value for key, value in vars(options).items() if key != "json"},
    }
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "rows": lines}, indent=1) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
