"""The assessment: doctor, trainings and audit one after the other, into one folder."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradveil.assessment.conclusions import Assessment, conclude
from gradveil.assessment.job import ASSESSMENT, AssessJob
from gradveil.audits import run_audit
from gradveil.audits.job import data_name, slug
from gradveil.audits.prepare import least_minutes, refuse_too_few
from gradveil.audits.timing import TooFewMinutesError
from gradveil.checks import Diagnosis
from gradveil.checks.doctor import doctor
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.files import shown, write_text
from gradveil.core.job_folder import SETTINGS, claim
from gradveil.core.locks import alone, refuse_held
from gradveil.core.progress import Bar, spoken
from gradveil.core.types import Protocol
from gradveil.data.images import as_images, divided
from gradveil.defenses import Defense, as_defense
from gradveil.defenses.applied import protected_model
from gradveil.engine.device import find_device, sharing_cores
from gradveil.models import NormalizedName
from gradveil.models.normalized import plain_name
from gradveil.report.write import ADVICE, ASSESSED, Report, write_files
from gradveil.training import train
from gradveil.training.run import candidate
from gradveil.training.timing import step_seconds
from gradveil.transforms import Policy

RESULT = ADVICE
DOCTOR = "doctor.json"
TRAINED = "trained"
ASSESSING = "assessing into"  # for who finds the folder held

FOR_TRAINING = 0.3  # share of the budget
SPARE = 1.5  # times what attacks need at least, lest they be refused after the trainings
LEAST_STEPS = 20  # of each training, whatever the budget


@public
def assess(
    model: nn.Module | str | NormalizedName,
    images: Any,
    labels: Any = None,
    *,
    checkpoint: str | Path | None = None,
    defenses: Sequence[Defense | Policy | str] = (),
    victims: int = 32,
    batch_size: int = 1,
    know_labels: bool = True,
    protocol: Protocol | None = None,
    epochs: int = 2,
    lr: float = 0.01,
    most_loss: float = 0.02,
    budget: float = 60.0,
    image_size: int | None = None,
    channels: int | None = None,
    seed: int = 0,
    out: str | Path = "assessment",
    data_root: str | Path | None = None,
    device: str = "auto",
    with_pictures: bool = False,
    progress: bool = True,
) -> Assessment:
    """Say what clients give away now, and which defense is worth its cost.

    `model` is any module on images in [0, 1], or a name. `images` are the name of a data set, or a
    tensor (N, C, H, W) with `labels`, a DataLoader or data set of such pairs: about a fifth of
    these are set apart to be attacked. `AssessJob` describes the other settings. The folder `out`
    gets everything; the same call goes on after a stop.
    """
    data = images if isinstance(images, str) else divided(as_images(images, labels))
    job = AssessJob(
        model,
        data,
        None if checkpoint is None else Path(checkpoint),
        tuple(as_defense(defense, "defenses") for defense in defenses),
        victims,
        batch_size,
        "known" if know_labels else "inferred",
        protocol or Protocol(),
        epochs,
        lr,
        most_loss,
        budget,
        image_size,
        channels,
        seed,
    )
    root = None if data_root is None else Path(data_root)
    return run_assessment(
        job, Path(out), root=root, device=device, with_pictures=with_pictures, progress=progress
    )


@public
def run_assessment(
    job: AssessJob,
    out: Path,
    *,
    root: Path | None = None,
    device: str = "auto",
    with_pictures: bool = False,
    progress: bool = True,
) -> Assessment:
    """Run the job into `out`, or go on where it stopped there."""
    where, bar = find_device(device), Bar(progress)
    refuse_held(out, ASSESSING)
    settings = job.settings() | {"fraction": _fraction_kept(out)}
    ASSESSMENT.refuse_other(out, settings)
    diagnosis = _diagnose(job, root, device)
    if diagnosis.errors:
        first = next(found for found in diagnosis.everything if found.level == "error")
        raise GradveilError(f"the doctor found an error: {first}")
    bar.say(f"checked {shown(plain_name(job.model))} and {shown(_title(job))}")
    for finding in diagnosis.findings:
        if finding.level == "warning":  # now, and not after the trainings
            bar.say(f"warning: {finding}")
    defenses = (Defense(), *job.tried)
    refuse_too_few(job.audit([(defense, out) for defense in defenses]), root)
    if settings["fraction"] is None:
        _refuse_too_short(job, out, root, where)
        settings["fraction"] = _fitting_fraction(job, root, where)
    fraction = float(settings["fraction"])
    with alone(out, ASSESSING):
        claim(out, settings)
        write_text(out / DOCTOR, json.dumps(diagnosis.plain(), indent=1) + "\n")
        share = "" if fraction == 1 else f", on {fraction:.0%} of the training images"
        epochs = "1 epoch" if job.epochs == 1 else f"{job.epochs} epochs"
        bar.say(f"training on without a defense and under {len(job.tried)}, {epochs} each{share}")
        trained = [
            train(
                job.training(defense, fraction),
                out / TRAINED / slug(str(defense)),
                root=root,
                device=device,
                progress=progress,
            )
            for defense in defenses
        ]
        for defense, each in zip(defenses, trained, strict=True):
            bar.say(f"{defense}: test accuracy {each.accuracy:.1%}")
        pairs = [(d, each.out) for d, each in zip(defenses, trained, strict=True)]
        audit = job.audit(pairs, job.budget * (1 - FOR_TRAINING))
        if (out / ASSESSED / SETTINGS).is_file():  # part of that time is over
            bar.say(f"going on with the attacks on {job.images} images, now and under each defense")
        else:
            bar.say(
                f"attacking {job.images} images now and under each defense, in about "
                f"{spoken(60 * (audit.budget or 0))}, after each attack was tried and timed"
            )
        try:
            result = run_audit(audit, out / ASSESSED, root=root, device=device, progress=progress)
        except TooFewMinutesError as error:
            raise TooFewMinutesError(job.budget, error.least / (1 - FOR_TRAINING)) from None

    def write(advice: Sequence[str]) -> Report:
        return write_files({"": result}, out, with_pictures=with_pictures, advice=advice)

    found = conclude(job, diagnosis, result, write, out)
    write_text(out / RESULT, json.dumps(found.plain(), indent=1, default=str) + "\n")
    return found


def _title(job: AssessJob) -> str:
    return data_name(job.data if isinstance(job.data, str) else job.data[1])


def _fraction_kept(out: Path) -> float | None:
    """Return the fraction of the training images that an assessment in this folder began with."""
    if not (out / SETTINGS).is_file():
        return None
    fraction = ASSESSMENT.read(out).get("fraction")
    return float(fraction) if isinstance(fraction, int | float) else None


def _diagnose(job: AssessJob, root: Path | None, device: str) -> Diagnosis:
    """Make the doctor's checks, but for a trial of an attack: the audit does that."""
    settings: dict[str, Any] = {"public": None}
    images: object = job.data
    if not isinstance(job.data, str):
        settings["public"], images = job.data
    return doctor(
        job.model,
        images,
        attack=None,
        checkpoint=job.checkpoint,
        batch_size=job.batch_size,
        know_labels=job.labels == "known",
        image_size=job.image_size,
        channels=job.channels,
        seed=job.seed,
        data_root=root,
        device=device,
        **settings,
        **asdict(job.protocol),
    )


def _refuse_too_short(job: AssessJob, out: Path, root: Path | None, device: torch.device) -> None:
    """Refuse a budget in which not every attack can make one iteration, before any training.

    Attacks on the weights that are given take as long as those on trained ones.
    """
    minutes = job.budget * (1 - FOR_TRAINING)
    with (
        warnings.catch_warnings(action="ignore", category=GradveilWarning),  # the audit warns
        sharing_cores(device),
    ):
        least = least_minutes(job.audit_before(), out / ASSESSED, root, device, minutes)
    if minutes < SPARE * least:
        raise TooFewMinutesError(job.budget, SPARE * least / (1 - FOR_TRAINING))


def _fitting_fraction(job: AssessJob, root: Path | None, device: Any) -> float:
    """Return the share of the training images that all trainings can use within the budget."""
    whole = job.training(Defense())
    train_split, _ = whole.splits(root)
    shape = train_split.channels, train_split.size, train_split.size
    seconds = 0.0
    for defense in (Defense(), *job.tried):
        each = replace(whole, defense=defense)
        model = protected_model(defense, candidate(job.model, train_split, job.seed), shape)
        seconds += step_seconds(each, model, train_split, device)
    steps = whole.steps(len(train_split))
    most = max(LEAST_STEPS, FOR_TRAINING * 60 * job.budget / max(seconds, 1e-9))
    return 1.0 if steps <= most else float(f"{most / steps:.2g}")
