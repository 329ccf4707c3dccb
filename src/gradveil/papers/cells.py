"""Cells: the trainings and audits that experiments are made of, each done once and shared.

A cell is a frozen value. Its key holds a digest of all its settings, so that the same cell of two
experiments, two runs or two machines has the same key.
"""

import gzip
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from gradveil.attacks import find
from gradveil.audits.job import AuditJob, Case, slug
from gradveil.audits.records import MODEL, RECORDS
from gradveil.core.errors import unknown
from gradveil.core.files import write_bytes
from gradveil.core.job_folder import SETTINGS
from gradveil.core.types import Protocol
from gradveil.data.registry import DATASETS, find_root, load
from gradveil.defenses import Defense
from gradveil.engine.device import find_device
from gradveil.models.checkpoints import read_settings
from gradveil.papers.costs import (
    SHAM,
    STARTING,
    area,
    attack_seconds,
    client_factor,
    training_seconds,
)
from gradveil.papers.networks import OF_DATA, with_constants
from gradveil.training.job import FINAL, Recipe, TrainingJob, step_path

if TYPE_CHECKING:
    from gradveil.audits.results import CaseResult

STAGES = (0, 1, 10, 50, 500)
"""Steps of a training whose weights are attacked on the way."""

DIGITS = 10  # of the digest in a key
LONGEST = 90  # letters of a key before its digest
MINI = "fashion-mnist-mini"
QUICK_IMAGES = 600  # training images of a quick run
QUICK_VICTIMS, QUICK_STEPS = 4, 5
GRID = "grid.png"
"""The picture that some cells keep."""

PACKED = f"{RECORDS}.gz"
"""The records of a kept audit: a fifth of the size, since hundreds of audits are kept."""


@dataclass(frozen=True)
class Workspace:
    """Where cells work: the folder for weights and unfinished audits, the data, the device."""

    work: Path
    root: Path | None = None
    device: str = "auto"
    progress: bool = False

    def weights(self, training: "Training") -> Path:
        """Return the folder of a training."""
        return self.work / "weights" / training.key

    def folder(self, cell: "Cell") -> Path:
        """Return the folder in which a cell works."""
        return self.work / "cells" / cell.key

    def has(self, data: str) -> bool:
        """Tell whether a data set lies below the root; a part of it suffices."""
        root = find_root(self.root)
        return any(each.here(root) for each in DATASETS if each.name == data)


def plain(value: object) -> Any:
    """Return a value as JSON has it: fields by name, defenses and policies as text."""
    if isinstance(value, Defense) or not is_dataclass(value):
        if isinstance(value, tuple):
            return [plain(each) for each in value]
        kept = isinstance(value, str | int | float | bool) or value is None
        return value if kept else str(value)
    return {each.name: plain(getattr(value, each.name)) for each in fields(value)}


def chosen(value: Any) -> dict[str, Any]:
    """Return the settings of a training or cell that are not as by default, as JSON has them.

    A setting that is added later leaves the keys of cells that do not use it as they are.
    """
    found: dict[str, Any] = {}
    for each in fields(value):
        mine = getattr(value, each.name)
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        if isinstance(mine, Training):
            found[each.name] = chosen(mine)
        elif mine != usual:
            found[each.name] = plain(mine)
    return found


def _key(name: str, settings: Mapping[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True)
    return f"{slug(name)[:LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"


@dataclass(frozen=True)
class Training:
    """A model trained by the published recipe; `epochs` 0 leaves it untrained.

    `constants` of its normalization are those of its data set (`data`), or cifar10. `at` takes the
    weights after so many steps, one of `STAGES`; those of a training have the same folder.
    """

    data: str
    model: str
    defense: Defense = field(default_factory=Defense)
    epochs: int = 60
    lr: float = 0.1
    fraction: float = 1.0
    loss_scale: float = 1.0
    constants: str = OF_DATA
    image_size: int | None = None
    augment: bool = True
    seed: int = 0
    at: int | None = None

    def __post_init__(self) -> None:
        if self.at is not None and self.at not in STAGES:
            raise unknown("step", str(self.at), map(str, STAGES))

    @cached_property
    def key(self) -> str:
        """The name of its folder."""
        settings = chosen(self)
        if self.at is not None:
            settings["at"] = STAGES
        return _key(f"{self.data}-{self.model}-{self.defense}", settings)

    @property
    def network(self) -> str:
        """The model, by the name that builds it."""
        return with_constants(self.model, self.constants)

    @property
    def seconds(self) -> float:
        """The time it takes on an H200, estimated."""
        if not self.epochs:
            return 0.0
        return training_seconds(self.data, self.model, self.epochs, self.fraction, self.image_size)

    def job(self) -> TrainingJob:
        """Return the job that trains it."""
        return TrainingJob(
            self.data,
            self.network,
            Recipe(self.epochs, self.lr, loss_scale=self.loss_scale),
            self.defense,
            self.augment,
            self.fraction,
            self.image_size,
            () if self.at is None else STAGES,
            seed=self.seed,
        )

    def checkpoint(self, workspace: Workspace) -> Path | None:
        """Return the weights, or None for an untrained model."""
        if not self.epochs:
            return None
        folder = workspace.weights(self)
        return folder / FINAL if self.at is None else step_path(folder, self.at)

    def there(self, workspace: Workspace) -> bool:
        """Tell whether nothing is left to train."""
        path = self.checkpoint(workspace)
        return path is None or path.is_file()

    def run(self, workspace: Workspace) -> None:
        """Train it, or go on where it stopped."""
        if self.there(workspace):
            return
        from gradveil.training.run import train  # Lightning takes seconds to import

        train(
            self.job(),
            workspace.weights(self),
            root=workspace.root,
            device=workspace.device,
            progress=workspace.progress,
        )

    def quick(self, workspace: Workspace) -> "Training":
        """Return a stand-in that trains in seconds on two cores, on the data there is."""
        there = workspace.has(self.data)
        data = self.data if there else MINI
        total = next(each.train for each in DATASETS if each.name == data)
        return replace(
            self,
            data=data,
            model="mlp" if self.model == "mlp" else "lenet",
            epochs=min(1, self.epochs),
            lr=0.01,
            fraction=min(1.0, QUICK_IMAGES / total),
            image_size=self.image_size if there else None,
            at=None,  # it has few steps
            constants=self.constants if there and self.model != "mlp" else OF_DATA,
        )


@dataclass(frozen=True)
class Cell(ABC):
    """A part of an experiment that is measured by itself, on a trained or untrained model."""

    kind: ClassVar[str]

    training: Training

    @cached_property
    def key(self) -> str:
        """The name of its folder of records."""
        return _key(f"{self.kind}-{self.name}", {"kind": self.kind, **chosen(self)})

    @property
    def name(self) -> str:
        """The cell in a few words, as part of its key."""
        return f"{self.training.data}-{self.training.model}-{self.training.defense}"

    @property
    def data(self) -> str:
        """The data set that it needs."""
        return self.training.data

    @property
    @abstractmethod
    def seconds(self) -> float:
        """The time it takes on an H200 without its training, estimated."""

    def left(self, workspace: Workspace) -> float:
        """Return the time of what is left, estimated as `seconds` are: all that cannot be told."""
        return self.seconds

    def begun(self, workspace: Workspace) -> bool:
        """Tell whether an earlier run left a part of it."""
        return workspace.folder(self).exists()

    def forget(self, workspace: Workspace) -> None:
        """Remove what an earlier run left of it."""
        rmtree(workspace.folder(self), ignore_errors=True)

    @property
    def n(self) -> int:
        """The number of images that the figures are over."""
        return int(getattr(self, "images", 0))

    def settings(self) -> dict[str, Any]:
        """Return all settings, as JSON has them."""
        found: dict[str, Any] = plain(self)
        return found

    @abstractmethod
    def measure(self, workspace: Workspace) -> dict[str, Any]:
        """Measure it, or go on where it stopped, and return the result; the model is trained."""

    def keep(self, workspace: Workspace, target: Path) -> None:
        """Copy further files of the result to the folder of records: by default there are none."""
        return

    def quick(self, workspace: Workspace) -> Self:
        """Return a stand-in that runs in seconds and proves nothing."""
        return replace(self, training=self.training.quick(workspace))


@dataclass(frozen=True)
class Trained(Cell):
    """The accuracy of a training, epoch by epoch."""

    kind: ClassVar[str] = "training"

    @property
    def seconds(self) -> float:
        return 0.0

    def measure(self, workspace: Workspace) -> dict[str, Any]:
        path = self.training.checkpoint(workspace)
        assert path is not None, "an untrained model has no accuracy to measure"
        facts = read_settings(path, ("test_accuracy", "history", "images"))
        kept = ("epoch", "train_loss", "train_accuracy", "test_accuracy", "seconds")
        history = [
            {name: round(float(each[name]), 5) for name in kept if name in each}
            for each in facts["history"]
        ]
        return {
            "accuracy": facts["test_accuracy"],
            "train_images": facts["images"],
            "test_images": len(load(self.data, "test", root=workspace.root)),
            "training_seconds": round(sum(each.get("seconds", 0.0) for each in history), 1),
            "history": history,
        }


def keep_file(path: Path, source: Path, workspace: Workspace, target: Path) -> None:
    """Copy a settings file; a checkpoint is named by its path below the folder of work."""
    text = path.read_bytes()
    for work in (workspace.work, workspace.work.absolute()):  # a search names whole paths
        text = text.replace(f'"{work}/'.encode(), b'"')
    write_bytes(target / path.relative_to(source), text)


def keep_case(case: "CaseResult", source: Path, workspace: Workspace, target: Path) -> None:
    """Copy an audit of the folder `source` to the folder of records, its records packed."""
    for path in (case.out / SETTINGS, case.out / MODEL):
        keep_file(path, source, workspace, target)
    packed = gzip.compress((case.out / RECORDS).read_bytes(), mtime=0)
    write_bytes(target / case.out.relative_to(source) / PACKED, packed)


@dataclass(frozen=True)
class Audited(Cell):
    """An attack on victims of a model, under a defense, with its controls.

    `first` takes the first images of the test split, else they are drawn over all classes. `clean`
    attacks the gradient as it is before a gradient defense. `controls` adds the positive control,
    and `sham` the attack on updates of other images. `grid` keeps a picture of the first images.
    An update is that of `batch_size` images, by `local_steps` steps of the client; `train_mode` has
    batch norm use the statistics of the batch.
    """

    kind: ClassVar[str] = "audit"

    defense: Defense = field(default_factory=Defense)
    attack: str = "adam-cosine"
    images: int = 64
    first: bool = False
    clean: bool = False
    controls: bool = True
    sham: bool = False
    grid: bool = False
    steps: int | None = None
    restarts: int | None = None
    seed: int = 0
    batch_size: int = 1
    local_steps: int = 1
    train_mode: bool = False

    @property
    def name(self) -> str:
        return f"{self.training.data}-{self.training.model}-{self.defense}-{self.attack}"

    @property
    def protocol(self) -> Protocol:
        """What the client does before it shares."""
        return Protocol(local_steps=self.local_steps, train_mode=self.train_mode)

    @property
    def seconds(self) -> float:
        model = self.training.model
        scale = area(self.data, self.training.image_size)
        settings = model, scale, self.steps, self.restarts
        found = attack_seconds(self.attack, self.images, *settings)
        found += attack_seconds(self.attack, min(self.images, SHAM), *settings) * self.sham
        return STARTING + found * client_factor(self.attack, self.local_steps, self.train_mode)

    @property
    def case(self) -> Case:
        """The case of the audit, but for its weights."""
        acts = str(self.defense.without_gradients()) != str(self.defense)
        return Case(self.defense, clean=self.clean and acts)

    def job(self, workspace: Workspace) -> AuditJob:
        """Return the job that audits it."""
        return AuditJob(
            self.training.network,
            self.training.data,
            {self.attack: find(self.attack)},
            cases=(replace(self.case, weights=self.training.checkpoint(workspace)),),
            images=self.images,
            batch_size=self.batch_size,
            protocol=self.protocol,
            steps=self.steps,
            restarts=self.restarts,
            first=0 if self.first else None,
            image_size=self.training.image_size,
            positive=self.controls,
            sham=self.sham,
            seed=self.seed,
        )

    def measure(self, workspace: Workspace) -> dict[str, Any]:
        from gradveil.audits.run import run_audit

        on_gpu = find_device(workspace.device).type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        result = run_audit(
            self.job(workspace),
            workspace.folder(self),
            root=workspace.root,
            device=workspace.device,
            progress=workspace.progress,
        )
        (case,) = result.cases
        return {
            "case": case.out.name,
            "accuracy": case.model and case.model.accuracy,
            "attack_seconds": sum(row.seconds for row in case.rows if row.truth == "used"),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        }

    def keep(self, workspace: Workspace, target: Path) -> None:
        from gradveil.audits.results import AuditResult

        source = workspace.folder(self)
        (case,) = AuditResult.read(source).cases
        keep_file(source / SETTINGS, source, workspace, target)
        keep_case(case, source, workspace, target)
        if self.grid:
            from gradveil.report.pictures import draw_grid

            draw_grid(case, self.attack, target / GRID)

    def quick(self, workspace: Workspace) -> Self:
        steps = (
            None if self.attack in ("closed-form", "dense-inversion", "peeling") else QUICK_STEPS
        )
        return replace(
            self,
            training=self.training.quick(workspace),
            images=max(QUICK_VICTIMS, self.batch_size),
            controls=False,
            steps=steps,
            restarts=steps and 1,
        )
