"""Which score of a policy foretells what a long attack recovers."""

import sys

import numpy as np

from results.records import RECORDS, ROOT, published_correlation, table

sys.path.insert(0, str(ROOT / "benchmarks"))

from probe import FULL, QUANTITIES, RESAMPLES, RULES, Records, correlation, interval, reliability

STUDIES = {"semi-trained": "scores/resnet20-4-semi-trained-h200.jsonl"}
WORDS = {
    "lineup": "line-up",
    "ssim": "SSIM",
    "psnr": "PSNR",
    "over_blind": "dB over the knowing guess",
}


def section() -> str:
    return "\n\n".join(
        ("## Does a score foretell the attack?", *(_study(*item) for item in STUDIES.items()))
    )


def _study(stage: str, path: str) -> str:
    records = Records(RECORDS / path)
    facts = records.facts
    rng = np.random.default_rng(facts["seed"])
    full = {name: records.values(FULL, name) for name in QUANTITIES}
    drawn = rng.integers(len(records.policies), size=(RESAMPLES, len(records.policies)))
    body = []
    for kind, name in records.scores():
        own = records.values(kind, name)
        label = "S_pri, as the code has it" if kind in RULES else f"{kind}: {WORDS[name]}"
        if RULES.get(kind) == "paper":
            label = "S_pri, as the paper writes it"
        cells = []
        for wanted in QUANTITIES:
            r = correlation(own.mean(1), full[wanted].mean(1))
            low, high = interval(own, full[wanted], drawn)
            cells.append(f"{r:.2f} ({low:.2f} to {high:.2f})")
        body.append([label, f"{records.seconds(kind):.2f}", *cells])
    agree = {name: reliability(values, rng) for name, values in full.items()}
    body.append(
        ["the full attack's own two halves of images", "", *(f"{a:.2f}" for a in agree.values())]
    )
    head = ["score", "s a policy", *(WORDS[name] for name in QUANTITIES)]
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
        f"**{stage} model** ({facts['data']}, {facts['model']}, {facts['device']}, torch "
        f"{facts['torch']}, seed {facts['seed']}): {len(records.policies)} policies, each by its "
        f"scores on {len(records.numbers)} test images and by the full attack (`adam-cosine`, "
        f"{facts['full_steps']:,} iterations) on {records.images} others. Pearson's r over "
        "policies between a score and the full attack's mean, with bootstrap intervals (95%, "
        "policies drawn again); the last row is the reliability of the full attack's means "
        f"(Spearman-Brown), whose root bounds r.\n\n{table(head, body)}\n\n"
        f"Over the policies the full attack's means go from {spread}. The published correlation "
        f"of S_pri with PSNR is {published_correlation()}; here it is {ours:.2f}. Of the scores "
        f"the best for the line-up is {best[0]} by {WORDS.get(best[1], best[1])} (r = "
        f"{strongest:.2f}, the best of {len(body) - 1}). "
        f"`python benchmarks/probe.py --checkpoint W --images {records.images} --probe-images "
        f"{len(records.numbers)} --out FILE`; records `{path}`."
    )
