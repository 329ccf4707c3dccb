"""The audit itself: attacks a job's victims into a folder, or goes on where it stopped."""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradveil import __version__
from gradveil.audits.chunks import attacked, outcomes, pictures, records
from gradveil.audits.folders import alone, claim, images_path, refuse_other, release, save_images
from gradveil.audits.jobs import AuditJob
from gradveil.audits.progress import Bar
from gradveil.audits.records import RECORDS, Key, append, recover
from gradveil.audits.results import AuditResult
from gradveil.audits.stages import Stage, make_stage, positive_stages
from gradveil.audits.victims import blind_guesses
from gradveil.checks.doctor import before_audit
from gradveil.core.files import digest
from gradveil.core.seeds import generator
from gradveil.data import Images, load
from gradveil.engine.device import find_device

LOOKED_AT = 4  # victims, for what should be known before an audit


def audit(
    job: AuditJob,
    out: Path,
    *,
    root: Path | None = None,
    device: str = "auto",
    progress: bool = True,
) -> AuditResult:
    """Audit into `out`. A run that was stopped goes on after its last whole chunk; one that is done is read back."""
    place = find_device(device)
    job = job.on(place)
    split = load(job.data, job.split, root=root, image_size=job.image_size)
    train = load(job.data, "train", root=root, image_size=job.image_size)
    return run_audit(prepare(job, split, train, place), out, progress)


@dataclass(frozen=True, eq=False)
class Prepared:
    """An audit that can start. Its settings say which attacks were left out, and why."""

    job: AuditJob
    proper: Stage
    settings: dict[str, Any]


def prepare(job: AuditJob, split: Images, train: Images, place: torch.device) -> Prepared:
    """Nothing is written."""
    proper = make_stage(job, split, train, place)
    optional = job.optional()
    proper, left_out = proper.fitted(optional) if optional else (proper, {})
    attacks = {name: repr(attack) for name, attack in proper.attacks.items()}
    more = {
        "attacks": attacks,
        "left_out": left_out,
        "knows": proper.knows(),
        "protected": proper.client.protected,
    }
    return Prepared(job, proper, job.settings() | _facts(proper, place) | more)


def run_audit(prepared: Prepared, out: Path, progress: bool) -> AuditResult:
    """Into `out`, or on where it stopped there."""
    settings, proper = prepared.settings, prepared.proper
    refuse_other(out, settings)
    if not (out / RECORDS).is_file():
        for name in proper.attacks:
            proper.try_out(name)
        before_audit(
            proper.client,
            proper.batches(0)[:LOOKED_AT],
            labels=prepared.job.known,
            seed=prepared.job.seed,
        )
    stages = [*(positive_stages(prepared.job, proper) if prepared.job.positive else ()), proper]
    claim(out, settings)
    run = _Run(out, experiment_id(settings), Bar(progress))
    with alone(out):
        try:
            run.go(stages)
        except Exception:
            release(out)
            raise
        finally:
            run.bar.stop()
    return AuditResult.read(out)


@dataclass(frozen=True, eq=False)
class _Run:
    out: Path
    experiment: str
    bar: Bar

    def go(self, stages: list[Stage]) -> None:
        sizes = {key: size for stage in stages for key, size in stage.sizes().items()}
        done = {record.key for record in recover(self.out / RECORDS, sizes)}
        rows = [
            row
            for stage in stages
            for number in range(len(stage.chunks))
            for row in stage.rows(number)
        ]
        self.bar.start((attack, sizes[key]) for key, attack in rows if key not in done)
        for stage in stages:
            for number in range(len(stage.chunks)):
                if any(key not in done for key, _ in stage.rows(number)):
                    self.chunk(stage, number, done)

    def chunk(self, stage: Stage, number: int, done: set[Key]) -> None:
        """The controls are cheap, and all else is measured by them, so they are made again where only an attack is missing."""
        victims = stage.share(stage.chunks[number])
        told = [victim.told() for victim in victims if victim.seen is not None]
        controls = {
            name: attacked(blind, told, generator(stage.seed, "blind", name, number), None)
            for name, blind in stage.blinds.items()
        }
        guesses = blind_guesses(victims, [found for found, _ in controls.values()])
        images = sum(map(len, stage.chunks[number]))
        for key, attack in stage.rows(number):
            if key in done:
                continue
            self.bar.begin(key)

            def step(now: int, of: int, attack: Any = attack) -> None:
                self.bar.step(attack, images, now, of)

            kind, name, _ = key
            if kind == "blind":
                found, seconds = controls[name]
            else:
                found, seconds = attacked(
                    attack, stage.seen_by(attack, victims), generator(stage.seed, *key), step
                )
            made = outcomes(victims, found)
            save_images(images_path(self.out, *key), *pictures(made, with_frames=number == 0))
            append(
                self.out / RECORDS,
                records(made, guesses, stage.pool, self.experiment, key, seconds),
            )
            self.bar.finish(attack, images)


def experiment_id(settings: Mapping[str, Any]) -> str:
    """What can be read of it, and a digest of everything that decides the result."""
    whole = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()
    return f"{settings['data']}/{settings['model']}/{settings['defense']}/{whole[:12]}"


def _facts(stage: Stage, place: torch.device) -> dict[str, Any]:
    """Of what the names stand for, so that a changed file is another experiment; and of the machine."""
    indices = torch.cat([indices for chunk in stage.chunks for indices in chunk])
    return {
        "weights_sha256": digest(stage.client.model.state_dict()),
        "images_sha256": digest(
            {"images": stage.split.images[indices], "labels": stage.split.labels[indices]}
        ),
        "candidates": len(stage.pool),
        "versions": {
            "gradveil": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
    }
