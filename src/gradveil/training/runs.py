"""The training job: a value that says what to train, and the function that trains it into a folder, or goes on where it stopped."""

import json
import logging
import platform
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from gradveil import __version__
from gradveil.core.devices import find_device
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.files import write_text
from gradveil.data import Images, load
from gradveil.models import build
from gradveil.models.checkpoints import load_checkpoint, read_settings, save_checkpoint
from gradveil.training.callbacks import RESUME, Bar, Saving
from gradveil.training.modules import ImageData, Training
from gradveil.training.recipe import Recipe
from gradveil.transforms import Policy, Preparation

SETTINGS = "settings.json"
FINAL = "model.safetensors"
PRECISIONS = ("auto", "32", "bf16")


@dataclass(frozen=True)
class Job:
    """Everything that decides the result of a training run."""

    data: str
    model: str
    recipe: Recipe = field(default_factory=Recipe)
    policy: Policy = field(default_factory=Policy)
    augment: bool = True
    fraction: float = 1.0
    image_size: int | None = None
    save_at: tuple[int, ...] = ()
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if any(step < 0 for step in self.save_at):
            raise GradveilError(f"save-at {min(self.save_at)}: steps are counted from 0, the untrained model")

    def settings(self) -> dict[str, Any]:
        """As plain values, for the JSON files."""
        plain = asdict(self)
        recipe: dict[str, Any] = plain.pop("recipe")
        return plain | recipe | {"policy": str(self.policy), "save_at": sorted(self.save_at)}

    def preparation(self) -> Preparation:
        return Preparation(policy=self.policy) if self.augment else Preparation(padding=0, flip=False, policy=self.policy)


@dataclass(frozen=True)
class Trained:
    """What a run gave, and where it is."""

    out: Path
    checkpoint: Path
    accuracy: float
    epochs: int
    steps: int
    history: tuple[Mapping[str, float], ...]


def train(job: Job, out: Path, *, root: Path | None = None, device: str = "auto", progress: bool = True) -> Trained:
    """Train into `out`. A run that was stopped goes on after its last whole epoch; one that is done is read back."""
    place = find_device(device)
    _claim(out, job)
    splits = [load(job.data, split, root=root, image_size=job.image_size) for split in ("train", "test")]
    if job.fraction != 1.0:
        splits[0] = load(job.data, "train", root=root, image_size=job.image_size, fraction=job.fraction, seed=job.seed)
    train_split, test_split = splits
    steps = -(-len(train_split) // job.recipe.batch_size) * job.recipe.epochs
    if job.save_at and max(job.save_at) > steps:
        raise GradveilError(f"save-at {max(job.save_at)}: this training has {steps} steps")
    model = _model(job, train_split)
    if (out / FINAL).is_file():
        return _read_back(out, model, steps)
    module = _fit(job, model, ImageData(train_split, test_split, job.preparation(), job.recipe.batch_size, job.seed), out, place, progress)
    facts = _facts(job, train_split, steps, place) | {"test_accuracy": module.accuracy, "history": module.history}
    save_checkpoint(out / FINAL, model, facts)
    (out / RESUME).unlink(missing_ok=True)
    return _trained(out, facts)


def _model(job: Job, split: Images) -> nn.Module:
    return build(
        job.model,
        channels=split.channels,
        size=split.size,
        classes=len(split.classes),
        mean=split.mean,
        std=split.std,
        seed=job.seed,
    )


def _fit(job: Job, model: nn.Module, data: ImageData, out: Path, place: torch.device, progress: bool) -> Training:
    on_gpu = place.type == "cuda"
    bf16 = job.precision == "bf16" or (job.precision == "auto" and on_gpu)
    if on_gpu:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # an overload that torch's annotations lack
    module = Training(model, job.recipe, bf16, graphs=on_gpu)

    def save(path: Path, step: int) -> None:
        save_checkpoint(path, model, _facts(job, data.splits["train"], step, place))

    callbacks: list[Callback] = [Saving(out, job.save_at, save)]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")  # advice about workers and loggers that this loop does not use
        trainer = L.Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=1,
            max_epochs=job.recipe.epochs,
            callbacks=[*callbacks, Bar()] if progress else callbacks,
            logger=_tensorboard(out),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            reload_dataloaders_every_n_epochs=1,
            default_root_dir=out,
        )
        stopped = out / RESUME
        trainer.fit(module, datamodule=data, ckpt_path=stopped if stopped.is_file() else None, weights_only=True)
        if not module.history:  # no epoch was asked for: the untrained model
            trainer.validate(module, datamodule=data, verbose=False)
            for step in job.save_at:
                save(out / "steps" / f"step-{step:06d}.safetensors", step)
    return module


def _tensorboard(out: Path) -> TensorBoardLogger | None:
    try:
        return TensorBoardLogger(out, name="tensorboard", version="")
    except ModuleNotFoundError:  # neither tensorboard nor tensorboardX is installed; metrics.csv has the same figures
        return None


def _claim(out: Path, job: Job) -> None:
    """Make the folder this job's own, or say why it cannot be."""
    path, wanted = out / SETTINGS, job.settings()
    if path.is_file():
        found = json.loads(path.read_text())
        other = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
        if other:
            changes = ", ".join(f"{key} {found.get(key)} there, {wanted.get(key)} here" for key in other)
            raise GradveilError(f"{out} holds a run with other settings ({changes}): choose another --out")
    elif out.is_dir() and any(out.iterdir()):
        raise GradveilError(f"{out} is not empty and holds no training run: choose another --out")
    else:
        write_text(path, json.dumps(wanted, indent=2, sort_keys=True) + "\n")


def _facts(job: Job, split: Images, step: int, place: torch.device) -> dict[str, Any]:
    return job.settings() | {
        "step": step,
        "channels": split.channels,
        "image_size": split.size,
        "classes": len(split.classes),
        "images": len(split),
        "versions": {"gradveil": __version__, "torch": torch.__version__, "lightning": L.__version__, "python": platform.python_version()},
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
    }


def _read_back(out: Path, model: nn.Module, steps: int) -> Trained:
    load_checkpoint(out / FINAL, model)
    return _trained(out, read_settings(out / FINAL) | {"step": steps})


def _trained(out: Path, facts: Mapping[str, Any]) -> Trained:
    return Trained(out, out / FINAL, facts["test_accuracy"], facts["epochs"], facts["step"], tuple(facts["history"]))
