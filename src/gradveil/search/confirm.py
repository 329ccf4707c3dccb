"""The audits that confirm a search, on the semi-trained and on the untrained model.

Four defenses are audited: none, random policies, the best single policy, and the hybrid. What these
audits come to is in `comparisons`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gradveil.audits import AuditJob, AuditResult, Case, CaseResult, run_audit
from gradveil.audits.attackers import check_told
from gradveil.audits.job import shortened
from gradveil.audits.prepare import foreseen_seconds
from gradveil.audits.stage import run_attack
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import derived, generator
from gradveil.core.types import Batch
from gradveil.data import Images
from gradveil.defenses import Defense, PolicyDefense
from gradveil.search.comparisons import (
    MODELS,
    Confirmation,
    compare_all,
    confirmation,
    p_values,
)
from gradveil.search.engine import Task
from gradveil.search.job import RESULT, SEMI_TRAINED, SearchJob
from gradveil.search.space import draw, policy_of
from gradveil.transforms import Policy

CONFIRM = "confirm"
RANDOM = 10  # policies of the random row, as in the paper


def try_attack(job: SearchJob, model: nn.Module, test: Images) -> None:
    """Run one iteration on one image, since an attack may not suit the model.

    Otherwise it would fail in the audits, after all the work.
    """
    batch = Batch(test.images[:1].float() / 255, test.labels[:1])
    client = Client(model, classes=len(test.classes))
    ((seen, _),) = client.share_batches([batch], generator(job.seed, "trial"))
    check_told(job.attack_title, job.attack, [seen])
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
        return result.beside(p_values(compare_all(_by_model(result, confirmed))))
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
