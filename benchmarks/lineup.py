"""Score an audit's pictures by the line-up, and write every image's rank.

    python benchmarks/lineup.py AUDIT [--data-root DIR] [--seed 0] [--shifts 2 4 6 8] [--json FILE]

AUDIT is the folder of an audit of a named data set with its pictures, one image to a victim. Each
victim stands among N pictures of its class that went through the victim's draws (see
`gradveil.scores.lineup`). Beside each attack stand the blind guesses, and the true picture with
noise of the reconstruction's size, which says how well a picture so far off can be told at all.

With --shifts only the attacks are ranked, once for each number of pixels that a reconstruction may
be moved by, each beside a control: the reconstruction of the next victim in the same line-up.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor

from gradveil.audits import AuditResult, CaseResult
from gradveil.audits.records import images_path, load_images
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.data import Images, load
from gradveil.defenses import Defense, parse
from gradveil.scores.lineup import Lineups, choose, distinct, rank, replay


def pictures(case: CaseResult, kind: str, name: str) -> tuple[Tensor, Tensor]:
    """Used and found images of an attack or control, (n, C, H, W) in [0, 1], in their order."""
    chunks = sorted({record.chunk for record in case.of(kind, name)})
    files = [load_images(images_path(case.out, kind, name, chunk))[0] for chunk in chunks]
    used, found = (torch.cat([file[part] for file in files]) for part in ("used", "found"))
    return used.float() / 255, found.float() / 255


def line_up(
    case: CaseResult, defense: Defense, split: Images, lineups: Lineups, victims: list[int]
) -> list[Tensor]:
    """The candidates of each victim after its draws, (N, C, H, W) in [0, 1]."""
    shown: list[Tensor] = []
    for row, image in enumerate(victims):
        mine = split.images[[image]].float() / 255
        rng = generator(int(case.settings["seed"]), "share", image)
        draws: Callable[[Tensor], Tensor] | None = defense.reveal(mine, rng)
        candidates = split.images[lineups.candidates[row]].float() / 255
        shown.append(replay(draws, mine, 0, candidates))
    return shown


def ranks_by_shift(
    case: CaseResult, shown: list[Tensor], lineups: Lineups, seed: int, shifts: list[int]
) -> dict[str, list[int]]:
    """The rank of each true picture by attack, or its control, and pixels moved."""
    found: dict[str, list[int]] = {}
    for name in dict.fromkeys(record.attack for record in case.of("attack")):
        _, made = pictures(case, "attack", name)
        for shift in shifts:
            for told, some in ((name, made), (f"{name} of another victim", made.roll(-1, 0))):
                rng = generator(seed, "lot", told, shift)
                found[f"{told}, {shift} pixels"] = [
                    rank(some[[row]], candidates, int(lineups.true[row]), rng, shift)
                    for row, candidates in enumerate(shown)
                ]
    return found


def ranks_of(
    case: CaseResult, shown: list[Tensor], lineups: Lineups, seed: int, victims: list[int]
) -> dict[str, list[int]]:
    """The rank of each true picture, by attack or control."""
    names = dict.fromkeys((r.kind, r.attack) for r in case.records if r.kind != "positive")
    found: dict[str, list[int]] = {}
    for kind, name in names:
        used, made = pictures(case, kind, name)
        rng, noise = generator(seed, "lot", name), generator(seed, "noise", name)
        found[name] = []
        noisy: list[int] = []
        for row, candidates in enumerate(shown):
            true = int(lineups.true[row])
            if not torch.allclose(candidates[true], used[row], atol=1e-6):
                raise GradveilError(f"{case.name}: image {victims[row]}: other draws were used")
            found[name].append(rank(made[[row]], candidates, true, rng))
            size = (made[row] - used[row]).square().mean().sqrt()
            drawn = used[row] + size * torch.randn(used[row].shape, generator=noise)
            noisy.append(rank(drawn.clamp(0, 1)[None], candidates, true, rng))
        if kind == "attack":
            found[f"true picture with the noise of {name}"] = noisy
    return found


def summary(ranks: list[int], size: int) -> dict[str, Any]:
    """Rank 1 with its exact 95% interval and p against 1 / N, top 5, and the mean percentile."""
    hits, n = sum(r == 1 for r in ranks), len(ranks)
    low, high = binomtest(hits, n).proportion_ci(0.95)
    return {
        "n": n,
        "rank_1": hits,
        "interval": [float(low), float(high)],
        "p": float(binomtest(hits, n, 1 / size, alternative="greater").pvalue),
        "top_5": sum(r <= 5 for r in ranks),
        "percentile": sum(ranks) / n / size,
        "ranks": ranks,
    }


def main() -> None:
    """Read the audit, rank its pictures, print a table and write the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("audit", type=Path)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shifts", type=int, nargs="+")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    result = AuditResult.read(asked.audit)
    settings = result.settings
    if settings["batch_size"] != 1:
        raise SystemExit("line-ups of batches are not scored by this script")
    split = load(str(settings["data"]), str(settings["split"]), root=asked.data_root)
    victims = list(range(settings["first"], settings["first"] + settings["images"]))
    allowed = distinct(split.images, split.labels)
    allowed[victims] = True
    lineups = choose(split.labels, [torch.tensor([v]) for v in victims], allowed, asked.seed)
    if lineups is None:
        raise SystemExit("a victim's class has too few images for a line-up of 20")
    report: dict[str, Any] = {"audit": asked.audit.name, "candidates": lineups.size}
    report |= {"seed": asked.seed, "cases": {}}
    for case in result.cases:
        shown = line_up(case, parse(case.defense), split, lineups, victims)
        at = case, shown, lineups, asked.seed
        found = ranks_by_shift(*at, asked.shifts) if asked.shifts else ranks_of(*at, victims)
        rows = {name: summary(ranks, lineups.size) for name, ranks in found.items()}
        report["cases"][case.name] = rows
        for name, row in rows.items():
            low, high = row["interval"]
            print(
                f"{case.name:<18} {name:<40} {row['rank_1']:>3}/{row['n']} "
                f"({low:.0%} to {high:.0%}) p = {row['p']:.2g}, top 5 {row['top_5']}"
            )
    if asked.json:
        asked.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
