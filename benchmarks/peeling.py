"""How many images of a batch does peeling recover exactly, and is it ever wrong?

    python benchmarks/peeling.py --data fashion-mnist --checkpoint MLP.safetensors --json FILE.json
        [--sizes 8 16 32 48 64] [--batches 20] [--defense none prune:0.7 gaussian:1e-5] [--seed 0]

Batches are drawn from the test split; labels are not told. An image counts as recovered where every
pixel is right; one that the attack calls exact and that is none of the batch's counts as false.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gradveil import __version__
from gradveil.attacks import peeling
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import derived, generator
from gradveil.core.types import Batch
from gradveil.data import Images, load
from gradveil.defenses import parse
from gradveil.models import build
from gradveil.models.accuracy import measure_accuracy
from gradveil.models.checkpoints import load_checkpoint


def levels(images: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple((image * 255).round().int().flatten().tolist()) for image in images]


def drawn(images: Images, size: int, count: int, seed: int) -> Iterator[tuple[int, Batch]]:
    """Give batches of these images, each with the seed of what happens to it."""
    for number in range(count):
        each = derived(seed, "batch", size, number)
        chosen = torch.randperm(len(images), generator=generator(each))[:size]
        yield each, Batch(images.images[chosen].float() / 255, images.labels[chosen])


def measure(
    model: torch.nn.Module, test: Images, defense: str, size: int, options: argparse.Namespace
) -> dict[str, Any]:
    client = Client(model, classes=len(test.classes), defense=parse(defense))
    exact, false, right, seconds = [], 0, 0, 0.0
    for seed, batch in drawn(test, size, options.batches, options.seed):
        shared = client.share_batches([batch], generator(seed, "share"), tell_labels=False)[0]
        began = time.perf_counter()
        found = peeling(shared.seen, seed)
        seconds += time.perf_counter() - began
        truth = dict(zip(levels(shared.used), batch.labels.tolist(), strict=True))
        sure = torch.zeros(size, dtype=torch.bool) if found.certain is None else found.certain
        named = [-1] * size if found.labels is None else found.labels.tolist()
        got = [
            (image, label)
            for image, label, certain in zip(levels(found.images), named, sure, strict=True)
            if certain
        ]
        exact.append(len({image for image, _ in got if image in truth}))
        false += sum(image not in truth for image, _ in got)
        right += sum(truth.get(image) == label for image, label in got)
    return {
        "defense": defense,
        "batch": size,
        "batches": options.batches,
        "exact": exact,
        "false": false,
        "labels_right": right,
        "seconds_a_batch": seconds / options.batches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 48, 64])
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--defense", nargs="+", default=["none", "prune:0.7", "gaussian:1e-5"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        test = load(options.data, "test")
        facts = {"channels": test.channels, "size": test.size, "classes": len(test.classes)}
        model = build("mlp", **facts, mean=test.mean, std=test.std, seed=options.seed).eval()
        if options.checkpoint:
            model = load_checkpoint(options.checkpoint, model).eval()
        right, _ = measure_accuracy(model, test)
        rows = []
        for defense in options.defense:
            for size in options.sizes:
                row = measure(model, test, defense, size, options)
                share = sum(row["exact"]) / (size * options.batches)
                print(
                    f"{defense}, batch {size}: {share:.1%} exact, {row['false']} false, "
                    f"{row['seconds_a_batch']:.2f} s a batch",
                    flush=True,
                )
                rows.append(row)
    except GradveilError as error:
        raise SystemExit(f"error: {error}") from None
    if options.json:
        made = {
            "data": options.data,
            "model": "mlp",
            "trained": options.checkpoint is not None,
            "accuracy": right,
            "seed": options.seed,
            "machine": f"{platform.machine()}, {options.threads} thread(s)",
            "gradveil": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
