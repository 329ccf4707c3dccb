"""An assessment: what is shared now, which defenses help, what they cost, and what to do.

It is made of other jobs: the doctor's checks, a training under each defense that goes on from the
given weights, and one audit of all of them. Its folder holds theirs, so it goes on after a stop.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from gradveil.audits import AuditJob, AuditResult, Case, CaseResult, run_audit
from gradveil.audits.job import data_name, slug
from gradveil.checks import Diagnosis
from gradveil.checks.doctor import doctor
from gradveil.core.boundary import check_fields, public
from gradveil.core.errors import GradveilError
from gradveil.core.files import write_text
from gradveil.core.job_folder import SETTINGS, Kind, claim
from gradveil.core.locks import alone, refuse_held
from gradveil.core.progress import Bar, spoken
from gradveil.core.types import Protocol
from gradveil.data.images import Images, as_images, divided
from gradveil.defenses import Defense, as_defense, assessed_defenses
from gradveil.defenses.applied import protected_model
from gradveil.engine.device import find_device
from gradveil.models import NormalizedName
from gradveil.models.normalized import constants_setting, plain_name
from gradveil.report.write import Report, write_files
from gradveil.stats import Difference, difference, holm, sign_test
from gradveil.training import Recipe, TrainingJob, train
from gradveil.training.run import candidate
from gradveil.training.timing import step_seconds
from gradveil.transforms import Policy

FORMAT = "gradveil assessment 1"
ASSESSMENT = Kind("an assessment", "assessment", format=FORMAT)
RESULT = "assessment.json"
DOCTOR = "doctor.json"
TRAINED = "trained"
AUDIT = "audit"
ASSESSING = "assessing into"  # for who finds the folder held

NOW, THEN = "0", "end"  # the steps of the training that are audited: before and after it
FOR_TRAINING = 0.3  # share of the budget
LEAST_STEPS = 20  # of each training, whatever the budget
LEVEL = 0.05
FEW_ITERATIONS = 0.25  # share of the attacks' iterations below which they may be too weak


@dataclass(frozen=True, eq=False)
class AssessJob:
    """Assess what clients that train `model` on images like `data` give away.

    `data` is the name of a data set, or a pair of images to train and to attack. `checkpoint` are
    the weights that clients start from; without it those of the module, or untrained ones. Each
    of `defenses` is trained with for `epochs` more, at the rate `lr`, and attacked on `images`
    images. A defense that costs more than `most_loss` of accuracy is not recommended. `budget` are
    minutes for all of it, about: there are fewer training images and iterations where they do not
    suffice.
    """

    model: nn.Module | str | NormalizedName
    data: str | tuple[Images, Images]
    checkpoint: Path | None = None
    defenses: tuple[Defense, ...] = ()
    images: int = 32
    batch_size: int = 1
    labels: str = "known"
    protocol: Protocol = field(default_factory=Protocol)
    epochs: int = 2
    lr: float = 0.01
    most_loss: float = 0.02
    budget: float = 60.0
    image_size: int | None = None
    channels: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.budget < math.inf:
            raise GradveilError(f"budget {self.budget:g}: minutes must be above 0")
        if not 0 <= self.most_loss < 1:
            raise GradveilError(
                f"most loss {self.most_loss:g}: a share of accuracy, at least 0 and below 1"
            )
        if self.epochs < 1:
            raise GradveilError(f"epochs {self.epochs}: there must be at least 1")
        _ = self.training(Defense()), self.audit(())  # they check the rest

    @property
    def tried(self) -> tuple[Defense, ...]:
        """The defenses, those that declare a setting for assessments where none is given."""
        return self.defenses or assessed_defenses()

    def training(self, defense: Defense, fraction: float = 1.0) -> TrainingJob:
        """Return the training that goes on from the given weights under a defense."""
        data, test = (self.data, None) if isinstance(self.data, str) else self.data
        return TrainingJob(
            data,
            self.model,
            Recipe(self.epochs, self.lr, batch_size=64),
            defense,
            fraction=fraction,
            image_size=self.image_size,
            channels=self.channels,
            seed=self.seed,
            test=test,
            start=self.checkpoint,
        )

    def audit(self, trained: Sequence[tuple[Defense, Path]], minutes: float = 1.0) -> AuditJob:
        """Return the audit of what is shared now, and of each defense after its training."""
        public, data = (None, self.data) if isinstance(self.data, str) else self.data
        cases = [Case(Defense(), self.checkpoint, step=NOW)]
        cases += [Case(defense, path, step=THEN) for defense, path in trained]
        return AuditJob(
            self.model,
            data,
            auto=True,
            cases=tuple(cases),
            images=self.images,
            public=public,
            batch_size=self.batch_size,
            labels=self.labels,
            protocol=self.protocol,
            budget=minutes,
            image_size=self.image_size,
            channels=self.channels,
            seed=self.seed,
        )

    def settings(self) -> dict[str, Any]:
        """Return plain values for settings.json."""
        training = self.training(Defense()).settings()
        return {
            "format": FORMAT,
            "data": training["data"],
            "model": training["model"],
            "checkpoint": self.checkpoint and str(self.checkpoint),
            "defenses": [str(defense) for defense in self.tried],
            "images": self.images,
            "batch_size": self.batch_size,
            "labels": self.labels,
            "trained_epochs": self.epochs,
            "lr": self.lr,
            "most_loss": self.most_loss,
            "budget": self.budget,
            "image_size": self.image_size,
            "channels": self.channels,
            "seed": self.seed,
            **self.protocol.settings(),
            **constants_setting(self.model),
        }


@dataclass(frozen=True)
class Assessed:
    """A defense after the assessment: what still leaks, what it costs, and whether it helps.

    `p_less` is the p-value, after Holm's correction for all defenses, that fewer images are
    identified than without a defense after the same training, by a sign test of the same images.
    """

    defense: str
    attack: str
    identified: int
    n: int
    bounds: tuple[float, float]
    leaks: bool
    accuracy: float
    cost: Difference
    p_less: float
    helps: bool
    reason: str


@dataclass(frozen=True, eq=False)
class Assessment:
    """The result: the doctor's findings, the audit, its page, a line for each defense, and advice.

    `recommended` is the text of a defense; None where none is recommended, and `advice` says why.
    """

    out: Path
    diagnosis: Diagnosis
    result: AuditResult
    report: Report
    defenses: tuple[Assessed, ...]
    recommended: str | None
    advice: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Return the assessment as JSON has it."""
        now = self.result.cases[0].strongest
        return {
            "format": FORMAT,
            "recommended": self.recommended,
            "advice": list(self.advice),
            "now": now.plain(),
            "defenses": [asdict(each) for each in self.defenses],
            "doctor": self.diagnosis.plain(),
            "page": str(self.report.page),
        }


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
    bar.say(f"checking {plain_name(job.model)} and {_title(job)}")
    diagnosis = _diagnose(job, root, device)
    if diagnosis.errors:
        first = next(found for found in diagnosis.everything if found.level == "error")
        raise GradveilError(f"the doctor found an error: {first}")
    if settings["fraction"] is None:
        settings["fraction"] = _fitting_fraction(job, root, where)
    fraction = float(settings["fraction"])
    defenses = (Defense(), *job.tried)
    with alone(out, ASSESSING):
        claim(out, settings)
        write_text(out / DOCTOR, json.dumps(diagnosis.plain(), indent=1) + "\n")
        share = "" if fraction == 1 else f", on {fraction:.0%} of the training images"
        bar.say(f"training on under {len(defenses)} defenses, {job.epochs} epoch(s) each{share}")
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
        pairs = [(d, each.checkpoint) for d, each in zip(defenses, trained, strict=True)]
        audit = job.audit(pairs, job.budget * (1 - FOR_TRAINING))
        bar.say(
            f"attacking {job.images} images now and under each defense, in about "
            f"{spoken(60 * (audit.budget or 0))}"
        )
        result = run_audit(audit, out / AUDIT, root=root, device=device, progress=progress)
    report = write_files({"": result}, out, with_pictures=with_pictures)
    found = conclude(job, diagnosis, result, report, out)
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


def conclude(
    job: AssessJob,
    diagnosis: Diagnosis,
    result: AuditResult,
    report: Report,
    out: Path,
) -> Assessment:
    """Judge every defense by the line-up and by its accuracy, and say what to do."""
    now, bare, *defended = result.cases
    tested = {case.defense: case.model for case in result.cases if case.asked_step == THEN}
    p_less = holm([_p_less(case, bare) for case in defended])
    judged = tuple(
        _judged(case, bare, tested, p, job.most_loss)
        for case, p in zip(defended, p_less, strict=True)
    )
    best = min(
        (each for each in judged if each.helps),
        key=lambda each: (each.identified, each.cost.value),
        default=None,
    )
    advice = [*_on_now(now), *_on_best(best, judged, bare), *_on_limits(result, now)]
    return Assessment(
        out, diagnosis, result, report, judged, best.defense if best else None, tuple(advice)
    )


def _hits(case: CaseResult) -> dict[int, float]:
    """Return by image whether the strongest attack gave it rank 1 in its line-up."""
    row = case.strongest
    records = case.of("attack", row.attack)
    return {r.image: float(r.scores.get(row.truth, {}).get("rank") == 1) for r in records}


def _p_less(case: CaseResult, bare: CaseResult) -> float:
    ours, theirs = _hits(case), _hits(bare)
    return sign_test([theirs[image] - ours[image] for image in ours.keys() & theirs.keys()])


def _judged(
    case: CaseResult,
    bare: CaseResult,
    tested: Mapping[str, Any],
    p_less: float,
    most_loss: float,
) -> Assessed:
    """Judge a defense; both models were tested on the same number of images."""
    row, facts, plain = case.strongest, tested[case.defense], tested[bare.defense]
    hits, n, accuracy = (facts.hits, facts.tested, facts.accuracy) if facts else (0, 1, 0.0)
    others = (plain.hits, plain.tested) if plain else (0, 1)
    cost = difference(others[0], others[1], hits, n)
    cheap, less = cost.value <= most_loss, p_less < LEVEL
    before = bare.strongest
    figures = f"{row.identified} of {row.n} images are identified, {before.identified} without it"
    if not less:
        reason = f"it was not shown to leak less: {figures} (p = {p_less:.2g})"
    elif not cheap:
        reason = f"it leaks less ({figures}), but costs {100 * cost.value:.1f} points of accuracy"
    else:
        reason = f"{figures} (p = {p_less:.2g})"
    return Assessed(
        case.defense,
        row.attack,
        row.identified,
        row.n,
        row.identified_bounds,
        row.doubt is None,
        accuracy,
        cost,
        p_less,
        less and cheap,
        reason,
    )


def _on_now(now: CaseResult) -> list[str]:
    row = now.strongest
    low, high = row.identified_bounds
    chance = row.verdict.chance * row.n
    figures = (
        f"the strongest attack, {row.attack}, identifies {row.identified} of {row.n} images "
        f"(95%: {low:.0%} to {high:.0%}; by luck it would be {chance:.1f})"
    )
    if row.doubt is None:
        return [f"Now: {figures}."]
    return [f"Now: {figures}: {row.doubt}. Nothing was shown to leak, which proves no safety."]


def _on_best(best: Assessed | None, judged: Sequence[Assessed], bare: CaseResult) -> list[str]:
    if best is not None:
        low, high = best.cost.low, best.cost.high
        left = "It still leaks: " if best.leaks else "What is left is no better than blind: "
        share = f"{best.bounds[0]:.0%} to {best.bounds[1]:.0%}"
        return [
            f"Recommended: {best.defense}. {best.reason}; it costs {100 * best.cost.value:.1f} "
            f"points of accuracy (90%: {100 * low:.1f} to {100 * high:.1f}).",
            f"{left}95% bounds on the share identified are {share}.",
        ]
    if bare.strongest.doubt is not None:
        why = f"without a defense no attack was shown to work either ({bare.strongest.doubt})"
        return [f"None of these was shown to help: {why}."]
    return [
        "None of these helps:",
        *(f"  {each.defense}: {each.reason}" for each in judged),
    ]


def _on_limits(result: AuditResult, now: CaseResult) -> list[str]:
    """Say what makes the figures weaker than they look."""
    share = result.settings.get("share") or 1.0
    lines = []
    if share < FEW_ITERATIONS:
        lines.append(
            f"The attacks made {share:.0%} of their iterations in this budget: stronger ones may "
            "leak more. A larger --budget, or a GPU, settles it."
        )
    if not now.strongest.candidates:
        lines.append(
            f"There was no line-up ({now.settings.get('no_lineup')}), so nothing could be "
            "identified: give more images of each class."
        )
    lines.append(
        "A defense was judged by the attacks that are known here, on images like these; tests were "
        f"corrected for {len(result.cases) - 2} defense(s). Others may leak in ways nobody tried."
    )
    return lines
