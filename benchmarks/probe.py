"""Which score of a policy foretells, on other images, what a long attack recovers?

    python benchmarks/probe.py --data cifar100 --model resnet20-4 [--checkpoint C] --out FILE.jsonl
        [--policies 48] [--images 64] [--probe-images 32] [--probe-steps 100 200 400]
        [--full-steps 1200] [--seed 0] [--policies-at-once 8] [--victims-at-once 512]
    python benchmarks/probe.py --table FILE.jsonl

Random policies as a search draws them, none and 3-1-7+43-18-18 are measured by probes (short
attacks) on some images, by both definitions of S_pri on the same, and by the full attack on others
with draws of its own. Each policy and way gives one JSON line, written as it comes: the same
command goes on where it stopped. The table has Pearson's r over policies between each score's mean
and the full attack's, with bootstrap intervals (95%, policies drawn again), and the largest r
possible: sqrt(a b), for a and b the reliabilities of the two means, each the mean over random
halves of the images of the halves' r, corrected for the length (Spearman-Brown).
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil import __version__
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import derived, generator
from gradveil.data import Images, load
from gradveil.engine.device import find_device
from gradveil.models import build
from gradveil.models.checkpoints import load_checkpoint
from gradveil.papers.measurements import MeasuredProbe
from gradveil.scores import PrivacyScorer
from gradveil.scores.lineup import distinct, draw_victims
from gradveil.scores.scorer import Scorer
from gradveil.search.probe import make_probe, short_attack
from gradveil.search.space import draw, policy_of
from gradveil.transforms import Policy

FIXED = ("none", "3-1-7+43-18-18")
QUANTITIES = ("lineup", "ssim", "psnr", "over_blind")
FULL, PRIVACY = "full", "privacy"
RULES = {PRIVACY: "code", "privacy as written": "paper"}
RESAMPLES = 2_000
HALVES = 200

Values = NDArray[np.float64]
"""(policies, images)."""


def make_scorers(
    options: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Scorer], dict[str, list[int]]]:
    """By kind, and the images each looks at: the full attack has its own, and a seed of its own."""
    train, test = load(options.data, "train"), load(options.data, "test")
    model = _model(options, test).to(device).eval()
    few, many = options.probe_images or options.images, options.images
    allowed = distinct(test.images, test.labels)
    drawn = draw_victims(test.labels, few + many, allowed, options.seed)
    order = drawn[torch.randperm(len(drawn), generator=generator(options.seed, "images"))]
    ours, others = order[:few], order[few:]
    scorers: dict[str, Scorer] = {
        kind: PrivacyScorer(
            model,
            test.images[ours],
            test.labels[ours],
            rule=rule,
            augment=not options.plain,
            seed=options.seed,
        )
        for kind, rule in RULES.items()
    }

    def probe(numbers: Tensor, apart: Tensor, steps: int, seed: int) -> MeasuredProbe:
        return MeasuredProbe.of(
            make_probe(
                train,
                test,
                model,
                numbers,
                attack=short_attack(steps=steps),
                seed=seed,
                augment=not options.plain,
                victims_at_once=options.victims_at_once,
                sizes=(len(numbers),),
                apart=apart.tolist(),
            )
        )

    for steps in options.probe_steps:
        scorers[f"probe {steps}"] = probe(ours, others, steps, options.seed)
    scorers[FULL] = probe(others, ours, options.full_steps, derived(options.seed, "full"))
    return scorers, {kind: (others if kind == FULL else ours).tolist() for kind in scorers}


def _model(options: argparse.Namespace, test: Images) -> torch.nn.Module:
    facts = {"channels": test.channels, "size": test.size, "classes": len(test.classes)}
    model = build(options.model, **facts, mean=test.mean, std=test.std, seed=options.seed)
    return load_checkpoint(options.checkpoint, model) if options.checkpoint else model


def measure(options: argparse.Namespace) -> None:
    device = find_device(options.device)
    scorers, images = make_scorers(options, device)
    names = [
        *FIXED,
        *(str(policy_of(draw(options.seed, number))) for number in range(options.policies)),
    ]
    done = _whole_policies(options.out, list(scorers))
    policies = [Policy.parse(name) for name in dict.fromkeys(names) if name not in done]
    with options.out.open("a") as file:
        if not options.out.stat().st_size:
            _write(file, {"facts": _facts(options, device), "images": images})
        for start in range(0, len(policies), options.policies_at_once):
            some = policies[start : start + options.policies_at_once]
            for line in _measured(scorers, some):
                _write(file, line)
            print(f"{start + len(some)} of {len(policies)} policies", flush=True)


def _whole_policies(path: Path, kinds: Sequence[str]) -> set[str]:
    """Return the policies that a run before this one measured in every way."""
    if not path.is_file():
        return set()
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    there = {(line["policy"], line["kind"]) for line in lines}
    return {name for name, _ in there if all((name, kind) in there for kind in kinds)}


def _measured(
    scorers: Mapping[str, Scorer], policies: Sequence[Policy]
) -> Iterator[dict[str, Any]]:
    for kind, scorer in scorers.items():
        began = time.perf_counter()
        scores = scorer.estimates(policies)
        seconds = (time.perf_counter() - began) / len(policies)
        for policy, found in zip(policies, scores, strict=True):
            values = {
                name: [round(value, 6) for value in one.values] for name, one in found.items()
            }
            yield {"policy": str(policy), "kind": kind, "seconds": round(seconds, 3), **values}


def _write(file: Any, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def _facts(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    asked = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    place = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    )
    kept = {name: value for name, value in asked.items() if name not in ("out", "table", "device")}
    return kept | {
        "device": place,
        "gradveil": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


class Records:
    """Of all policies that were measured in every way."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise GradveilError(f"no records at {path}")
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if not lines or "facts" not in lines[0]:
            raise GradveilError(f"{path} holds no records of this benchmark")
        self.facts, images = lines[0]["facts"], lines[0]["images"]
        self.kinds, self.images, self.numbers = list(images), len(images[FULL]), images[PRIVACY]
        self.lines = {(line["policy"], line["kind"]): line for line in lines[1:]}
        names = dict.fromkeys(policy for policy, _ in self.lines)
        self.policies = [
            policy for policy in names if all((policy, kind) in self.lines for kind in self.kinds)
        ]
        if len(self.policies) < 3:
            raise GradveilError(
                f"{path} holds {len(self.policies)} whole policies: a correlation needs at least 3"
            )

    def values(self, kind: str, name: str) -> Values:
        return np.array(
            [self.lines[policy, kind][name] for policy in self.policies], dtype=np.float64
        )

    def scores(self) -> Iterator[tuple[str, str]]:
        """Kind and quantity of all but the full attack."""
        yield from (
            (kind, name)
            for kind in self.kinds
            if kind != FULL
            for name in ((PRIVACY,) if kind in RULES else QUANTITIES)
        )

    def seconds(self, kind: str) -> float:
        return float(np.mean([self.lines[policy, kind]["seconds"] for policy in self.policies]))


def show(path: Path) -> None:
    records = Records(path)
    print(json.dumps(records.facts))
    print(
        f"{len(records.policies)} policies; full attack on {records.images} images, "
        f"scores on {len(records.numbers)} others"
    )
    print(
        "\n| score | s a policy | full attack's | r | 95% "
        "| reliability, score | reliability, full | r at most |\n" + "|--" * 8 + "|"
    )
    for kind, name in records.scores():
        for wanted in QUANTITIES if kind in RULES else (name,):
            row = _row(
                records.values(kind, name), records.values(FULL, wanted), records.facts["seed"]
            )
            print(f"| {kind} | {records.seconds(kind):.2f} | {wanted} | {row} |")
    print(
        f"\n| r of each with the full attack's | {' | '.join(QUANTITIES)} |\n"
        + "|--" * (1 + len(QUANTITIES))
        + "|"
    )
    for kind, name in records.scores():
        own = records.values(kind, name).mean(1)
        each = [correlation(own, records.values(FULL, wanted).mean(1)) for wanted in QUANTITIES]
        of = "" if kind in RULES else f": {name}"
        print(f"| {kind}{of} | {' | '.join(f'{r:.2f}' for r in each)} |")
    print(
        f"\n| full attack, {records.seconds(FULL):.2f} s a policy | mean | lowest | highest "
        f"| {' | '.join(FIXED)} |\n" + "|--" * 6 + "|"
    )
    for name in QUANTITIES:
        means = records.values(FULL, name).mean(1)
        fixed = [
            f"{means[records.policies.index(policy)]:.3f}" if policy in records.policies else "-"
            for policy in FIXED
        ]
        print(
            f"| {name} | {means.mean():.3f} | {means.min():.3f} | {means.max():.3f} "
            f"| {' | '.join(fixed)} |"
        )


def _row(own: Values, full: Values, seed: int) -> str:
    rng = np.random.default_rng(seed)
    r = correlation(own.mean(1), full.mean(1))
    low, high = interval(own, full, rng)
    a, b = reliability(own, rng), reliability(full, rng)
    most = np.sqrt(a * b) if a > 0 and b > 0 else np.nan
    return f"{r:.2f} | {low:.2f} to {high:.2f} | {a:.2f} | {b:.2f} | {most:.2f}"


def interval(own: Values, full: Values, rng: np.random.Generator) -> Values:
    """The bounds of r over policies and images drawn again, 95%; NaN where it never exists."""
    again = correlations(*drawn_again((own, full), rng))
    varied = again[~np.isnan(again)]
    return np.quantile(varied, [0.025, 0.975]) if len(varied) else np.full(2, np.nan)


def drawn_again(some: Sequence[Values], rng: np.random.Generator) -> list[Values]:
    """Return means over images drawn again of policies drawn again, (resamples, policies) each.

    All have the same policies; the images of each are drawn for themselves.
    """
    count = len(some[0])
    policies = rng.integers(count, size=(RESAMPLES, count))
    means = []
    for values in some:
        # How often each image is drawn: a mean over drawn images is a product with these shares.
        width = values.shape[1]
        shares = rng.multinomial(width, np.full(width, 1 / width), size=RESAMPLES) / width
        means.append(np.take_along_axis(shares @ values.T, policies, axis=1))
    return means


def correlation(left: Values, right: Values) -> float:
    """Pearson's; NaN where one side does not vary."""
    return float(correlations(left[None], right[None])[0])


def correlations(left: Values, right: Values) -> Values:
    """The same of each row."""
    left, right = (some - some.mean(1, keepdims=True) for some in (left, right))
    spread = np.sqrt((left**2).sum(1) * (right**2).sum(1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(spread > 0, (left * right).sum(1) / spread, np.nan)


def reliability(values: Values, rng: np.random.Generator) -> float:
    """The reliability of means over all images, from the agreement of halves: 2 r / (1 + r).

    Halves in which all policies are alike say nothing.
    """
    found = []
    for _ in range(HALVES):
        order = rng.permutation(values.shape[1])
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        found.append(correlation(values[:, first].mean(1), values[:, second].mean(1)))
    varied = [one for one in found if one == one]
    r = float(np.mean(varied)) if varied else float("nan")
    return 2 * r / (1 + r)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--model", default="resnet20-4")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--policies", type=int, default=48)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--probe-images", type=int, help="of the scores; as many as --images")
    parser.add_argument("--probe-steps", type=int, nargs="+", default=[100, 200, 400])
    parser.add_argument("--full-steps", type=int, default=1_200)
    parser.add_argument("--plain", action="store_true", help="no crop and flip before the policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies-at-once", type=int, default=8)
    parser.add_argument("--victims-at-once", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="where the records go")
    parser.add_argument("--table", type=Path, help="print the table of these records again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        if options.table is None:
            if options.out is None:
                raise GradveilError(
                    "no file to write to: give --out FILE.jsonl, or --table with one written before"
                )
            measure(options)
        show(options.table or options.out)
    except GradveilError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
