"""The audit: every case is prepared and tried out once, then attacked into its folder, or on from where it stopped."""

import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil import __version__
from gradveil.attacks import Attack
from gradveil.audits.job import AuditJob, Case, make_cases, name_attacks
from gradveil.audits.model import MODEL, describe_model, save_facts
from gradveil.audits.records import (
    RECORDS,
    Key,
    Record,
    append,
    finite,
    images_path,
    recover,
    release,
    save_images,
)
from gradveil.audits.results import AUDIT, FORMAT, AuditResult
from gradveil.audits.stage import (
    CANDIDATES,
    Candidates,
    Controls,
    Stage,
    Victim,
    make_stage,
    positive_stages,
    run_attack,
)
from gradveil.checks.doctor import before_audit
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.files import digest
from gradveil.core.job_folder import SETTINGS, claim, locked, remove_empty
from gradveil.core.progress import Bar
from gradveil.core.seeds import generator
from gradveil.core.types import Protocol, Reconstruction
from gradveil.data import Images, load
from gradveil.data.images import as_images
from gradveil.defenses import Defense, parse
from gradveil.engine.device import find_device
from gradveil.scores import mse, over_blind, psnr, psnr_affine, ssim

LOOKED_AT = 4  # victims, for what should be known before an audit
MOVING = 4  # images whose frames are kept
CEILING = 200.0
"""In dB: an exact copy would be infinite, which JSON cannot hold and a mean cannot bear."""

TRIED = ("attacks", "left_out", "knows", "protected")
"""Settings of a case that are known only after its attacks were tried out."""


def audit(
    model: nn.Module | str,
    images: Any,
    labels: Tensor | None = None,
    *,
    public: Any = None,
    defenses: Sequence[Defense | str] = ("none",),
    attacks: Sequence[str | Attack | tuple[str, Attack]] = ("auto",),
    checkpoint: str | Path | None = None,
    victims: int | None = None,
    first: int = 0,
    batch_size: int = 1,
    steps: int | None = None,
    restarts: int | None = None,
    know_labels: bool = True,
    train_mode: bool = False,
    local_steps: int = 1,
    local_lr: float = 0.01,
    clean: str = "no",
    classes: int | None = None,
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
    gray. `victims` says how many images are attacked: all that are given, or 8 of a named data
    set. The result lies in `out`, a new temporary folder by default; a folder with the same audit
    is gone on with. See `gradveil audit --help` for what the rest means.
    """
    found = [defense if isinstance(defense, Defense) else _parsed(defense) for defense in defenses]
    auto, named = name_attacks(attacks)
    paths = {} if checkpoint is None else {"": Path(checkpoint)}
    data: Images | str = images if isinstance(images, str) else _own(images, labels, model, classes)
    others = None
    if public is not None and not isinstance(data, str):
        count = len(data.classes)
        others = as_images(public, name="public", classes=count, mean=data.mean, std=data.std)
    count = 8 if isinstance(data, str) else (len(data) - first) // batch_size * batch_size
    job = AuditJob(
        model,
        data,
        named,
        auto,
        make_cases(found, checkpoints=paths, clean=clean),
        count if victims is None else victims,
        others,
        batch_size=batch_size,
        steps=steps,
        restarts=restarts,
        labels="known" if know_labels else "inferred",
        protocol=Protocol(local_steps, local_lr, train_mode),
        first=first,
        seed=seed,
    )
    folder = Path(tempfile.mkdtemp(prefix="gradveil-audit-")) if out is None else Path(out)
    root = None if data_root is None else Path(data_root)
    return run_audit(job, folder, root=root, device=device, progress=progress)


def _parsed(defense: object) -> Defense:
    if not isinstance(defense, str):
        raise GradveilError(
            f"defenses: a {type(defense).__name__}; expected a Defense or its name, such as "
            "prune:0.95"
        )
    return parse(defense)


def _own(images: Any, labels: Tensor | None, model: nn.Module | str, classes: int | None) -> Images:
    """A user's images, with as many classes as the model has logits."""
    if isinstance(images, Images):
        return images
    found = as_images(images, labels, name="images", classes=classes)
    if classes is None and isinstance(model, nn.Module):
        count = Client(model).count_classes(found.images[:1].float() / 255)
        found = as_images(images, labels, name="images", classes=count)
    return found


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


def prepare(
    job: AuditJob, out: Path, root: Path | None, device: torch.device, only: int | None = None
) -> Prepared:
    """Load what the job names and try out every attack on every case. Nothing is written.

    A case that `out` holds already is not tried again. `only` prepares one case, by its number.
    """
    job = job.on(device)
    settings = job.settings() | {
        "format": FORMAT,
        "attacks": [*(["auto"] if job.auto else []), *map(str, job.attacks)],
        "cases": [case.plain() for case in job.cases],
    }
    AUDIT.refuse_other(out, settings)
    split, public, test = _splits(job, root)
    controls = Controls.of(public)
    numbers = range(len(job.cases)) if only is None else [only]
    cases = []
    for number in numbers:
        case = job.cases[number]
        with _naming(case, len(job.cases)):
            cases.append(_prepare_case(job, case, split, controls, device, out / case.folder))
    return Prepared(job, device, test, settings, tuple(cases))


def _splits(job: AuditJob, root: Path | None) -> tuple[Images, Images | None, Images]:
    """The victims' split, public images, and images to measure accuracy on."""
    if isinstance(job.data, Images):
        return job.data, job.public, job.data
    named = [
        load(job.data, name, root=root, image_size=job.image_size)
        for name in (job.split, "train", "test")
    ]
    return named[0], job.public or named[1], named[2]


def _prepare_case(
    job: AuditJob,
    case: Case,
    split: Images,
    controls: Controls,
    device: torch.device,
    folder: Path,
) -> PreparedCase:
    stage = make_stage(job, case, split, controls, device)
    settings = (
        job.settings()
        | {"format": FORMAT, "changes_images": case.changes_images}
        | {name: value for name, value in case.plain().items() if name != "folder"}
        | _facts(stage, device)
    )
    if (folder / SETTINGS).is_file():
        kept = AUDIT.read(folder)
        AUDIT.refuse_other(folder, settings | {name: kept.get(name) for name in TRIED})
        left_out = {name: str(reason) for name, reason in dict(kept.get("left_out", {})).items()}
        return PreparedCase(case, stage.without(left_out), kept)
    stage, left_out = stage.fitted()
    tried = {
        "attacks": {name: repr(attack) for name, attack in stage.attacks.items()},
        "left_out": left_out,
        "knows": stage.knows(),
        "protected": stage.client.protected,
    }
    return PreparedCase(case, stage, settings | tried)


@contextmanager
def _naming(case: Case, cases: int) -> Iterator[None]:
    """Let an error name the case where there are several."""
    try:
        yield
    except GradveilError as error:
        text = str(error)
        if cases == 1 or str(case.defense) in text:
            raise
        raise GradveilError(f"defense {case.defense}: {text}") from error


def _facts(stage: Stage, device: torch.device) -> dict[str, Any]:
    """What the names stand for, so that a changed file is another experiment; and the machine."""
    split, victims = stage.split, stage.victims
    chosen = {"images": split.images[victims], "labels": split.labels[victims]}
    return {
        "weights_sha256": digest(stage.client.model.state_dict()),
        "images_sha256": digest(chosen),
        "candidates": min(len(split), max(CANDIDATES, len(victims))),
        "versions": {
            "gradveil": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def run_audit(
    job: AuditJob,
    out: Path,
    *,
    root: Path | None = None,
    device: str = "auto",
    progress: bool = True,
    only: int | None = None,
) -> AuditResult:
    """Run the job into `out`, or go on where it stopped there; one that is done is read back.

    Before anything is written every case is prepared. `only` runs one case, by its number, as
    machines do that share the cases of an audit; the result has the cases that are there.
    """
    prepared = prepare(job, out, root, find_device(device), only)
    if not all((out / p.case.folder / RECORDS).is_file() for p in prepared.cases):
        _look_first(prepared)
    claim(out, prepared.settings)
    bar = Bar(progress)
    try:
        runs = [_CaseRun(prepared, p, out / p.case.folder, bar) for p in prepared.cases]
        total = sum(run.left for run in runs)
        bar.start("audit", total)
        for run in runs:
            run.go()
    except Exception:
        if not any((out / case.folder).exists() for case in job.cases):
            (out / SETTINGS).unlink(missing_ok=True)
            remove_empty(out)
        raise
    finally:
        bar.stop()
    return AuditResult.read(out)


def _look_first(prepared: Prepared) -> None:
    """Warn of what would make the figures misleading."""
    for prepared_case in prepared.cases:
        stage = prepared_case.stage
        few = stage.batches(stage.chunks[0][:LOOKED_AT])
        before_audit(stage.client, few, labels=prepared.job.known, seed=prepared.job.seed)


class _CaseRun:
    """One case, attacked chunk by chunk into its folder."""

    def __init__(self, prepared: Prepared, case: PreparedCase, out: Path, bar: Bar) -> None:
        self.prepared, self.case, self.out, self.bar = prepared, case, out, bar
        self.experiment = experiment_id(case.settings)
        # The positive control depends on neither the model nor the defense: the first has it.
        job = prepared.job
        first = case.case is job.cases[0]
        easy = positive_stages(job, case.stage) if job.positive and first else []
        self.stages = [*easy, case.stage]
        sizes = {key: size for stage in self.stages for key, size in stage.sizes().items()}
        self.sizes = sizes
        done = {r.key for r in recover(out / RECORDS, sizes)}
        self.done = done
        self.left = sum(
            _work(attack, sizes[key])
            for stage in self.stages
            for number in range(len(stage.chunks))
            for key, attack in stage.rows(number)
            if key not in done
        )

    def go(self) -> None:
        """Do what is left; a failure gives the folder back unless it holds records."""
        claim(self.out, self.case.settings)
        with _alone(self.out):
            try:
                for stage in self.stages:
                    for number in range(len(stage.chunks)):
                        if any(key not in self.done for key, _ in stage.rows(number)):
                            self.chunk(stage, number)
            except Exception:
                release(self.out)
                raise
        if not (self.out / MODEL).is_file():
            prepared = self.prepared
            case = self.case.case
            found = describe_model(prepared.job, case, prepared.test, prepared.device)
            save_facts(self.out, found)
        for stage in self.stages:
            vars(stage).pop("candidates", None)  # as large as a thousand images, twice

    def chunk(self, stage: Stage, number: int) -> None:
        """Share, guess blindly and attack; write the records and pictures of each attack.

        The controls are cheap, and all else is measured by them, so they are made again where
        only an attack is missing.
        """
        victims = stage.share(stage.chunks[number])
        told = [victim.told() for victim in victims if victim.seen is not None]
        controls = {
            name: _timed(blind, told, generator(stage.seed, "blind", name, number))
            for name, blind in stage.controls.attacks.items()
        }
        guesses = blind_guesses(victims, [found for found, _ in controls.values()])
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
            made = outcomes(victims, found)
            tensors, facts = pictures(made, with_frames=number == 0)
            save_images(images_path(self.out, *key), tensors, facts)
            candidates, experiment = stage.candidates, self.experiment
            append(
                self.out / RECORDS,
                make_records(made, guesses, candidates, experiment, key, seconds),
            )
            self.bar.advance(_work(attack, self.sizes[key]))

    def _step(self, key: Key, attack: Attack) -> Any:
        kind, name, chunk = key
        said = f"positive control {name}" if kind == "positive" else f"{name}, chunk {chunk + 1}"
        self.bar.update(what=said, news=str(self.case.case.defense))
        work = _work(attack, self.sizes[key])

        def step(done: int, of: int) -> None:
            self.bar.preview(work * done / max(of, 1))

        return step


def _work(attack: Attack, images: int) -> float:
    """Iterations times images, so that parts of any size move the bar alike."""
    return float(getattr(attack, "steps", 1) * getattr(attack, "restarts", 1) * images)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold a case's folder while no other process audits into it."""

    def refuse() -> None:
        raise GradveilError(
            f"another process is auditing into {out}: wait for it, or choose another --out"
        )

    with locked(out / SETTINGS, refuse):
        yield


def _timed(
    attack: Attack, seen: Any, rng: Any, step: Any = None
) -> tuple[list[Reconstruction], float]:
    """What the attack found, and the seconds that took."""
    started = time.perf_counter()
    found = run_attack(attack, seen, rng, step)
    return found, time.perf_counter() - started


def experiment_id(settings: Mapping[str, Any]) -> str:
    """Names that can be read, and a digest of everything that decides the result."""
    whole = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()
    return f"{settings['data']}/{settings['model']}/{settings['defense']}/{whole[:12]}"


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one victim's reconstruction came to, in the order of the victim's images."""

    victim: Victim
    status: str
    images: Tensor
    labels: list[int | None]
    distance: float | None = None
    frames: Tensor | None = None  # (images, frames, C, H, W)
    frame_steps: tuple[int, ...] = ()


def outcomes(victims: Sequence[Victim], found: Sequence[Reconstruction]) -> list[Outcome]:
    """What became of each victim; `found` are of those that shared something, in order."""
    left = iter(found)
    return [
        _outcome(victim, next(left)) if victim.seen is not None else _lost(victim, victim.status)
        for victim in victims
    ]


def _outcome(victim: Victim, found: Reconstruction) -> Outcome:
    if found.status != "ok":
        return _lost(victim, found.status)
    if not bool(found.images.isfinite().all()):
        return _lost(victim, "failed: the reconstruction holds values that are not finite")
    images, labels, order = victim.aligned(found)
    frames = None
    if found.frames is not None:
        frames = found.frames.detach().cpu()[:, order].transpose(0, 1).nan_to_num(0.5).clamp(0, 1)
    named: list[int | None] = [None] * len(images) if labels is None else labels.tolist()
    return Outcome(victim, "ok", images, named, finite(found.distance), frames, found.frame_steps)


def _lost(victim: Victim, status: str) -> Outcome:
    status = status if status.startswith("failed") else f"failed: {status}"
    black = torch.zeros_like(victim.used)
    return Outcome(victim, " ".join(status.split()), black, [None] * len(victim.indices))


def blind_guesses(victims: Sequence[Victim], found: Sequence[Sequence[Reconstruction]]) -> Tensor:
    """(images, controls, C, H, W), for the images whose victim shared something.

    `found` has one sequence for each control.
    """
    alive = [victim for victim in victims if victim.seen is not None]
    if not alive:
        return torch.empty(0, len(found), *victims[0].used.shape[1:])
    aligned = [
        [victim.aligned(guess)[0] for victim, guess in zip(alive, guesses, strict=True)]
        for guesses in found
    ]
    return torch.stack([torch.cat(images) for images in aligned], dim=1)


def make_records(
    made: Sequence[Outcome],
    guesses: Tensor,
    candidates: Candidates,
    experiment: str,
    key: Key,
    seconds: float,
) -> list[Record]:
    """One record for each image. `guesses` are those of `blind_guesses`."""
    good = [outcome for outcome in made if outcome.status == "ok"]
    scores = iter(_scores(good, guesses[_rows(made)], candidates))
    kind, name, chunk = key
    images = sum(len(outcome.images) for outcome in made)
    return [
        Record(
            experiment,
            kind,
            name,
            chunk,
            image=int(outcome.victim.indices[i]),
            status=outcome.status,
            label=int(outcome.victim.original.labels[i]),
            label_found=outcome.labels[i],
            distance=outcome.distance,
            candidates=len(candidates),
            chance=candidates.chance,
            scores=next(scores) if outcome.status == "ok" else {},
            seconds=seconds / images,
        )
        for outcome in made
        for i in range(len(outcome.images))
    ]


def _rows(made: Sequence[Outcome]) -> Tensor:
    """Where the good images stand among those whose victim shared something."""
    shared = [outcome for outcome in made if outcome.victim.seen is not None]
    flags = [outcome.status == "ok" for outcome in shared for _ in outcome.images]
    return torch.tensor(flags, dtype=torch.bool)


def _scores(
    good: Sequence[Outcome], guesses: Tensor, candidates: Candidates
) -> list[dict[str, dict[str, float]]]:
    """For each image and each truth, six numbers."""
    if not good:
        return []
    found = torch.cat([outcome.images for outcome in good])
    images = torch.cat([outcome.victim.indices for outcome in good])
    truths = {
        "used": torch.cat([outcome.victim.used for outcome in good]),
        "original": torch.cat([outcome.victim.original.images for outcome in good]),
    }
    tables = {
        truth: {
            "mse": mse(found, true),
            "psnr": psnr(found, true),
            "ssim": ssim(found, true),
            "psnr_affine": psnr_affine(found, true),
            "over_blind": over_blind(found, true, guesses),
            "identified": candidates.identified(truth, found, images, true),
        }
        for truth, true in truths.items()
    }
    plain = {
        truth: {name: v.clamp(-CEILING, CEILING).tolist() for name, v in table.items()}
        for truth, table in tables.items()
    }
    return [
        {truth: {name: v[i] for name, v in table.items()} for truth, table in plain.items()}
        for i in range(len(found))
    ]


def pictures(
    made: Sequence[Outcome], with_frames: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The images as uint8 and facts about them, to be saved."""
    tensors = {
        "original": torch.cat([outcome.victim.original.images for outcome in made]),
        "used": torch.cat([outcome.victim.used for outcome in made]),
        "found": torch.cat([outcome.images for outcome in made]),
    }
    facts: dict[str, Any] = {"images": [int(i) for o in made for i in o.victim.indices]}
    moving = [o for o in made if o.frames is not None] if with_frames else []
    if moving:
        tensors["frames"] = torch.cat([o.frames for o in moving if o.frames is not None])[:MOVING]
        facts["frame_images"] = [int(i) for o in moving for i in o.victim.indices][:MOVING]
        facts["frame_steps"] = list(moving[0].frame_steps)
    return {name: (tensor * 255).round().to(torch.uint8) for name, tensor in tensors.items()}, facts
