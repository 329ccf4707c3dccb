"""Which score of a policy foretells what a long attack recovers."""

import sys
from collections.abc import Sequence

import numpy as np
from scipy.stats import chi2, spearmanr

from gradveil.papers.catalog import EXPERIMENTS
from gradveil.papers.cells import Audited
from gradveil.papers.experiments import STRONGEST, Size
from gradveil.papers.records import Records as CellRecords
from gradveil.papers.switches import OURS
from gradveil.papers.tables import attack_row, rank_one
from results.records import (
    RECORDS,
    ROOT,
    percent,
    published_correlation,
    ranked_first,
    table,
)

sys.path.insert(0, str(ROOT / "benchmarks"))

from probe import (
    FULL,
    QUANTITIES,
    RULES,
    Records,
    Values,
    correlation,
    correlations,
    drawn_again,
    interval,
    reliability,
)

STUDIES = {
    "semi-trained": "scores/resnet20-4-semi-trained-h200.jsonl",
    "untrained": "scores/resnet20-4-untrained-h200.jsonl",
}
_ALIKE = 0.05  # p from which on rates count as alike
_LEAST_R = 0.74  # |Spearman's r| of 8 pairs that is rarer than 5% by chance, two-sided
DEFAULT = ("probe 400", "ssim")  # what a search ranks by unless told otherwise
S_PRI = ("privacy", "privacy")
WRITTEN = ("privacy as written", "privacy")
WORDS = {
    "lineup": "line-up",
    "ssim": "SSIM",
    "psnr": "PSNR",
    "over_blind": "dB over the knowing guess",
}


def section() -> str:
    return "\n\n".join(
        (
            "## Does a score foretell the attack?",
            *(_study(*item) for item in STUDIES.items()),
            _choice(),
            *_raced(),
        )
    )


def _raced() -> list[str]:
    """Show the strongest attack on some of the policies beside their scores, where it is done."""
    records = Records(RECORDS / STUDIES["semi-trained"])
    cells = CellRecords((RECORDS / "reproduce",))
    experiment, body, columns, firsts = EXPERIMENTS["raced-policies"], [], [], []
    for entry in experiment.entries(OURS, Size()):
        row = attack_row([entry], cells, STRONGEST)
        if row is None:
            continue
        assert isinstance(entry.cell, Audited)
        case = cells.case(entry.cell)
        assert case is not None
        firsts.append(ranked_first(case, STRONGEST))
        here = records.policies.index(entry.row)
        values = [records.values(*item)[here].mean() for item in (S_PRI, DEFAULT)]
        full = records.values(FULL, "lineup")[here]
        body.append(
            [
                f"`{entry.row}`",
                *(f"{value:.3f}" for value in values),
                f"{int(full.sum())}/{len(full)}",
                rank_one(row),
            ]
        )
        columns.append([*values, full.mean(), row.identified / row.n])
    if len(body) < len(experiment.entries(OURS, Size())):
        return []
    figures = np.array(columns).T
    r = [spearmanr(figures[k], figures[3]).statistic for k in range(3)]
    images = sorted(firsts[0])
    assert all(sorted(each) == images for each in firsts)
    hits = np.array([[each[image] for image in images] for each in firsts], dtype=np.float64)
    p = _cochran(hits)
    assert p > _ALIKE, "the policies differ: say how"
    unseen = [k for k, image in enumerate(images) if image not in records.numbers]
    apart = [spearmanr(figures[k], hits[:, unseen].mean(1)).statistic for k in range(2)]
    head = ["policy", "S_pri", "probe 400: SSIM", "`adam-cosine`, line-up", "`raced`, line-up"]
    return [
        f"### The strongest attack under {len(body)} of these policies\nEvenly spread over S_pri, "
        "on a semi-trained model of the same recipe, test images drawn over the classes.\n\n"
        f"{table(head, body)}\n\n"
        f"Spearman's r with the line-up of `raced` over the {len(body)} policies: S_pri "
        f"{r[0]:.2f}, the probe {r[1]:.2f}, `adam-cosine` {r[2]:.2f}; at this number, r must be "
        f"{_LEAST_R} for 5%. Records `reproduce/`, `gradveil reproduce raced-policies`.\n\n"
        f"- The rates of `raced` differ no more than by luck (Cochran's Q over the same "
        f"{len(images)} images, p = {p:.2f}). So these records cannot tell what foretells them.\n"
        f"- {len(images) - len(unseen)} of the {len(images)} images are among the "
        f"{len(records.numbers)} that S_pri and the probe looked at. On the other {len(unseen)} "
        f"r is {apart[0]:.2f} and {apart[1]:.2f}.\n"
        "- `adam-cosine` attacked another training of that recipe. The cells of `raced` have no "
        "sham, and none without a policy stands beside them."
    ]


def _cochran(hits: Values) -> float:
    """Return the p-value of Cochran's Q: do shares of the same images differ?

    `hits` (policies, images) are 1 or 0.
    """
    k, of_policies, of_images = len(hits), hits.sum(1), hits.sum(0)
    spread = k * (of_policies**2).sum() - of_policies.sum() ** 2
    q = (k - 1) * spread / (k * of_images.sum() - (of_images**2).sum())
    return float(chi2.sf(q, k - 1))


def policies() -> int:
    """Return the number of policies of the studies."""
    (count,) = {len(Records(RECORDS / path).policies) for path in STUDIES.values()}
    return count


def foretold() -> dict[tuple[str, str], list[float]]:
    """Return r of each score with the full attack's line-up rate, on each of the models."""
    found: dict[tuple[str, str], list[float]] = {}
    for path in STUDIES.values():
        records = Records(RECORDS / path)
        wanted = records.values(FULL, "lineup").mean(1)
        for item in records.scores():
            r = correlation(records.values(*item).mean(1), wanted)
            found.setdefault(item, []).append(r)
    return found


def costs(item: tuple[str, str]) -> list[float]:
    """Return the seconds of a score over those of the default, on each of the models."""
    studies = [Records(RECORDS / path) for path in STUDIES.values()]
    return [study.seconds(item[0]) / study.seconds(DEFAULT[0]) for study in studies]


def intervals(stage: str, items: Sequence[tuple[str, str]]) -> list[tuple[float, float]]:
    """Return the 95% intervals of scores' r with the full attack's line-up rate on a model."""
    records = Records(RECORDS / STUDIES[stage])
    full = records.values(FULL, "lineup")
    found = []
    for item in items:
        rng = np.random.default_rng(records.facts["seed"])
        low, high = interval(records.values(*item), full, rng)
        found.append((float(low), float(high)))
    return found


def _choice() -> str:
    """Say which score the search ranks by, and why."""
    each = foretold()
    worst = {item: min(found) for item, found in each.items()}
    best = max(worst, key=lambda item: worst[item])
    assert best == DEFAULT, f"the records support {best}, the search ranks by {DEFAULT}"
    others = sorted((r for item, r in worst.items() if item != best), reverse=True)
    first, second = (f"{r:.2f}" for r in each[best])
    most = max(r for found in each.values() for r in found)
    published, written = (each[kind, "privacy"] for kind in RULES)
    return (
        f"### What a search ranks by\nOf these {len(worst)} scores, the one whose r with the "
        f"line-up is largest where it is smallest, over the two models: SSIM of the probe of 400 "
        f"iterations ({first} and {second}). S_pri has {published[0]:.2f} and {published[1]:.2f}, "
        f"as the paper writes it {written[0]:.2f} and {written[1]:.2f}.\n\n"
        "It is a weak preference:\n\n"
        f"- The next score by that rule has {others[0]:.2f}.\n"
        f"- Its lead over S_pri may be chance ({_lead()}, 95%, policies and images drawn again).\n"
        f"- The best r of any with the line-up on either model is {most:.2f}, "
        f"{percent(most**2, 0)} of its variance.\n\n"
        "That is why a search ends with audits."
    )


def _lead() -> str:
    """Say between which bounds the default score's r with the line-up exceeds that of S_pri."""
    found = []
    for stage, path in STUDIES.items():
        records = Records(RECORDS / path)
        rng = np.random.default_rng(records.facts["seed"])
        some = [records.values(*item) for item in (DEFAULT, S_PRI, (FULL, "lineup"))]
        ours, theirs, full = drawn_again(some, rng)
        low, high = np.nanquantile(
            correlations(ours, full) - correlations(theirs, full), [0.025, 0.975]
        )
        found.append(f"{stage} {low:.2f} to {high:.2f}")
    return ", ".join(found)


def _study(stage: str, path: str) -> str:
    records = Records(RECORDS / path)
    facts = records.facts
    rng = np.random.default_rng(facts["seed"])
    full = {name: records.values(FULL, name) for name in QUANTITIES}
    body = []
    for kind, name in records.scores():
        own = records.values(kind, name)
        label = "S_pri, as the code has it" if kind in RULES else f"{kind}: {WORDS[name]}"
        if RULES.get(kind) == "paper":
            label = "S_pri, as the paper writes it"
        cells = []
        for wanted in QUANTITIES:
            r = correlation(own.mean(1), full[wanted].mean(1))
            low, high = interval(own, full[wanted], rng)
            cells.append(f"{r:.2f} ({low:.2f} to {high:.2f})")
        body.append([label, f"{records.seconds(kind):.2f}", *cells])
    agree = {name: reliability(values, rng) for name, values in full.items()}
    body.append(
        ["the full attack's own two halves of images", "-", *(f"{a:.2f}" for a in agree.values())]
    )
    head = ["score", "s a policy", *(f"r with {WORDS[name]} (95%)" for name in QUANTITIES)]
    means = {name: values.mean(1) for name, values in full.items()}
    spread = ", ".join(
        f"{WORDS[name]} {some.min():.2f} to {some.max():.2f}" for name, some in means.items()
    )
    best = max(
        ((kind, name) for kind, name in records.scores()),
        key=lambda item: correlation(records.values(*item).mean(1), means["lineup"]),
    )
    strongest = correlation(records.values(*best).mean(1), means["lineup"])
    ours = correlation(records.values("privacy", "privacy").mean(1), means["psnr"])
    return (
        f"### {stage.capitalize()} model\n"
        f"{facts['data']}, {facts['model']}, {facts['device']}, torch {facts['torch']}, seed "
        f"{facts['seed']}.\n\n"
        f"- {len(records.policies)} policies, each by its scores on {len(records.numbers)} test "
        f"images and by the full attack (`adam-cosine`, {facts['full_steps']:,} iterations) on "
        f"{records.images} others.\n"
        "- Pearson's r over policies between a score and the full attack's mean, with bootstrap "
        "intervals (95%, policies and images drawn again).\n"
        "- The last row is the reliability of the full attack's means (Spearman-Brown), whose root "
        f"bounds r.\n\n{table(head, body)}\n\n"
        f"- Over the policies the full attack's means go from {spread}.\n"
        f"- The published correlation of S_pri with PSNR is {published_correlation()}; here it is "
        f"{ours:.2f}.\n"
        f"- Of the scores the best for the line-up is {best[0]} by "
        f"{WORDS.get(best[1], best[1])} (r = {strongest:.2f}, the best of {len(body) - 1}).\n\n"
        f"`python benchmarks/probe.py --checkpoint W --images {records.images} --probe-images "
        f"{len(records.numbers)} --out FILE`; records `{path}`."
    )
