"""The settings of `raced` beside others of as much work, on training images.

    python benchmarks/races.py --data cifar100 --model resnet20-4 --checkpoint W --out DIR
                               [--data-root DIR] [--images 32] [--device cuda] --json FILE

Settings of an attack have to be chosen on other images than those it is judged by, and audits
attack test images. Here are training images, with crop and flip as in training. The settings below
were written down before the first run. `raced` keeps its own unless another one finds more images
at 5%, by exact McNemar tests with Holm's correction. It goes on where it was stopped.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradveil.attacks import Race, raced
from gradveil.attacks.priors import TotalVariation
from gradveil.audits import AuditJob, Case, run_audit
from gradveil.core.files import write_text
from gradveil.defenses import parse
from gradveil.stats import holm, sign_test

CANDIDATES = {
    "raced": raced,
    "smoothness-0.01": replace(raced, prior=TotalVariation(1e-2)),
    "smoothness-0.2": replace(raced, prior=TotalVariation(2e-1)),
    "smoothness-fading": replace(raced, race=replace(raced.race, fade=0.2)),
    "more-heats": replace(
        raced, restarts=1, steps=1_800, race=Race(((64, 1 / 18), (16, 1 / 6), (4, 1 / 2)))
    ),
    "no-race": replace(raced, restarts=8, steps=2_200, race=Race()),
}
"""Each makes about as many iterations of an image over all its starts."""


def compared(hits: dict[str, list[bool]]) -> dict[str, float]:
    """Return p of each candidate against `raced`, that it finds more, corrected for all."""
    usual = hits["raced"]
    others = {name: some for name, some in hits.items() if name != "raced"}
    tests = [
        sign_test([float(a) - float(b) for a, b in zip(some, usual, strict=True)])
        for some in others.values()
    ]
    return dict(zip(others, holm(tests), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--model", default="resnet20-4")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--steps", type=int, help="in place of each one's own, to try it out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    job = AuditJob(
        asked.model,
        asked.data,
        attacks=CANDIDATES,
        cases=(Case(parse("policy:none"), weights=asked.checkpoint),),
        images=asked.images,
        steps=asked.steps,
        split="train",
        sham=False,
    )
    result = run_audit(job, asked.out, root=asked.data_root, device=asked.device)
    print(result)
    (case,) = result.cases
    rows = {row.attack: row for row in case.rows if (row.kind, row.truth) == ("attack", "used")}
    ranks = {
        name: {each.image: each.scores["used"].get("rank") for each in case.of("attack", name)}
        for name in CANDIDATES
    }
    images = sorted(ranks["raced"])
    p = compared({name: [some[i] == 1 for i in images] for name, some in ranks.items()})
    facts: dict[str, Any] = {
        "settings": dict(case.settings),
        "accuracy": None if case.model is None else case.model.accuracy,
        "images": images,
        "candidates": {
            name: {
                "attack": str(attack),
                "work": attack.race.work(attack.restarts, attack.steps),
                "ranks": [ranks[name][i] for i in images],
                "identified": rows[name].identified,
                "n": rows[name].n,
                "ssim": rows[name].ssim.mean,
                "psnr": rows[name].psnr.mean,
                "seconds": rows[name].seconds,
                "p": p.get(name),
            }
            for name, attack in CANDIDATES.items()
        },
    }
    write_text(asked.json, json.dumps(facts, indent=1) + "\n")
    better = [name for name, value in p.items() if value < 0.05]
    print(f"better than raced at 5%: {', '.join(better) or 'none'}")


if __name__ == "__main__":
    main()
