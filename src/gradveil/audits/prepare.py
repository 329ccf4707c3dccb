"""An audit that can start: models and data loaded, every attack tried out on every case."""

import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gradveil import __version__
from gradveil.attacks import Attack, GradientMatching
from gradveil.audits.attackers import mildly_defended
from gradveil.audits.job import AuditJob, Case, shorter
from gradveil.audits.results import AUDIT, CASE, FORMAT
from gradveil.audits.stage import Stage, make_stage, positive_stages
from gradveil.audits.timing import Costs
from gradveil.audits.victims import (
    Victims,
    find_scored,
    find_victims,
    refuse_few_unscored,
    refuse_tuned_on,
)
from gradveil.controls import Controls
from gradveil.core.errors import GradveilError
from gradveil.core.files import digest, shown
from gradveil.core.job_folder import SETTINGS, SHORT, differences
from gradveil.data import Images, load
from gradveil.data.images import as_images
from gradveil.defenses import Defense

KEPT = (
    "left_out",
    "knows",
    "protected",
    "searches",
    "class_names",
    "passed_over",
    "note",
    "comes_with",
)
"""Settings of a case that are taken from its folder: the first four are known only after its
attacks were tried out, and folders of older versions lack the others."""

NEAR = 4.0  # times what one case makes think an audit takes: defenses have attacks of their own


@dataclass(frozen=True, eq=False)
class PreparedCase:
    """A case that can be attacked. Its settings say which attacks were left out, and why."""

    case: Case
    stage: Stage
    settings: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Prepared:
    """An audit that can start: the job for this device, its cases, its folder's settings."""

    job: AuditJob
    device: torch.device
    test: Images
    settings: dict[str, Any]
    cases: tuple[PreparedCase, ...]
    plain: Controls  # of images that no defense changes
    public: Images | None
    costs: Costs = field(default_factory=Costs)  # of attacks that were timed already

    @property
    def positives(self) -> list[Stage]:
        """The stages of the positive control, which depends on neither model nor weights.

        The first case has it, with the attacks of all cases, each once; another case has none.
        """
        job, first = self.job, self.cases[0]
        if not job.positive or first.case is not job.cases[0]:
            return []
        return positive_stages(job, first.stage, self._controls_of, self._attacks_of_all())

    @cached_property
    def _controls(self) -> dict[str, Controls]:
        return {str(Defense()): self.plain}

    def _controls_of(self, defense: Defense) -> Controls:
        """Return the controls of single images under a defense, made once."""
        if not defense.changes("batch"):
            return self.plain
        if str(defense) not in self._controls:
            made = Controls.of(self.public, defense, 1, self.job.seed)
            self._controls[str(defense)] = made
        return self._controls[str(defense)]

    def _attacks_of_all(self) -> dict[str, tuple[Attack, Defense]]:
        """Return the attacks of all cases, each with the mild defense of its positive control.

        Where several cases have one of a name, the first's counts. Of cases that other machines
        prepare it is not known yet which attacks suit them: those are taken that were not left out
        of the first, and those that it tells too little.
        """
        first, train_mode = self.cases[0], self.job.protocol.train_mode
        prepared = {case.case.folder: case.stage for case in self.cases}
        found: dict[str, tuple[Attack, Defense]] = {}
        for case in self.job.cases:
            stage = prepared.get(case.folder)
            model = (first.stage if stage is None else stage).client.model
            attacks = self.job.attacks_on(case, model) if stage is None else stage.attacks
            for name, attack in attacks.items():
                mild = mildly_defended(attack, case.acting, model, train_mode)
                unsuited = stage is None and name in first.settings["left_out"]
                if name not in found and mild is not None and not (unsuited and mild == Defense()):
                    found[name] = attack, mild
        return found


def prepare(
    job: AuditJob, out: Path, root: Path | None, device: torch.device, only: int | None = None
) -> Prepared:
    """Load models and data and try out every attack on every case. Nothing is written.

    A case that `out` holds already is not tried again. `only` prepares one case, by its number.
    """
    job = job.on(device)
    settings = job.settings() | {
        "format": FORMAT,
        "attacks": [*(["auto"] if job.auto else []), *map(str, job.attacks)],
        "cases": [case.plain() for case in job.cases],
        "public_sha256": _digest(job.public),
    }
    refuse_other(out, settings)
    split, public, test = _splits(job, root)
    victims = _choose_victims(job, split)
    refuse_tuned_on(job.attacks, split, victims.numbers)
    guesses: dict[str, Controls] = {}
    numbers = range(len(job.cases)) if only is None else [only]
    cases = []
    for number in numbers:
        case = job.cases[number]
        with naming(case, len(job.cases)):
            before = case.before_gradients
            if str(before) not in guesses:
                guesses[str(before)] = Controls.of(public, before, job.batch_size, job.seed)
            stage = make_stage(job, case, split, victims, guesses[str(before)], device)
            cases.append(_prepare_case(job, case, stage, device, out / case.folder))
    plain = guesses.get("none") or Controls.of(public, Defense(), 1, job.seed)
    return Prepared(job, device, test, settings, tuple(cases), plain, public)


def refuse_other(out: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder of anything but this audit; where only the cases differ, name them."""
    try:
        AUDIT.refuse_other(out, settings)
    except GradveilError as error:
        raise GradveilError(_other_cases(out, settings) or str(error)) from None


def _other_cases(out: Path, settings: Mapping[str, Any]) -> str:
    """Name the cases that only the audit there has, or only this one, and say what to do.

    Empty where more differs, or there is no audit.
    """
    try:
        audit = AUDIT.read(out)
    except GradveilError:
        return ""
    there, here = ({c["folder"]: c for c in some["cases"]} for some in (audit, settings))
    alone = {
        "there": [case for name, case in there.items() if name not in here],
        "here": [case for name, case in here.items() if name not in there],
    }
    if not any(alone.values()) or differences({**audit, "cases": settings["cases"]}, settings):
        return ""
    names = "; ".join(
        f"only {side}: {shown(', '.join(case['folder'] for case in some), SHORT)}"
        for side, some in alone.items()
        if some
    )
    do = "choose another --out"
    if not all(alone.values()) and all(c.get("control") for some in alone.values() for c in some):
        more = bool(alone["there"])
        do = f"go on {'without' if more else 'with'} --no-control (control={more}), or {do}"
    return f"{shown(out)} holds an audit of other cases ({names}): {do}"


def refuse_too_few(job: AuditJob, root: Path | None) -> None:
    """Refuse an audit whose defenses were scored on too many of its images.

    For jobs that make something before they audit it.
    """
    if job.scored_on and job.first is None:
        split, _, _ = _splits(job, root)
        refuse_few_unscored(split, job.images, find_scored(split, job.scored_on))


def _choose_victims(job: AuditJob, split: Images) -> Victims:
    """Draw the victims from images that no search chose a defense by.

    Images from `first` on are taken as they are, and those that a search has used are counted.
    """
    scored = find_scored(split, job.scored_on)
    if job.first is None:
        refuse_few_unscored(split, job.images, scored)
    apart = (*job.apart, *scored)
    found = find_victims(split, job.images, job.batch_size, job.first, job.seed, apart=apart)
    return replace(found, scored=len({*found.numbers.tolist()} & {*scored}))


def fitted_to(prepared: Prepared, minutes: float) -> Prepared:
    """Return the audit with the share of all iterations that fits into so many minutes."""
    stages = [*prepared.positives, *(case.stage for case in prepared.cases)]
    costs = Costs.of(stages, {})
    share = costs.fit(stages, minutes)
    job = replace(prepared.job, share=share)
    cases = []
    for case in prepared.cases:
        stage = case.stage.with_attacks(shorter(case.stage.attacks, share))
        settings = case.settings | {"share": share, **_described(stage.attacks)}
        cases.append(replace(case, stage=stage, settings=settings))
    settings = prepared.settings | {"share": share}
    return replace(prepared, job=job, cases=tuple(cases), settings=settings, costs=costs)


def foreseen_seconds(job: AuditJob, out: Path, root: Path | None, device: torch.device) -> float:
    """Return about how long the cases of an audit take, each run by itself, one after the other.

    The first case is prepared and its attacks are timed; the others are taken to cost as much.
    """
    began = time.perf_counter()
    prepared = prepare(job, out, root, device, only=0)
    preparing = time.perf_counter() - began
    stages = prepared.positives + [prepared.cases[0].stage] * len(job.cases)
    return preparing * len(job.cases) + Costs.of(stages, {}).total(stages)


def least_minutes(
    job: AuditJob, out: Path, root: Path | None, device: torch.device, minutes: float
) -> float:
    """Return about the smallest budget in which each attack makes an iteration.

    The first case is prepared, and the others are taken to be like it. Where that comes near the
    `minutes` there are, each of them is prepared.
    """
    prepared = prepare(job, out, root, device, only=0)
    stages = prepared.positives + [prepared.cases[0].stage] * len(job.cases)
    costs = Costs.of(stages, {})
    least = costs.least(stages)
    if NEAR * least < minutes or len(job.cases) == 1:
        return least
    prepared = prepare(job, out, root, device)
    stages = [*prepared.positives, *(case.stage for case in prepared.cases)]
    return Costs.of(stages, costs.seconds).least(stages)


def _splits(job: AuditJob, root: Path | None) -> tuple[Images, Images | None, Images]:
    """Return the victims' split, public images, and images to measure accuracy on."""
    if isinstance(job.data, Images):
        split, public, test = job.data, job.public, job.data
        if job.recorded is not None and public is not None:
            test = public  # the others are training images, of the victims' classes alone
    else:
        split, train, test = (
            load(job.data, name, root=root, image_size=job.image_size, channels=job.channels)
            for name in (job.split, "train", "test")
        )
        public = train if job.public is None else job.public
    if public is not None and public.images.shape[1:] != split.images.shape[1:]:
        theirs, ours = (tuple(some.images.shape[1:]) for some in (public, split))
        raise GradveilError(f"public: images of shape {theirs}; those attacked have {ours}")
    if job.public is not None:
        public = as_images(job.public, name="public", classes=len(split.classes))
    return split, public, test


def _prepare_case(
    job: AuditJob, case: Case, stage: Stage, device: torch.device, folder: Path
) -> PreparedCase:
    settings = (
        job.settings()
        | {"format": FORMAT, "changes_images": case.changes_images}
        | {name: value for name, value in case.plain().items() if name != "folder"}
        | _facts(stage, device)
        | ({"note": job.note} if job.note else {})
    )
    if (comes_with := case.defense.control) not in (None, case.defense):
        settings["comes_with"] = str(comes_with)
    if (folder / SETTINGS).is_file():
        kept = CASE.read(folder)
        left_out = {name: str(reason) for name, reason in dict(kept.get("left_out", {})).items()}
        stage = stage.without(left_out)
        settings |= {name: kept.get(name) for name in KEPT}
        CASE.refuse_other(folder, settings | {"attacks": _written(stage.attacks)})
        return PreparedCase(case, stage, kept)
    stage, left_out = stage.fitted()
    tried = {
        **_described(stage.attacks),
        "left_out": left_out,
        "knows": stage.knows(),
        "protected": stage.client.protected,
    }
    return PreparedCase(case, stage, settings | tried)


def _written(attacks: Mapping[str, Attack]) -> dict[str, str]:
    """Return the attacks' settings as text."""
    return {name: repr(attack) for name, attack in attacks.items()}


def _described(attacks: Mapping[str, Attack]) -> dict[str, dict[str, str]]:
    """Return the attacks' settings, and the restarts and steps of those that search."""
    searches = {
        name: ", ".join(
            f"{rows} x {steps:,}"
            for rows, steps in attack.race.stages(attack.restarts, attack.steps)
        )
        for name, attack in attacks.items()
        if isinstance(attack, GradientMatching)
    }
    return {"attacks": _written(attacks), "searches": searches}


@contextmanager
def naming(case: Case, cases: int) -> Iterator[None]:
    """Let an error name the case where there are several."""
    try:
        yield
    except GradveilError as error:
        text = str(error)
        if cases == 1 or f"defense {case.defense}" in text:
            raise
        raise GradveilError(f"defense {case.defense}: {text}") from error


def _digest(images: Images | None) -> str | None:
    if images is None:
        return None
    return digest({"images": images.images, "labels": images.labels})


def _facts(stage: Stage, device: torch.device) -> dict[str, Any]:
    """Return digests of weights and images, so that a changed file is noticed; and the machine."""
    split, victims = stage.split, stage.victims
    chosen = {"images": split.images[victims.numbers], "labels": split.labels[victims.numbers]}
    scored = {"victims_scored": victims.scored} if victims.scored else {}
    return scored | {
        "weights_sha256": digest(stage.client.model.state_dict()),
        "images_sha256": digest(chosen),
        "candidates": count_candidates(victims),
        "no_lineup": victims.reason,
        "passed_over": dict(victims.passed_over),
        "guess": dict(stage.controls.chosen),
        "class_names": _class_names(split, victims),
        "versions": {
            "gradveil": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def _class_names(split: Images, victims: Victims) -> dict[str, str]:
    """Return the names of the victims' classes, by label."""
    labels = sorted({*split.labels[victims.numbers].flatten().tolist()})
    return {str(label): split.classes[label] for label in labels}


def count_candidates(victims: Victims) -> int:
    """Count the candidates of each line-up; 0 where there are none."""
    return 0 if victims.lineups is None else victims.lineups.size
