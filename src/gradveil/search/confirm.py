"""The confirming audits: none, random, the best single policy and the hybrid, on the semi-trained and on the untrained model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradveil.audits import AuditJob, AuditResult
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import derived
from gradveil.defenses import PolicyDefense
from gradveil.search.folders import CONFIRM, RESULT, TRAINING
from gradveil.search.job import SearchJob
from gradveil.search.space import draw, policy_of
from gradveil.transforms import Policy

LEVEL = 0.05
MEASURES = {"over_blind": "dB over blind", "ssim": "SSIM", "identified": "identified"}
EACH = LEVEL / (
    2 * len(MEASURES)
)  # three measures and two directions: together they err in at most 5% of cases (Bonferroni)
FEWEST = math.ceil(
    -math.log2(EACH)
)  # images below which no test can reject: the smallest p is 2 ** -n


@dataclass(frozen=True)
class Comparison:
    """One measure on the n images that both audits reconstructed; higher leaks more. `less` and `more` are one-sided p-values."""

    measure: str
    n: int
    ours: float
    theirs: float
    less: float
    more: float


def compare(ours: AuditResult, theirs: AuditResult, truth: str = "used") -> list[Comparison]:
    """The attacks of two audits of the same images."""
    pairs = _pairs(ours, theirs, truth)
    made = []
    for measure in MEASURES:
        first, second = ([one[measure] for one in side] for side in pairs)
        differences = [a - b for a, b in zip(first, second, strict=True)]
        test = _sign if measure == "identified" else _signed_rank
        n = len(differences)
        means = (sum(first) / n, sum(second) / n) if n else (0.0, 0.0)
        made.append(
            Comparison(measure, n, *means, test([-d for d in differences]), test(differences))
        )
    return made


def verdict(found: Sequence[Comparison]) -> str:
    """less, more, mixed where the measures disagree, or open where no test rejects."""
    less, more = (any(getattr(one, side) < EACH for one in found) for side in ("less", "more"))
    return "mixed" if less and more else "less" if less else "more" if more else "open"


def in_words(found: Sequence[Comparison], other: str) -> str:
    """Such as `leaks less than none (...)`, with the figures of every test."""
    figures = ", ".join(_figure(one) for one in found)
    says = {
        "less": f"leaks less than {other}",
        "more": f"leaks more than {other}",
        "mixed": f"leaks less than {other} by one measure and more by another",
        "open": f"was not shown to leak less than {other}",
    }[verdict(found)]
    return f"{says} (n = {found[0].n}: {figures})"


def _figure(one: Comparison) -> str:
    form = {"over_blind": "+.2f", "ssim": ".3f", "identified": ".1%"}[one.measure]
    side = "less" if one.less <= one.more else "more"
    return f"{MEASURES[one.measure]} {one.ours:{form}} against {one.theirs:{form}}, p = {min(one.less, one.more):.2g} for {side}"


def _pairs(
    ours: AuditResult, theirs: AuditResult, truth: str
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    sides = [
        {record.image: dict(record.scores[truth]) for record in one.of("attack") if record.ok}
        for one in (ours, theirs)
    ]
    both = sorted(sides[0].keys() & sides[1].keys())
    return [sides[0][image] for image in both], [sides[1][image] for image in both]


def _signed_rank(differences: Sequence[float]) -> float:
    """Of values above 0. Zeros are left out, as Wilcoxon's test does."""
    from scipy.stats import wilcoxon

    moved = [value for value in differences if value]
    return float(wilcoxon(moved, alternative="greater").pvalue) if moved else 1.0


def _sign(differences: Sequence[float]) -> float:
    """Exact, of those that differ: McNemar's test for identified or not."""
    from scipy.stats import binomtest

    moved = [value > 0 for value in differences if value]
    return (
        float(binomtest(sum(moved), len(moved), 0.5, alternative="greater").pvalue)
        if moved
        else 1.0
    )


MODELS = (TRAINING, "untrained")
RANDOM = 10  # policies of the random row, as in the paper


def rows(job: SearchJob, best: Policy, hybrid: Policy | None) -> dict[str, Policy]:
    """What is audited, by the name of its row. Each image of the random row gets one of ten policies that no search has seen."""
    seed = derived(job.seed, "random policies")
    drawn = tuple(policy_of(draw(seed, number)).members[0] for number in range(RANDOM))
    found = {"none": Policy(), "random": Policy(drawn), "single": best}
    return found if hybrid is None else found | {"hybrid": hybrid}


def work(
    job: SearchJob, checkpoint: Path, out: Path, policies: Mapping[str, Policy]
) -> list[tuple[AuditJob, Path]]:
    """One audit for each model and row, into a folder of its own; the paths hold on every machine that shares the files.

    The first alone has the positive control: it depends on neither the model nor the policy.
    """
    first = MODELS[0], next(iter(policies))
    return [
        (
            _audit(job, checkpoint if model == TRAINING else None, policy, (model, row) == first),
            place(out.resolve(), model, row),
        )
        for model in MODELS
        for row, policy in policies.items()
    ]


def place(out: Path, model: str, row: str) -> Path:
    return out / CONFIRM / f"{model}-{row}"


def read(
    out: Path, confirmed: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, AuditResult]]:
    """The audits, by model and row."""
    try:
        return {
            model: {row: AuditResult.read(place(out, model, row)) for row in found}
            for model, found in confirmed.items()
        }
    except GradveilError as error:
        raise GradveilError(
            f"{error}; delete {out / RESULT} and run the search again, which makes missing audits anew"
        ) from None


def verdicts(audits: Mapping[str, Mapping[str, AuditResult]]) -> list[str]:
    """For each model, whether the searched policy leaks less than none and than random. No word without a test."""
    lines = []
    for model, found in audits.items():
        row = "hybrid" if "hybrid" in found else "single"
        against = " and ".join(
            in_words(compare(found[row], found[other]), other) for other in ("none", "random")
        )
        lines.append(
            f"{model} model, against the images used: the {row} {found[row].settings['defense']} {against}.{_doubt(found['none'])}"
        )
    return lines


def _doubt(none: AuditResult) -> str:
    (bare,) = (row for row in none.rows if (row.kind, row.truth) == ("attack", "used"))
    return (
        ""
        if bare.verdict.better
        else " The attack on unprotected images is itself no better than blind, so this says little."
    )


def _audit(job: SearchJob, checkpoint: Path | None, policy: Policy, positive: bool) -> AuditJob:
    """With crop and flip before the policy where the search had them; none has neither."""
    return AuditJob(
        job.data,
        job.model,
        (job.attack,),
        job.audit_images,
        checkpoint=checkpoint and checkpoint.resolve(),
        defense="none" if policy == Policy() else str(PolicyDefense(policy, job.augment)),
        steps=job.audit_steps,
        image_size=job.image_size,
        positive=positive,
        seed=job.seed,
    )
