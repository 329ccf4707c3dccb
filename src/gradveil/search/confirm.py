"""The audits that confirm a search, on the semi-trained and on the untrained model.

Four defenses are audited: none, random policies, the best single policy, and the hybrid. Everything
that this package knows of audits is in `try_attack`, `audit_tasks`, `audit_seconds`,
`read_confirmed` and `read_audits`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gradveil.audits import AuditJob, AuditResult, Case, CaseResult, Row, run_audit
from gradveil.audits.job import shortened
from gradveil.audits.prepare import foreseen_seconds
from gradveil.audits.stage import run_attack
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import derived, generator
from gradveil.core.types import Batch
from gradveil.data import Images
from gradveil.defenses import Defense, PolicyDefense
from gradveil.search.engine import Task
from gradveil.search.job import RESULT, SEMI_TRAINED, SearchJob
from gradveil.search.space import draw, policy_of
from gradveil.stats import holm_cutoff, sign_test, signed_rank
from gradveil.transforms import Policy

CONFIRM = "confirm"
MODELS = (SEMI_TRAINED, "untrained")
RANDOM = 10  # policies of the random row, as in the paper

LEVEL = 0.05
MEASURES = {"lineup": "rank 1", "over_blind": "dB over blind", "ssim": "SSIM"}
AGAINST = ("none", "random")
TESTS = 2 * len(MEASURES) * len(AGAINST) * len(MODELS)
"""Comparisons of a search: 3 measures in 2 directions against 2 other rows on 2 models. These and
the tests of its audits, which flag what is no better than blind, err together in at most 5% of
cases (Holm)."""

FEWEST = math.ceil(-math.log2(LEVEL / TESTS))
"""Images below which no comparison can reject, even where every test of the audits does: with n
images no p-value is below 2 ** -n."""


@dataclass(frozen=True)
class Confirmation:
    """The audit of one model under one defense.

    `rows` are those of its table. `scores` are the attack's for each image that it reconstructed,
    by the number of the image, the truth they are measured against, and the measure. `p_values` are
    those of the audit before any correction.
    """

    attack: str
    defense: str
    rows: tuple[Row, ...]
    scores: Mapping[int, Mapping[str, Mapping[str, float]]]
    p_values: tuple[float, ...] = ()


def try_attack(job: SearchJob, model: nn.Module, test: Images) -> None:
    """Run one iteration on one image, since an attack may not suit the model.

    Otherwise it would fail in the audits, after all the work.
    """
    batch = Batch(test.images[:1].float() / 255, test.labels[:1])
    client = Client(model, classes=len(test.classes))
    ((seen, _),) = client.share_batches([batch], generator(job.seed, "trial"))
    run_attack(shortened(job.attack), [seen], generator(job.seed, "trial", "attack"))


def policies_to_audit(job: SearchJob, best: Policy, hybrid: Policy | None) -> dict[str, Policy]:
    """The policies by the names of their rows.

    Each image of the random row gets one of ten policies that no search has seen.
    """
    seed = derived(job.seed, "random policies")
    drawn = tuple(policy_of(draw(seed, number)).members[0] for number in range(RANDOM))
    found = {"none": Policy(), "random": Policy(drawn), "single": best}
    return found if hybrid is None else found | {"hybrid": hybrid}


def audit_tasks(
    job: SearchJob,
    checkpoint: Path,
    out: Path,
    policies: Mapping[str, Policy],
    *,
    apart: Sequence[int],
    root: Path | None,
    device: str,
) -> list[Task]:
    """Make a task for each case of one audit: every row, on the semi-trained and untrained model.

    Paths are absolute, so that they hold on every machine that shares the files. No image `apart`,
    which a score has seen, is attacked.
    """
    audit = audit_job(job, checkpoint, policies, apart)
    folder = out.resolve() / CONFIRM
    return [
        partial(run_case, audit, folder, root, device, number) for number in range(len(audit.cases))
    ]


def audit_seconds(
    job: SearchJob,
    checkpoint: Path,
    out: Path,
    *,
    apart: Sequence[int],
    root: Path | None,
    device: torch.device,
    workers: int,
) -> float:
    """Return about how long the audits take, before it is known which policies they are of.

    Each of the `workers` makes a case at a time.
    """
    audit = audit_job(job, checkpoint, policies_to_audit(job, Policy(), Policy()), apart)
    whole = foreseen_seconds(audit, out.resolve() / CONFIRM, root, device)
    return whole / min(workers, len(audit.cases))


def run_case(
    job: AuditJob, out: Path, root: Path | None, device: str, number: int, progress: bool
) -> AuditResult:
    """Run one case of an audit into `out`; one that was stopped there goes on."""
    return run_audit(job, out, root=root, device=device, progress=progress, only=number)


def audit_job(
    job: SearchJob, checkpoint: Path, policies: Mapping[str, Policy], apart: Sequence[int]
) -> AuditJob:
    """Make the audit; crop and flip come before a policy where the search had them.

    `none` has them too: a policy is compared with what its training would do without it.
    """
    cases = []
    for model in MODELS:
        weights = checkpoint.resolve() if model == SEMI_TRAINED else None
        for row, policy in policies.items():
            plain = policy == Policy() and not job.augment
            defense = Defense() if plain else PolicyDefense(policy, job.augment)
            cases.append(Case(defense, weights, label=f"{model}-{row}"))
    public, victims = (None, job.data) if isinstance(job.data, str) else job.data
    return AuditJob(
        job.model,
        victims,
        {job.attack_title: job.attack},
        cases=tuple(cases),
        images=job.audit_images,
        public=public,
        steps=job.audit_steps,
        image_size=job.image_size,
        channels=job.channels,
        apart=tuple(apart),
        seed=job.seed,
    )


def read_audits(
    out: Path, confirmed: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, Confirmation]]:
    """Read the audits of a search's folder, by model and row."""
    return _by_model(read_confirmed(out, confirmed), confirmed)


def read_confirmed(out: Path, confirmed: Mapping[str, Mapping[str, str]]) -> AuditResult:
    """Read the audit of a search's folder, its tests corrected for the comparisons too."""
    try:
        result = AuditResult.read(out / CONFIRM)
        return result.beside(_p_values(compare_all(_by_model(result, confirmed))))
    except GradveilError as error:
        raise GradveilError(
            f"{error}; delete {out / RESULT} and run the search again, which makes missing audits "
            "anew"
        ) from None


def _by_model(
    result: AuditResult, confirmed: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, Confirmation]]:
    found = {case.out.name: case for case in result.cases}
    return {
        model: {row: _confirmation(found, model, row) for row in rows}
        for model, rows in confirmed.items()
    }


def _confirmation(found: Mapping[str, CaseResult], model: str, row: str) -> Confirmation:
    name = f"{model}-{row}"
    if name not in found:
        raise GradveilError(f"the audit of {name} is missing")
    return confirmation(found[name])


def confirmation(case: CaseResult) -> Confirmation:
    """Return what the audit of one defense of a search says."""
    return Confirmation(
        next(iter(case.settings["attacks"])),
        case.defense,
        case.rows,
        {
            record.image: {
                truth: dict(scores) | {"lineup": float(scores.get("rank") == 1)}
                for truth, scores in record.scores.items()
            }
            for record in case.of("attack")
            if record.ok
        },
        tuple(case.p_values),
    )


@dataclass(frozen=True)
class Comparison:
    """One measure on the n images that both audits reconstructed; higher leaks more.

    `ours` and `theirs` are means; `less` and `more` are one-sided p-values.
    """

    measure: str
    n: int
    ours: float
    theirs: float
    less: float
    more: float


def compare(ours: Confirmation, theirs: Confirmation, truth: str = "used") -> list[Comparison]:
    """Compare two audits of the same images, by every measure."""
    both = sorted(ours.scores.keys() & theirs.scores.keys())
    made = []
    for measure in MEASURES:
        first, second = (
            [side.scores[image][truth][measure] for image in both] for side in (ours, theirs)
        )
        differences = [a - b for a, b in zip(first, second, strict=True)]
        test = sign_test if measure == "lineup" else signed_rank
        n = len(differences)
        means = (sum(first) / n, sum(second) / n) if n else (0.0, 0.0)
        made.append(
            Comparison(measure, n, *means, test([-d for d in differences]), test(differences))
        )
    return made


def compare_all(
    audits: Mapping[str, Mapping[str, Confirmation]],
) -> dict[str, dict[str, list[Comparison]]]:
    """Compare the policy found with none and with random policies, by model and other row."""
    return {
        model: {other: compare(rows[_found(rows)], rows[other]) for other in AGAINST}
        for model, rows in audits.items()
    }


def _found(rows: Mapping[str, Confirmation]) -> str:
    """Name the row of the policy that the search found."""
    return "hybrid" if "hybrid" in rows else "single"


def _p_values(compared: Mapping[str, Mapping[str, Sequence[Comparison]]]) -> list[float]:
    return [
        p
        for others in compared.values()
        for tests in others.values()
        for test in tests
        for p in (test.less, test.more)
    ]


def verdict(compared: Sequence[Comparison], cutoff: float) -> str:
    """less, more, mixed where the measures disagree, or open where no test rejects.

    Tests reject whose p-value is at most the `cutoff`.
    """
    less, more = (
        any(getattr(test, side) <= cutoff for test in compared) for side in ("less", "more")
    )
    return "mixed" if less and more else "less" if less else "more" if more else "open"


def in_words(compared: Sequence[Comparison], other: str, cutoff: float) -> str:
    """The verdict with the figures of every test, such as `leaks less than none (...)`."""
    figures = ", ".join(_figure(test) for test in compared)
    says = {
        "less": f"leaks less than {other}",
        "more": f"leaks more than {other}",
        "mixed": f"leaks less than {other} by one measure and more by another",
        "open": f"was not shown to leak less than {other}",
    }[verdict(compared, cutoff)]
    return f"{says} (n = {compared[0].n}: {figures})"


def _figure(test: Comparison) -> str:
    form = {"over_blind": "+.2f", "ssim": ".3f", "lineup": ".1%"}[test.measure]
    side = "less" if test.less <= test.more else "more"
    return (
        f"{MEASURES[test.measure]} {test.ours:{form}} against {test.theirs:{form}}, "
        f"p = {min(test.less, test.more):.2g} for {side}"
    )


def verdicts(audits: Mapping[str, Mapping[str, Confirmation]]) -> list[str]:
    """Say for each model whether the policy found leaks less than none and than random policies.

    The last line says how many tests were made.
    """
    compared = compare_all(audits)
    family = _p_values(compared)
    family += [p for rows in audits.values() for made in rows.values() for p in made.p_values]
    cutoff = holm_cutoff(family)
    lines = []
    for model, rows in audits.items():
        row = _found(rows)
        against = " and ".join(
            in_words(tests, other, cutoff) for other, tests in compared[model].items()
        )
        lines.append(
            f"{model} model, against the images used: the {row} {rows[row].defense} {against}."
            f"{_doubt(rows['none'])}"
        )
    return [
        *lines,
        f"These comparisons and what is no better than blind are decided at 5% over all "
        f"{len(family)} tests together (Holm).",
    ]


def _doubt(none: Confirmation) -> str:
    (bare,) = (row for row in none.rows if (row.kind, row.truth) == ("attack", "used"))
    if bare.verdict.better:
        return ""
    return " The attack on unprotected images is itself no better than blind, so this says little."
