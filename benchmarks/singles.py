"""Scores of the 50 single transformations: are the paper's five best among our ten best?

    python benchmarks/singles.py --data cifar100 --model resnet20-4 --checkpoint SEMI
        [--probe-steps 100 --probe-images 32] --json FILE

S_pri in both definitions on the images the replication names (test images 200, 205, ..., 695), and
the probe where --probe-steps is given.
The paper's five (Gao et al. 2021, figure 5): 3, 15, 18, 26, 1.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradveil import __version__
from gradveil.data import Images, load
from gradveil.engine.device import find_device
from gradveil.models import build
from gradveil.models.checkpoints import load_checkpoint
from gradveil.scores.privacy import AREA_RULES, PrivacyScorer
from gradveil.scores.scorer import Scorer
from gradveil.search.probe import make_probe, short_attack
from gradveil.transforms import LIBRARY, Policy

PAPER = ("3", "15", "18", "26", "1")


def ranked(scorer: Scorer, policies: list[Policy]) -> dict[str, Any]:
    found = [
        one
        for first in range(0, len(policies), scorer.unit)
        for one in scorer.estimates(policies[first : first + scorer.unit])
    ]
    name = scorer.names[0]
    rows: list[dict[str, Any]] = [
        {"policy": str(p), **{key: (e.mean, e.error) for key, e in one.items()}}
        for p, one in zip(policies, found, strict=True)
    ]
    rows.sort(key=lambda row: row[name][0])
    best = [row["policy"] for row in rows if row["policy"] != "none"][:10]
    return {
        "n": found[0][name].n,
        "ten_best": best,
        "of_the_paper": [one for one in PAPER if one in best],
        "rows": rows,
    }


def measure(
    arguments: argparse.Namespace, model: nn.Module, train: Images, test: Images
) -> dict[str, Any]:
    policies = [Policy(), *(Policy.parse(str(index)) for index in range(len(LIBRARY)))]
    places = torch.arange(200, 700, 5)
    images, labels = test.images[places], test.labels[places]
    found = {
        f"privacy, {rule}": ranked(
            PrivacyScorer(model, images, labels, rule, seed=arguments.seed), policies
        )
        for rule in AREA_RULES
    }
    if arguments.probe_steps:
        indices = places[: arguments.probe_images].tolist()
        attack = short_attack(steps=arguments.probe_steps)
        probe = make_probe(train, test, model, indices, attack=attack, seed=arguments.seed)
        found["probe"] = ranked(probe, policies) | {"steps": arguments.probe_steps}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--probe-steps", type=int, default=0)
    parser.add_argument("--probe-images", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    device = find_device(arguments.device)
    train, test = (
        load(arguments.data, split, root=arguments.data_root) for split in ("train", "test")
    )
    facts = {"channels": test.channels, "size": test.size, "classes": len(test.classes)}
    model = build(arguments.model, **facts, mean=test.mean, std=test.std, seed=arguments.seed)
    model = (load_checkpoint(arguments.checkpoint, model) if arguments.checkpoint else model).to(
        device
    )
    about = {
        "data": arguments.data,
        "model": arguments.model,
        "checkpoint": "semi-trained" if arguments.checkpoint else "untrained",
        "seed": arguments.seed,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine(),
        "versions": {
            "gradveil": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d"),
    }
    result = about | measure(arguments, model, train, test)
    arguments.json.write_text(json.dumps(result) + "\n")
    for name in result.keys() - about.keys():
        found = result[name]
        print(
            f"{name}: of the paper's five {found['of_the_paper']} are among the ten best, "
            f"{found['ten_best']}"
        )


if __name__ == "__main__":
    main()
