"""The confirming audits: none, random, the best single policy and the hybrid, on the semi-trained and on the untrained model."""

from collections.abc import Mapping
from pathlib import Path

from gradveil.audits import AuditJob, AuditResult
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import derived
from gradveil.defenses import PolicyDefense
from gradveil.search.comparisons import compare, in_words
from gradveil.search.folders import CONFIRM, RESULT, TRAINING
from gradveil.search.jobs import SearchJob
from gradveil.search.samplers import draw, policy_of
from gradveil.transforms import Policy

MODELS = (TRAINING, "untrained")
RANDOM = 10  # policies of the random row, as in the paper


def rows(job: SearchJob, best: Policy, hybrid: Policy | None) -> dict[str, Policy]:
    """What is audited, by the name of its row. Each image of the random row gets one of ten policies that no search has seen."""
    seed = derived(job.seed, "random policies")
    drawn = tuple(policy_of(draw(seed, number)).members[0] for number in range(RANDOM))
    found = {"none": Policy(), "random": Policy(drawn), "single": best}
    return found if hybrid is None else found | {"hybrid": hybrid}


def work(job: SearchJob, checkpoint: Path, out: Path, policies: Mapping[str, Policy]) -> list[tuple[AuditJob, Path]]:
    """One audit for each model and row, into a folder of its own; the paths hold on every machine that shares the files.

    The first alone has the positive control: it depends on neither the model nor the policy.
    """
    first = MODELS[0], next(iter(policies))
    return [
        (_audit(job, checkpoint if model == TRAINING else None, policy, (model, row) == first), place(out.resolve(), model, row))
        for model in MODELS
        for row, policy in policies.items()
    ]


def place(out: Path, model: str, row: str) -> Path:
    return out / CONFIRM / f"{model}-{row}"


def read(out: Path, confirmed: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, AuditResult]]:
    """The audits, by model and row."""
    try:
        return {model: {row: AuditResult.read(place(out, model, row)) for row in found} for model, found in confirmed.items()}
    except GradveilError as error:
        raise GradveilError(f"{error}; delete {out / RESULT} and run the search again, which makes missing audits anew") from None


def verdicts(audits: Mapping[str, Mapping[str, AuditResult]]) -> list[str]:
    """For each model, whether the searched policy leaks less than none and than random. No word without a test."""
    lines = []
    for model, found in audits.items():
        row = "hybrid" if "hybrid" in found else "single"
        against = " and ".join(in_words(compare(found[row], found[other]), other) for other in ("none", "random"))
        lines.append(
            f"{model} model, against the images used: the {row} {found[row].settings['defense']} {against}.{_doubt(found['none'])}"
        )
    return lines


def _doubt(none: AuditResult) -> str:
    (bare,) = (row for row in none.rows if (row.kind, row.truth) == ("attack", "used"))
    return "" if bare.verdict.better else " The attack on unprotected images is itself no better than blind, so this says little."


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
