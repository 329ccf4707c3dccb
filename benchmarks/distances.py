"""Measure how far other images lie from an update by 1 - cosine: the scale of a search's distance.

    python benchmarks/distances.py --json FILE [--data-root DIR]

Clients of an untrained resnet20-4 share the gradients of batches of 8 images of CIFAR-100, in eval
and in train mode. Held against each is what the same images give with a little noise, and what
other images of the same classes give.
"""

import argparse
import copy
import json
import platform
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from gradveil.core.files import write_bytes
from gradveil.core.seeds import generator
from gradveil.data import load
from gradveil.models import build_for

MODEL, DATA, SEED = "resnet20-4", "cifar100", 0
IMAGES, BATCHES = 8, 8  # of a batch, and batches
NOISE = 0.1  # of pixels in [0, 1]: about 20 dB


def gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of all weights as one vector."""
    client = copy.deepcopy(model)  # train mode changes running statistics
    slopes = torch.autograd.grad(cross_entropy(client(images), labels), [*client.parameters()])
    return torch.cat([slope.flatten() for slope in slopes]).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--data-root", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    split = load(DATA, "test", root=options.data_root)
    images, labels = split.images.float() / 255, split.labels.long()
    model = build_for(MODEL, split, SEED, check=False)
    rows = []
    for mode in ("eval", "train"):
        model.train(mode == "train")
        rng = generator(SEED)  # the same images in both modes
        found: dict[str, list[float]] = {"noise": [], "others": []}
        for _ in range(BATCHES):
            some = torch.randperm(len(images), generator=rng)[:IMAGES]
            places = [torch.nonzero(labels == label).flatten() for label in labels[some]]
            places = [each[each != own] for each, own in zip(places, some, strict=True)]
            others = [each[torch.randint(len(each), (), generator=rng)] for each in places]
            noise = NOISE * torch.randn(images[some].shape, generator=rng)
            shared = gradient(model, images[some], labels[some])
            for name, each in (
                ("noise", (images[some] + noise).clamp(0, 1)),
                ("others", images[torch.stack(others)]),
            ):
                made = gradient(model, each, labels[some])
                distance = 1 - float(cosine_similarity(shared, made, dim=0))
                found[name].append(round(distance, 5))
        print(mode, found, flush=True)
        rows.append({"mode": mode, "distances": found})
    facts = {
        "model": MODEL,
        "data": DATA,
        "seed": SEED,
        "noise": NOISE,
        "images": IMAGES,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": f"{platform.machine()}, 1 thread",
        "rows": rows,
    }
    write_bytes(options.json, (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode())


if __name__ == "__main__":
    main()
