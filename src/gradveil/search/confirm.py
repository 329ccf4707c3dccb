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
from gradveil.audits.stage import GRADIENTS, NOISY, SHAM, UNDER_DRAWS, run_attack
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
HEADLINE = "lineup"
MEASURES = {HEADLINE: "rank 1", "over_blind": "dB over blind", "ssim": "SSIM"}
"""Rank 1 decides whether a policy leaks less. The others stand beside it: a policy changes what a
guess scores by them too."""

SATURATED = 0.95  # share of images with rank 1 from which on it cannot tell two policies apart
CONTROLS = {
    SHAM: SHAM,
    UNDER_DRAWS: "guess that knows the draws",
    NOISY: f"ceiling by the {NOISY}",
    GRADIENTS: f"ceiling by the {GRADIENTS}",
}
"""Controls of a line-up: names of their rows, and what sentences call them."""

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
    """Return the policies by the names of their rows.

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
                truth: dict(scores)
                | ({HEADLINE: float(scores["rank"] == 1)} if "rank" in scores else {})
                for truth, scores in record.scores.items()
            }
            for record in case.of("attack")
            if record.ok
        },
        tuple(case.p_values),
    )


@dataclass(frozen=True)
class Comparison:
    """One measure on the n images that both audits reconstructed; higher means closer to them.

    `ours` and `theirs` are means; `less` and `more` are one-sided p-values. Without line-ups n of
    rank 1 is 0.
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
        pairs = [[side.scores[image][truth] for side in (ours, theirs)] for image in both]
        known = [pair for pair in pairs if all(measure in scores for scores in pair)]
        first, second = ([pair[side][measure] for pair in known] for side in (0, 1))
        differences = [a - b for a, b in zip(first, second, strict=True)]
        test = sign_test if measure == HEADLINE else signed_rank
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
    """Return less, more, or open where the test of rank 1 does not reject; nothing else decides.

    Tests reject whose p-value is at most the `cutoff`.
    """
    return _side(_headline(compared), cutoff) or "open"


def _headline(compared: Sequence[Comparison]) -> Comparison:
    return next(test for test in compared if test.measure == HEADLINE)


def _side(test: Comparison, cutoff: float) -> str:
    """Name the side on which a test rejects; empty where it does on none."""
    return "less" if test.less <= cutoff else "more" if test.more <= cutoff else ""


def saturated(test: Comparison) -> bool:
    """Tell whether nearly all images of both audits have rank 1, so that it separates nothing."""
    return test.n > 0 and min(test.ours, test.theirs) >= SATURATED


def in_words(compared: Sequence[Comparison], other: str, cutoff: float) -> str:
    """Write the verdict with the figures of every test, such as `leaks less than none (...)`."""
    decided, *beside = sorted(compared, key=lambda test: test.measure != HEADLINE)
    says = {
        "less": f"leaks less than {other}",
        "more": f"leaks more than {other}",
        "open": f"was not shown to leak less than {other}{_because(decided, beside, cutoff)}",
    }[verdict(compared, cutoff)]
    figures = ", ".join(_figure(test) for test in beside)
    first = _figure(decided) if decided.n else "no line-up"
    return f"{says} (n = {beside[0].n}: {first}; beside it {figures})"


def _because(decided: Comparison, beside: Sequence[Comparison], cutoff: float) -> str:
    """Say why rank 1 leaves it open where it had no chance, and where other measures reject."""
    if not decided.n:
        return ", since there are no line-ups, and nothing else decides it"
    parts = []
    if saturated(decided):
        parts.append("rank 1 is saturated and separates nothing at this setting")
    for side in ("less", "more"):
        if named := [MEASURES[test.measure] for test in beside if _side(test, cutoff) == side]:
            often = f"was not shown to be picked out {side} often"
            often = "is picked out as often" if decided.ours == decided.theirs else often
            parts.append(f"it resembles {side} ({', '.join(named)}), but {often}")
    return "".join(f"{start}{part}" for start, part in zip((": ", "; ", "; "), parts, strict=False))


def _figure(test: Comparison) -> str:
    form = {"over_blind": "+.2f", "ssim": ".3f", HEADLINE: ".1%"}[test.measure]
    side = "less" if test.less <= test.more else "more"
    return (
        f"{MEASURES[test.measure]} {test.ours:{form}} against {test.theirs:{form}}, "
        f"p = {min(test.less, test.more):.2g} for {side}"
    )


def verdicts(audits: Mapping[str, Mapping[str, Confirmation]]) -> list[str]:
    """Say for each model whether the policy found leaks less than none and than random policies.

    A line on the controls of the line-up follows each. The last says how many tests were made.
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
        lines += _control_words(model, rows)
    return [
        *lines,
        f"Rank 1 alone decides what leaks less. These comparisons and what is no better than "
        f"blind are decided at 5% over all {len(family)} tests together (Holm); each p is that of "
        "its own test, before this correction.",
    ]


def control(audit: Confirmation, name: str, truth: str = "used") -> Row | None:
    """Return a row of `CONTROLS`; None where the audit has none."""
    found = (row for row in audit.rows if (row.attack, row.truth) == (name, truth))
    return next((row for row in found if row.kind in ("sham", "bar", "ceiling")), None)


def _control_words(model: str, rows: Mapping[str, Confirmation]) -> list[str]:
    """Say how often the controls have rank 1, in the order of the rows; nothing without any."""
    said = []
    for name, words in CONTROLS.items():
        found = [control(audit, name) for audit in rows.values()]
        if any(found):
            said.append(f"{words} {', '.join('-' if row is None else row.lineup for row in found)}")
    if not said:
        return []
    return [f"{model} model, controls with rank 1 ({', '.join(rows)}): {'; '.join(said)}."]


def _doubt(none: Confirmation) -> str:
    (bare,) = (row for row in none.rows if (row.kind, row.truth) == ("attack", "used"))
    if bare.verdict.better:
        return ""
    return " The attack on unprotected images is itself no better than blind, so this says little."
