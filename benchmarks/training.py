"""Seconds per epoch of the training loop, without a policy and with one, in one run.

    python benchmarks/training.py --data cifar100 --data-root DIR --model resnet20-4 --policy 3-1-7+43-18-18 [--epochs 5] [--json FILE]

The same job as `gradveil train`, through Lightning. The first epoch warms up and is not counted; validation is not part of
an epoch's time. "Plain" is the eager loop without graphs, in the same precision.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from gradveil.core.seeds import generator
from gradveil.data.images import Batches
from gradveil.defenses import Defense, as_defense
from gradveil.engine.device import find_device
from gradveil.training import Recipe, TrainingJob, train
from gradveil.training.run import candidate
from gradveil.training.step import Step


def epochs_of(job: TrainingJob, root: Path | None, device: str) -> tuple[list[float], float]:
    """Seconds of each epoch after the first, and the accuracy at the end."""
    with tempfile.TemporaryDirectory() as folder:
        found = train(job, Path(folder) / "run", root=root, device=device, progress=False)
    return [row["seconds"] for row in found.history][1:], found.accuracy


def plain_epoch(job: TrainingJob, root: Path | None, device: str) -> float:
    """One eager epoch, the second of two."""
    place = find_device(device)
    split, _ = job.splits(root)
    model = candidate(job.model, split, job.seed).to(place)
    step = Step(model, job.recipe.loss, job.recipe.optimizer(model), bf16=place.type == "cuda")
    images, labels = split.images.to(place), split.labels.to(place)
    taken = 0.0
    for epoch in range(2):
        start = time.perf_counter()
        for batch in Batches(
            images, labels, job.recipe.batch_size, generator(0, "train", epoch), job.preparation()
        ):
            step(batch)
        step.averages()
        taken = time.perf_counter() - start
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="fashion-mnist-mini")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--policy", default="3-1-7+43-18-18")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    job = TrainingJob(options.data, options.model, Recipe(epochs=options.epochs))
    # In turn, twice, so that a drift of the machine's speed does not look like the policy's cost.
    runs: dict[str, list[float]] = {"none": [], "policy": []}
    accuracy: dict[str, float] = {}
    for name, defense in (("none", Defense()), ("policy", as_defense(options.policy))) * 2:
        seconds, accuracy[name] = epochs_of(
            replace(job, defense=defense), options.data_root, options.device
        )
        runs[name] += seconds
    median = {name: statistics.median(seconds) for name, seconds in runs.items()}
    result = {
        "data": options.data,
        "model": options.model,
        "policy": options.policy,
        "seconds_per_epoch": median,
        "spread": {name: [min(seconds), max(seconds)] for name, seconds in runs.items()},
        "epochs_timed": {name: len(seconds) for name, seconds in runs.items()},
        "policy_overhead": median["policy"] / median["none"] - 1,
        "plain_seconds": plain_epoch(job, options.data_root, options.device),
        "accuracy": accuracy,
        "machine": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
