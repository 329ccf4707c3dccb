"""The audit: prepare and try out every case once, then attack it chunk by chunk."""

import hashlib
import json
import math
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gradveil import __version__
from gradveil.attacks import Attack
from gradveil.audits.job import AuditJob, Case, make_cases, name_attacks
from gradveil.audits.model import describe_model, facts_hold, save_facts
from gradveil.audits.outcomes import (
    Outcome,
    blind_guesses,
    lost,
    make_pictures,
    make_records,
    outcomes,
    ranked,
)
from gradveil.audits.records import (
    RECORDS,
    Key,
    append,
    images_path,
    recover,
    release,
    save_images,
    whole_chunks,
)
from gradveil.audits.results import AUDIT, CASE, FORMAT, AuditResult, CaseResult
from gradveil.audits.stage import (
    GRADIENTS,
    NOISY,
    Stage,
    Victim,
    make_stage,
    positive_stages,
    run_attack,
)
from gradveil.audits.victims import Victims, find_victims
from gradveil.checks.doctor import before_audit
from gradveil.clients import Client
from gradveil.controls import Controls
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, kind_of
from gradveil.core.files import digest
from gradveil.core.importing import RAISED
from gradveil.core.job_folder import SETTINGS, claim, remove_empty
from gradveil.core.locks import alone, held, refuse_held
from gradveil.core.progress import Bar
from gradveil.core.seeds import generator
from gradveil.core.types import Protocol, Reconstruction
from gradveil.data import Images, load
from gradveil.data.images import as_images
from gradveil.defenses import Defense, as_defense
from gradveil.engine.device import find_device
from gradveil.transforms import Policy

LOOKED_AT = 4  # victims, for what should be known before an audit
AUDITING = "auditing into"  # for who finds the folder held

TRIED = ("left_out", "knows", "protected")
"""Settings of a case that are known only after its attacks were tried out."""


@public
def audit(
    model: nn.Module | str,
    images: Any,
    labels: Any = None,
    *,
    public: Any = None,
    defenses: Sequence[Defense | Policy | str] = ("none",),
    attacks: Sequence[str | Attack | tuple[str, Attack]] = ("auto",),
    checkpoint: str | Path | None = None,
    victims: int | None = None,
    first: int | None = None,
    batch_size: int = 1,
    steps: int | None = None,
    restarts: int | None = None,
    know_labels: bool = True,
    train_mode: bool = False,
    local_steps: int = 1,
    local_lr: float = 0.01,
    clean: str = "no",
    classes: int | None = None,
    sham: bool = True,
    seed: int = 0,
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
) -> AuditResult:
    """Attack what clients with these images would share, under every defense, beside controls.

    `model` is any module on images in [0, 1], or a name such as lenet. `images` are a tensor
    (N, C, H, W), with their `labels`, a DataLoader or data set of such pairs, `Images`, or the
    name of a data set, whose test split is meant. `public` are images of the same kind that anyone
    may have, as a pair of tensors or in any of those forms: without them a blind guess is noise or
    gray. `victims` says how many images are attacked, drawn over all classes: all that are given,
    or 8 of a named data set; `first` takes them from that image on. The result lies in `out`, a new
    temporary folder by default; a folder with the same audit is gone on with. `gradveil audit
    --help` explains the rest.
    """
    given = _several(defenses, "defenses", "prune:0.95")
    found = [as_defense(defense, "defenses") for defense in given]
    auto, named = name_attacks(_several(attacks, "attacks", "dlg"))
    root = None if data_root is None else Path(data_root)
    data = _victims(images, labels, model, classes)
    others = _public(public, root)
    job = AuditJob(
        model,
        data,
        named,
        auto,
        make_cases(
            found, checkpoints={} if checkpoint is None else {"": Path(checkpoint)}, clean=clean
        ),
        _count(data, first, batch_size) if victims is None else victims,
        others,
        batch_size=batch_size,
        steps=steps,
        restarts=restarts,
        labels="known" if know_labels else "inferred",
        protocol=Protocol(local_steps, local_lr, train_mode),
        first=first,
        sham=sham,
        seed=seed,
    )
    if out is not None:
        return run_audit(job, Path(out), root=root, device=device, progress=progress)
    folder = Path(tempfile.mkdtemp(prefix="gradveil-audit-"))
    try:
        return run_audit(job, folder, root=root, device=device, progress=progress)
    finally:
        remove_empty(folder)  # where nothing could be audited


def _several(values: object, name: str, example: str) -> Sequence[Any]:
    """Return the values of an argument that takes a list, or refuse it."""
    if isinstance(values, list | tuple):
        return values
    raise GradveilError(f"{name}: {kind_of(values)}; expected a list, such as [{example!r}]")


def _victims(images: Any, labels: Any, model: nn.Module | str, classes: int | None) -> Images | str:
    """Return the images to attack, with as many classes as the model has logits, or their name."""
    if isinstance(images, str):
        if labels is not None or classes is not None:
            given = "classes" if labels is None else "labels"
            raise GradveilError(f"{given}: the data set {images[:100]} has its own; leave them out")
        return images
    found = as_images(images, labels, name="images", classes=classes)
    if classes is None and isinstance(model, nn.Module) and not isinstance(images, Images):
        count = Client(model).count_classes(found.images[:1].float() / 255)
        found = as_images(found, name="images", classes=count)
    return found


def _public(public: Any, root: Path | None) -> Images | None:
    """Return the public images; the name of a data set stands for its training split."""
    if isinstance(public, str):
        return load(public, "train", root=root)
    return None if public is None else as_images(public, name="public")


def _count(data: Images | str, first: int | None, batch_size: int) -> int:
    """Count the images to attack by default: 8 of a named data set, else all that are given."""
    most = 8 if isinstance(data, str) else len(data) - (first or 0)
    size = max(batch_size, 1)  # the job refuses less
    return max(most // size, 1) * size


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
    AUDIT.refuse_other(out, settings)
    split, public, test = _splits(job, root)
    victims = find_victims(split, job.images, job.batch_size, job.first, job.seed, apart=job.apart)
    guesses: dict[str, Controls] = {}
    numbers = range(len(job.cases)) if only is None else [only]
    cases = []
    for number in numbers:
        case = job.cases[number]
        with _naming(case, len(job.cases)):
            before = case.before_gradients
            if str(before) not in guesses:
                guesses[str(before)] = Controls.of(public, before, job.batch_size, job.seed)
            stage = make_stage(job, case, split, victims, guesses[str(before)], device)
            cases.append(_prepare_case(job, case, stage, device, out / case.folder))
    plain = guesses.get("none") or Controls.of(public, Defense(), 1, job.seed)
    return Prepared(job, device, test, settings, tuple(cases), plain)


def _splits(job: AuditJob, root: Path | None) -> tuple[Images, Images | None, Images]:
    """Return the victims' split, public images, and images to measure accuracy on."""
    if isinstance(job.data, Images):
        split, public, test = job.data, job.public, job.data
    else:
        split, train, test = (
            load(job.data, name, root=root, image_size=job.image_size)
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
    )
    if (folder / SETTINGS).is_file():
        kept = CASE.read(folder)
        left_out = {name: str(reason) for name, reason in dict(kept.get("left_out", {})).items()}
        stage = stage.without(left_out)
        settings |= {name: kept.get(name) for name in TRIED}
        CASE.refuse_other(folder, settings | {"attacks": _written(stage.attacks)})
        return PreparedCase(case, stage, kept)
    stage, left_out = stage.fitted()
    tried = {
        "attacks": _written(stage.attacks),
        "left_out": left_out,
        "knows": stage.knows(),
        "protected": stage.client.protected,
    }
    return PreparedCase(case, stage, settings | tried)


def _written(attacks: Mapping[str, Attack]) -> dict[str, str]:
    """Return the attacks' settings as text."""
    return {name: repr(attack) for name, attack in attacks.items()}


@contextmanager
def _naming(case: Case, cases: int) -> Iterator[None]:
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
    return {
        "weights_sha256": digest(stage.client.model.state_dict()),
        "images_sha256": digest(chosen),
        "candidates": _candidates(victims),
        "no_lineup": victims.reason,
        "guess": dict(stage.controls.chosen),
        "versions": {
            "gradveil": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def _candidates(victims: Victims) -> int:
    """Count the candidates of each line-up; 0 where there are none."""
    return 0 if victims.lineups is None else victims.lineups.size


@public
def run_audit(
    job: AuditJob,
    out: Path,
    *,
    root: Path | None = None,
    device: str = "auto",
    progress: bool = True,
    only: int | None = None,
) -> AuditResult:
    """Run the job into `out`, or go on where it stopped there; a finished audit is read back.

    Before anything is written every case is prepared. `only` runs one case, by its number, as
    machines do that share the cases of an audit; the result has the cases that are there.
    """
    if only is None:
        refuse_held(out, AUDITING)
    prepared = prepare(job, out, root, find_device(device), only)
    _look_first(prepared, out)
    # Machines that share the cases hold only the folder of theirs.
    with alone(out, AUDITING) if only is None else nullcontext():
        AUDIT.refuse_other(out, prepared.settings)  # another process may have been faster
        claim(out, prepared.settings, parts=(".*.part",))  # cases belong to their processes
        bar = Bar(progress)
        try:
            waits = only is not None
            runs = [_CaseRun(prepared, p, out / p.case.folder, bar, waits) for p in prepared.cases]
            total = sum(run.left for run in runs)
            bar.start("audit", total)
            for run in runs:
                with _naming(run.case.case, len(job.cases)):
                    run.go()
        except RAISED:
            if not any((out / case.folder).exists() for case in job.cases):
                (out / SETTINGS).unlink(missing_ok=True)
                remove_empty(out)
            raise
        finally:
            bar.stop()
    return AuditResult.read(out)


def _look_first(prepared: Prepared, out: Path) -> None:
    """Warn of faults that would make the figures of a case misleading, before it has any."""
    for prepared_case in prepared.cases:
        if (out / prepared_case.case.folder / RECORDS).is_file():
            continue
        stage = prepared_case.stage
        few = stage.batches(stage.chunks[0][:LOOKED_AT])
        before_audit(stage.client, few, labels=prepared.job.known, seed=prepared.job.seed)


class _CaseRun:
    """A case that is attacked chunk by chunk into its folder.

    Another process that holds the folder is waited for where `waits`, else this one is refused: a
    cluster that lost a machine does its case again elsewhere, perhaps before it has ended there.
    """

    def __init__(
        self, prepared: Prepared, case: PreparedCase, out: Path, bar: Bar, waits: bool
    ) -> None:
        self.prepared, self.case, self.out, self.bar, self.waits = prepared, case, out, bar, waits
        self.experiment = experiment_id(case.settings)
        # The positive control depends on neither the model nor the defense: the first has it.
        job = prepared.job
        first = case.case is job.cases[0]
        proper = case.stage
        easy = positive_stages(job, proper, prepared.plain) if job.positive and first else []
        self.stages = [*easy, case.stage]
        self.sizes = {key: size for stage in self.stages for key, size in stage.sizes().items()}
        self.done = {record.key for record in whole_chunks(out / RECORDS, self.sizes)}
        self.left = sum(
            _work(attack, self.sizes[key])
            for stage in self.stages
            for number in range(len(stage.chunks))
            for key, attack in stage.rows(number)
            if key not in self.done
        )

    def go(self) -> None:
        """Attack the chunks that are left; a failure gives back a folder without records."""
        with held(self.out, lambda _: None) if self.waits else alone(self.out, AUDITING):
            CASE.refuse_other(self.out, self.case.settings)
            # From here on no other process writes: the torn end that a killed run left can be cut
            # off, and chunks that another process did meanwhile are not done again.
            claim(self.out, self.case.settings)
            self.done = {record.key for record in recover(self.out / RECORDS, self.sizes)}
            try:
                self._describe()
                for stage in self.stages:
                    for number in range(len(stage.chunks)):
                        keys = {*(key for key, _ in stage.rows(number)), *stage.bars(number)}
                        if keys - self.done:
                            self.chunk(stage, number)
                self.close(self.case.stage)
            except RAISED:
                release(self.out)
                raise

    def _describe(self) -> None:
        """Write the facts of the model, before any record."""
        prepared, case = self.prepared, self.case.case
        if not facts_hold(self.out, self.case.settings.get("weights_sha256", "")):
            victims = self.case.stage.victims.numbers
            facts = describe_model(prepared.job, case, prepared.test, victims, prepared.device)
            save_facts(self.out, facts)

    def chunk(self, stage: Stage, number: int) -> None:
        """Share, guess blindly and attack; write the records and pictures of each attack.

        The controls are cheap, and every attack is measured by them, so they are made again where
        only an attack is missing.
        """
        victims = stage.lined_up(stage.share(stage.chunks[number]))
        controls = self._guesses(stage, victims, number)
        guesses = _chosen(stage, victims, controls)
        for key, attack in stage.rows(number):
            if key in self.done:
                continue
            kind, name, _ = key
            if kind == "blind":
                found, seconds = controls[name]
            else:
                seen = stage.seen_by(attack, victims)
                rng = generator(stage.seed, *key)
                found, seconds = _timed(attack, seen, rng, self._step(key, attack))
            made = ranked(outcomes(victims, found), generator(stage.seed, "lot", *key))
            self._write(stage, key, made, guesses, seconds)
            self.bar.advance(_work(attack, self.sizes[key]))
        for key in stage.bars(number):
            if key not in self.done:
                made = outcomes(victims, [_under_draws(stage, v) for v in victims if v.seen])
                made = ranked(made, generator(stage.seed, "lot", *key))
                self._write(stage, key, made, guesses, 0.0)

    def close(self, stage: Stage) -> None:
        """Make the sham and the ceilings, which follow the strongest attack so far."""
        left = [key for key in stage.closing if key not in self.done]
        if not left:
            return
        strongest = CaseResult.read(self.out).strongest
        victims = stage.lined_up(stage.share(stage.first_victims))
        guesses = _chosen(stage, victims, self._guesses(stage, victims, 0))
        for key in left:
            kind, name, _ = key
            started = time.perf_counter()
            lot = generator(stage.seed, "lot", *key)
            if kind == "sham":
                self.bar.update(what=f"sham of {strongest.attack}")
                attack = stage.attacks[strongest.attack]
                shams = stage.shams(victims)
                seen = stage.seen_by(attack, shams)
                found = run_attack(attack, seen, generator(stage.seed, *key))
                made = ranked(outcomes(shams, found), lot)
            elif name == NOISY:
                made = ranked(self._noisy(stage, victims, strongest.attack, strongest.truth), lot)
            else:
                assert name == GRADIENTS
                made = [_nearest(stage, victim, lot) for victim in victims]
            self._write(stage, key, made, guesses, time.perf_counter() - started)

    def _noisy(
        self, stage: Stage, victims: Sequence[Victim], attack: str, truth: str
    ) -> list[Outcome]:
        """Return the true pictures with noise of the size of an attack's error."""
        errors = {
            record.image: record.scores[truth]["mse"]
            for record in CaseResult.read(self.out).of("attack", attack)
            if record.ok
        }
        rng = generator(stage.seed, "ceiling", "noise")
        made = []
        for victim in victims:
            if victim.seen is None or any(int(i) not in errors for i in victim.indices):
                made.append(lost(victim, "the attack found nothing to take the noise from"))
                continue
            true = victim.used if truth == "used" else victim.original.images
            size = torch.tensor([errors[int(i)] ** 0.5 for i in victim.indices])
            noise = torch.randn(true.shape, generator=rng) * size[:, None, None, None]
            images = (true + noise).clamp(0, 1)
            made.append(Outcome(victim, "ok", images, [None] * len(images)))
        return made

    def _guesses(
        self, stage: Stage, victims: Sequence[Victim], number: int
    ) -> dict[str, tuple[list[Reconstruction], float]]:
        """Return what each control guesses of these victims, and the seconds that it took."""
        told = [victim.told() for victim in victims if victim.seen is not None]
        return {
            name: _timed(blind, told, generator(stage.seed, "blind", name, number))
            for name, blind in stage.controls.attacks.items()
        }

    def _write(
        self,
        stage: Stage,
        key: Key,
        made: Sequence[Outcome],
        guesses: Mapping[str, Tensor],
        seconds: float,
    ) -> None:
        """Write the pictures, then the records, which make them count."""
        tensors, facts = make_pictures(made, with_frames=key[2] == 0)
        save_images(images_path(self.out, *key), tensors, facts)
        size = _candidates(stage.victims)
        append(self.out / RECORDS, make_records(made, guesses, size, self.experiment, key, seconds))

    def _step(self, key: Key, attack: Attack) -> Any:
        kind, name, chunk = key
        said = f"positive control {name}" if kind == "positive" else f"{name}, chunk {chunk + 1}"
        self.bar.update(what=said, news=str(self.case.case.defense))
        work = _work(attack, self.sizes[key])

        def step(done: int, of: int) -> None:
            self.bar.preview(work * done / max(of, 1))

        return step


def _chosen(
    stage: Stage,
    victims: Sequence[Victim],
    controls: Mapping[str, tuple[list[Reconstruction], float]],
) -> dict[str, Tensor]:
    """Return the guess that gains are measured from, by truth."""
    chosen = stage.controls.chosen
    return {truth: blind_guesses(victims, controls[name][0]) for truth, name in chosen.items()}


def _under_draws(stage: Stage, victim: Victim) -> Reconstruction:
    """Return the class means of public images, put through the victim's draws."""
    means = stage.controls.means
    assert means is not None
    labels = victim.original.labels
    made = [
        stage.under_draws(victim, row, means[[label]].to(victim.used))
        for row, label in enumerate(labels.tolist())
    ]
    return Reconstruction(torch.cat(made), labels, math.inf)


def _nearest(stage: Stage, victim: Victim, rng: Generator) -> Outcome:
    """Return the candidates whose gradients are nearest to the one observed, with their ranks."""
    if victim.seen is None:
        return lost(victim, victim.status)
    try:
        ranks, images = stage.rank_gradients(victim, rng)
    except GradveilError as error:
        return lost(victim, str(error))
    both = {"used": ranks, "original": ranks}
    return Outcome(victim, "ok", images, [None] * len(images), ranks=both)


def _work(attack: Attack, images: int) -> float:
    """Return iterations times images, by which the bar moves."""
    return float(getattr(attack, "steps", 1) * getattr(attack, "restarts", 1) * images)


def _timed(
    attack: Attack, seen: Any, rng: Any, step: Any = None
) -> tuple[list[Reconstruction], float]:
    """Return the reconstructions, and the seconds that they took."""
    started = time.perf_counter()
    found = run_attack(attack, seen, rng, step)
    return found, time.perf_counter() - started


def experiment_id(settings: Mapping[str, Any]) -> str:
    """Return readable names with a digest of all settings, which decide the result."""
    whole = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()
    return f"{settings['data']}/{settings['model']}/{settings['defense']}/{whole[:12]}"
