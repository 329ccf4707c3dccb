"""A whole search: into a folder, alone or with others at one study, or on from where it stopped."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from gradveil.attacks import Attack
from gradveil.attacks.presets import find_attack
from gradveil.audits.job import short_name
from gradveil.checks.weights import look_at_weights
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.locks import clear_lock, held
from gradveil.core.progress import Bar
from gradveil.data import Images
from gradveil.engine.device import find_device
from gradveil.models import NormalizedName
from gradveil.models.accuracy import measure_accuracy
from gradveil.models.checkpoints import load_checkpoint
from gradveil.search.comparisons import FEWEST, MODELS, verdicts
from gradveil.search.confirm import audit_seconds, audit_tasks, policies_to_audit, read_audits
from gradveil.search.job import FOLDER, RESULT, SearchJob
from gradveil.search.loop import Loop, TriedTrial, on_front, qualified, saving
from gradveil.search.results import POLICIES as FOUND
from gradveil.search.results import SearchResult, TriedPolicy
from gradveil.search.services import (
    CALM,
    JOURNAL,
    check_engine,
    check_optuna,
    check_services,
    claimed,
    make_engine,
)
from gradveil.search.setup import Setup, find_checkpoint
from gradveil.search.space import POLICIES, functions, make_hybrid
from gradveil.transforms import Policy

SURE = 0.999  # confidence of a race that kept the same ten policies, as `trials` has measured
TOLD = ("transform", "policy")  # what an attack needs that knows the policy


@public
def search_policies(
    model: nn.Module | str | NormalizedName,
    data: tuple[Images, Images] | str,
    *,
    out: str | Path,
    checkpoint: str | Path | None = None,
    attack: Attack | str = "adam-cosine",
    trials: int = 1500,
    keep: int = 10,
    threshold: float = -85.0,
    score: str = "probe",
    rule: str = "code",
    rank_by: str = "ssim",
    sampler: str = "random",
    race: bool = False,
    race_confidence: float = 0.999,
    images: int | None = None,
    probe_steps: int = 400,
    hybrid: int = 2,
    audit_images: int = 32,
    audit_steps: int | None = None,
    augment: bool = True,
    image_size: int | None = None,
    channels: int | None = None,
    seed: int = 0,
    root: str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
) -> SearchResult:
    """Search for policies that leak little and cost little accuracy; confirm them by audits.

    `model`, `data` and `attack` are names or values; `data` is a pair of training and test images.
    `SearchJob` describes the other settings. Everything goes into the folder `out`; run the same
    call again after a stop, and it goes on. For a study that several machines share, or a Ray
    cluster, see `run_search`.
    """
    job = SearchJob(
        data=data,
        model=model,
        checkpoint=None if checkpoint is None else Path(checkpoint),
        trials=trials,
        keep=keep,
        threshold=threshold,
        score=score,
        rule=rule,
        rank_by=rank_by,
        sampler=sampler,
        race=race,
        race_confidence=race_confidence,
        images=images,
        attack=find_attack(attack),
        attack_name=short_name(attack) if isinstance(attack, str) else None,
        probe_steps=probe_steps,
        hybrid=hybrid,
        audit_images=audit_images,
        audit_steps=audit_steps,
        augment=augment,
        image_size=image_size,
        channels=channels,
        seed=seed,
    )
    return run_search(job, out, root=root, device=device, progress=progress)


@public
def run_search(
    job: SearchJob,
    out: str | Path,
    *,
    root: str | Path | None = None,
    device: str = "auto",
    storage: str | None = None,
    study: str = "gradveil",
    engine: str = "local",
    ray_address: str | None = None,
    progress: bool = True,
) -> SearchResult:
    """Search into `out`. A search that was stopped goes on; one that has ended is read back.

    The study is a journal file in the folder, or lies in an Optuna storage (`storage`, a URL),
    where searches on several machines join it by its name. Their semi-trained weights must be the
    same, so give all of them one checkpoint.
    """
    out, root = Path(out), None if root is None else Path(root)
    where = find_device(device)
    check_engine(engine, ray_address)
    FOLDER.refuse_other(out, job.settings())
    if (out / RESULT).is_file():
        return _ended(out, storage)
    check_optuna("search")
    from gradveil.search.study import Study

    setup = Setup.of(job, root)
    check_services(storage, engine, ray_address)
    with claimed(FOLDER, out, job.settings()):
        bar = Bar(progress, counted=True, calm=CALM)
        checkpoint = find_checkpoint(job, out, root=root, device=device, bar=bar, progress=progress)
        model = load_checkpoint(checkpoint, setup.untrained()).to(where)
        _look_at_weights(setup, model, checkpoint, bar)
        facts = job.settings() | setup.facts(model)
        del facts["checkpoint"]
        scorers = setup.scorers(model, where)
        apart = setup.chosen.scored
        kept = out / JOURNAL if storage is None else storage
        opened = Study.open(kept, study, facts, job.sampler, job.seed, job.objectives, POLICIES)
        with closing(opened), make_engine(engine, scorers, ray_address) as made:
            audits = partial(
                audit_seconds,
                job,
                checkpoint,
                out,
                apart=apart,
                root=root,
                device=where,
                workers=made.workers,
            )
            try:
                done = Loop(job, opened, made, scorers, bar, audits).run()
            finally:
                bar.stop()
            busy = "makes the confirming audits: waiting for it"
            with held(out, lambda holder: bar.say(f"{holder} {busy}")):
                if not (out / RESULT).is_file():
                    policies = _policies_found(setup, done)
                    tasks = audit_tasks(
                        job, checkpoint, out, policies, apart=apart, root=root, device=device
                    )
                    made.run(tasks, device, progress)
                    about = (study, opened.url)
                    measured, _ = measure_accuracy(model, setup.test, seed=job.seed)
                    _result(setup, out, done, facts, measured, policies, about).write()
        return SearchResult.read(out)


def _look_at_weights(setup: Setup, model: nn.Module, checkpoint: Path, bar: Bar) -> None:
    """Say how accurate the weights are, and warn where they seem to be made for other images."""
    test = setup.test
    found = look_at_weights(model, test.images, test.labels, len(test.classes), setup.job.seed)
    bar.say(f"{checkpoint}: {found}")
    if found.finding is not None:
        warnings.warn(str(found.finding), GradveilWarning, stacklevel=3)


def _ended(out: Path, storage: str | None) -> SearchResult:
    result = SearchResult.read(out)
    clear_lock(out)  # of a process that was killed after its last write
    if storage is None:
        return result
    check_optuna("search")
    from gradveil.search.storage import storage_name

    if storage_name(storage) != result.storage:
        raise GradveilError(
            f"the search in {out} has ended, with its study in {result.storage}: choose another "
            f"--out for {storage_name(storage)}"
        )
    return result


def _policies_found(setup: Setup, done: Sequence[TriedTrial]) -> dict[str, Policy]:
    """Return the policies to be audited, by row; the hybrid is missing where there is none."""
    order = [trial.tried for trial in qualified(setup.job, done)]
    hybrid, _ = make_hybrid(order, setup.job.hybrid, setup.test.channels)
    return policies_to_audit(setup.job, order[0], hybrid)


def _result(
    setup: Setup,
    out: Path,
    done: Sequence[TriedTrial],
    facts: Mapping[str, Any],
    measured: float,
    policies: Mapping[str, Policy],
    study: tuple[str, str],
) -> SearchResult:
    """Return the result of a search whose audits are done; `study` is its name and its storage.

    `measured` is the accuracy of the semi-trained model.
    """
    job = setup.job
    ranked = qualified(job, done)
    kept, order = ranked[: job.keep], [trial.tried for trial in ranked]
    hybrid, why = make_hybrid(order, job.hybrid, setup.test.channels)
    confirmed = {model: {row: str(policy) for row, policy in policies.items()} for model in MODELS}
    ends = on_front(job, done) if job.sampler == "nsga2" else []
    return SearchResult(
        out,
        facts,
        tuple(map(TriedPolicy.of, done)),
        tuple(map(TriedPolicy.of, kept)),
        tuple(map(TriedPolicy.of, ends)),
        hybrid,
        why,
        saving(job, done, len(setup.chosen.leak)) if job.race else None,
        (
            accuracy_note(measured, len(setup.test.classes)),
            *setup.chosen.notes,
            *threshold_note(job, done),
            *job_notes(job, len(kept)),
            *idle_note(order[: len(kept)], setup.test.channels),
            *hybrid_note(order, len(kept), hybrid, job.race),
            *knowledge_note(job),
        ),
        *study,
        confirmed,
        tuple(verdicts(read_audits(out, confirmed))),
        setup.digests(),
    )


def accuracy_note(accuracy: float, classes: int) -> str:
    """Say what the semi-trained model has learned; one that learned nothing makes scores doubtful.

    The accuracy is measured: a file may say anything.
    """
    said = f"the semi-trained model has a test accuracy of {accuracy:.1%}"
    doubt = (
        f", chance is {1 / classes:.1%}: its scores say little; train another way and give it as "
        "the checkpoint"
    )
    return said + (doubt if accuracy < 2 / classes else "")


def threshold_note(job: SearchJob, done: Sequence[TriedTrial]) -> tuple[str, ...]:
    """Say so where the threshold dropped no policy.

    Accuracy scores depend on the number of classes, and -85 was chosen for a hundred.
    """
    scores = [trial.mean("accuracy") for trial in done if "accuracy" in trial.values]
    if not scores or min(scores) < job.threshold:
        return ()
    return (
        f"the accuracy threshold {job.threshold:g} dropped no policy: their scores were "
        f"{min(scores):.1f} to {max(scores):.1f}",
    )


def job_notes(job: SearchJob, kept: int) -> tuple[str, ...]:
    """Say what these settings leave open."""
    notes = []
    if kept < job.keep:
        notes.append(f"the front holds {kept} policies that qualify, {job.keep} were wanted")
    if job.race and job.race_confidence < SURE:
        notes.append(
            f"raced at a confidence of {job.race_confidence:g}: a search without a race may keep "
            "others"
        )
    if job.audit_images < FEWEST:
        notes.append(
            f"{job.audit_images} audit images: no test can tell two policies apart on fewer than "
            f"{FEWEST}"
        )
    return tuple(notes)


def idle_note(kept: Sequence[Policy], channels: int = 3) -> tuple[str, ...]:
    """Name kept policies that change no image: such images may leak least, without a defense."""
    idle = [str(policy) for policy in kept if not any(functions(policy, channels))]
    return (f"kept, but no defense, since it changes no image: {', '.join(idle)}",) if idle else ()


def knowledge_note(job: SearchJob) -> tuple[str, ...]:
    """Say so where the attack that confirms a policy is not told of it, and how to audit one."""
    if {*TOLD} & {*job.attack.needs}:
        return ()
    return (
        f"the attack that confirms, {job.attack_title}, was not told the policy, so that policies "
        "may look better here than they are: audit them with the attacks that know them, `gradveil "
        f"audit ... --defense OUT/{FOUND} --attack auto`, where OUT is the folder of this "
        "search",
    )


def hybrid_note(
    ranked: Sequence[Policy], kept: int, hybrid: Policy | None, race: bool = False
) -> tuple[str, ...]:
    """Give the rank of each member of the hybrid that is not among the policies kept, and why.

    After a race it might have been another.
    """
    members = [Policy((member,)) for member in (hybrid.members if hybrid else ())]
    notes = []
    for member in members:
        rank = ranked.index(member)
        if rank < kept:
            continue
        others = [policy for policy in ranked[:rank] if policy not in members]
        why = (
            ": others before it share a function with a member or change nothing" if others else ""
        )
        doubt = "; one that the race dropped might have stood before it" if race else ""
        notes.append(f"member {member} of the hybrid ranks {rank + 1} of {len(ranked)}{why}{doubt}")
    return tuple(notes)
